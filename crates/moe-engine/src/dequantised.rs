//! What a run says of quantised weights that it loads as floats.

use std::collections::BTreeSet;

use candle_core::DType;
use model_runtime::{Checkpoint, QuantConfig, QuantScheme};

use crate::error::Result;
use crate::family::ModelSpec;
use crate::footprint::{Footprint, gib};
use crate::run_config::RunConfig;

/// Says how the weights of a quantised checkpoint are stored, and what they take as floats of this dtype, on all ranks
/// together. `matrices` are the names of the model's matrices.
///
/// # Errors
/// Sizes that the ranks cannot divide; a quantisation that cannot be read.
pub(crate) fn told<'a>(
    model: &dyn ModelSpec,
    checkpoint: &Checkpoint,
    stored: &QuantConfig,
    matrices: impl Iterator<Item = &'a str>,
    run: &RunConfig,
    dtype: DType,
) -> Result<String> {
    let mut schemes = BTreeSet::new();
    for module in matrices.filter_map(|name| name.strip_suffix(".weight")) {
        let scheme = stored.scheme_of(module)?;
        if scheme != QuantScheme::NONE {
            schemes.insert(scheme.to_string());
        }
    }
    let schemes: Vec<_> = schemes.into_iter().collect();
    let world = run.parallel.world_size()?;
    let weights = |quantisation: &QuantConfig| -> Result<String> {
        let all = Footprint::of(model, &checkpoint.config, Some(quantisation), run, 0..world, dtype)?;
        Ok(gib(all.weights))
    };
    Ok(format!(
        "`dequantise`: weights of {} ({}) are loaded as {}: {} in memory instead of {}",
        stored.method(),
        schemes.join("; "),
        dtype.as_str(),
        weights(&stored.clone().dequantised())?,
        weights(stored)?
    ))
}
