//! What a run says of quantised weights that it loads as floats.

use std::collections::BTreeSet;

use candle_core::DType;
use model_runtime::{Checkpoint, QuantScheme, TensorSpec};

use crate::error::Result;
use crate::family::ModelSpec;
use crate::footprint::{Footprint, gib};
use crate::run_config::RunConfig;

/// Says how the weights of a checkpoint are stored that is loaded as floats of this dtype, and the memory of both forms
/// on all ranks together; `None` if it is not loaded as floats. `tensors` are the model's.
///
/// # Errors
/// Sizes that the ranks cannot divide; a quantisation that cannot be read.
pub(crate) fn told(
    model: &dyn ModelSpec,
    checkpoint: &Checkpoint,
    tensors: &[TensorSpec],
    run: &RunConfig,
    dtype: DType,
) -> Result<Option<String>> {
    let config = checkpoint.quantisation.as_ref().filter(|config| config.is_dequantised());
    let Some(config) = config else { return Ok(None) };
    let ranks = 0..run.parallel.world_size()?;
    let footprint = Footprint::of(model, &checkpoint.config, Some(config), run, ranks, dtype)?;
    let mut schemes = BTreeSet::new();
    for spec in tensors.iter().filter(|spec| spec.shape.len() == 2) {
        let Some(module) = spec.name.strip_suffix(".weight") else { continue };
        let scheme = config.format_of(module)?.scheme();
        if scheme != QuantScheme::NONE {
            schemes.insert(scheme.to_string());
        }
    }
    let schemes: Vec<_> = schemes.into_iter().collect();
    Ok(Some(format!(
        "`dequantise`: weights of {} ({}) are loaded as {}: {} in memory instead of {}",
        config.method(),
        schemes.join("; "),
        dtype.as_str(),
        gib(footprint.weights),
        gib(footprint.stored.unwrap_or(footprint.weights))
    )))
}
