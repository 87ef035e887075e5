//! The vocabulary projection of models that share it with the embedding.

use std::ops::Range;

use candle_core::{DType, Device, Result};
use moe_kernels::names::TensorNames;

use super::{QuantTensors, TensorFiles};
use crate::config::Config;

/// The key of config.json that ties the projection to the embedding.
pub(super) const TIED: &str = "tie_word_embeddings";

/// Elements that are compared at once.
const PIECE: usize = 1 << 20;

/// Whether a checkpoint has a vocabulary projection with other values than its embedding. If so, the projection is
/// used, even if config.json says that it is tied, as in transformers. A quantised projection never has the same values
/// as the embedding.
///
/// Both tensors are read up to the first difference. If one of them is missing, or their shapes differ, a projection
/// that is there counts as a separate one, because the list of tensors needs it.
///
/// # Errors
/// Values that cannot be read.
pub fn has_own_head(files: &TensorFiles, names: &TensorNames) -> Result<bool> {
    let [embedding, head] = [names.embedding, names.lm_head].map(|module| format!("{module}.weight"));
    if !QuantTensors::has(files, &head) {
        return Ok(false);
    }
    let (Some(left), Some(right)) = (files.info(&embedding), files.info(&head)) else { return Ok(true) };
    if left.shape != right.shape || left.dtype.is_none() || right.dtype.is_none() {
        return Ok(true);
    }
    if left.dtype == right.dtype {
        return Ok(!files.same_bytes(&embedding, &head)?);
    }
    // If the dtypes differ, the values are compared.
    let rows = left.shape.first().copied().unwrap_or(0);
    let width = left.shape.iter().skip(1).product::<usize>();
    for start in (0..rows).step_by((PIECE / width.max(1)).max(1)) {
        let held = start..(start + (PIECE / width.max(1)).max(1)).min(rows);
        if !same_rows(files, [&embedding, &head], held)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn same_rows(files: &TensorFiles, names: [&str; 2], held: Range<usize>) -> Result<bool> {
    let width = |name: &str| files.info(name).and_then(|info| info.shape.get(1).copied()).unwrap_or(1);
    let read = |name: &str| {
        let ranges = [held.clone(), 0..width(name)];
        files.load_slice(name, &ranges, DType::F32, &Device::Cpu)?.flatten_all()?.to_vec1::<f32>()
    };
    Ok(read(names[0])? == read(names[1])?)
}

/// Whether a config ties the projection to the embedding, or may do so by its family's default, although the checkpoint
/// has a separate projection.
///
/// # Errors
/// The errors of [`has_own_head`].
pub(super) fn is_tied_in_vain(config: &Config, files: &TensorFiles, names: &TensorNames) -> Result<bool> {
    // A value of another type is an error where the model's config is read.
    let tied = config.bool_or(&[TIED], true).unwrap_or(false);
    Ok(tied && has_own_head(files, names)?)
}
