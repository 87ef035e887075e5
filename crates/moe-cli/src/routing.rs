//! Routing recordings as files: safetensors with `routed_experts` [T, L_moe, K] u32, logical ids.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use model_runtime::RoutedExperts;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

const NAME: &str = "routed_experts";

/// Writes a recording.
pub fn write(path: &Path, routed: &RoutedExperts) -> Result<()> {
    let bytes: Vec<u8> = routed.ids().iter().flat_map(|id| id.to_le_bytes()).collect();
    let shape = vec![routed.tokens(), routed.layers(), routed.top_k()];
    let view = TensorView::new(Dtype::U32, shape, &bytes)?;
    let file = safetensors::serialize(HashMap::from([(NAME, view)]), None)?;
    std::fs::write(path, file).with_context(|| format!("cannot write {}", path.display()))
}

/// Reads a recording.
pub fn read(path: &Path) -> Result<RoutedExperts> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let what = || format!("{} is not a routing recording", path.display());
    let file = SafeTensors::deserialize(&bytes).with_context(what)?;
    let tensor = file.tensor(NAME).with_context(what)?;
    ensure!(
        tensor.dtype() == Dtype::U32 && tensor.shape().len() == 3,
        "{}: expected {NAME} of dtype U32 and shape [T, L_moe, K], got {:?} {:?}",
        path.display(),
        tensor.dtype(),
        tensor.shape()
    );
    let ids = tensor.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let &[tokens, layers, top_k] = tensor.shape() else { anyhow::bail!(what()) };
    Ok(RoutedExperts::from_ids(tokens, layers, top_k, ids)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_survives_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.safetensors");
        let routed = RoutedExperts::from_ids(2, 1, 3, vec![1, 2, 3, 4, 5, u32::MAX]).unwrap();
        write(&path, &routed).unwrap();
        assert_eq!(read(&path).unwrap(), routed);
        std::fs::write(&path, b"not safetensors").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is not a routing recording"));
        assert!(read(&dir.path().join("none")).unwrap_err().to_string().contains("cannot read"));
    }
}
