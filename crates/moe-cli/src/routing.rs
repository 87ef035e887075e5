//! Recordings of routing. In files they are safetensors with `routed_experts` [T, L_moe, K] u32. In answers they are
//! arrays of NumPy in base64, as vLLM writes them. Ids are logical.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use model_runtime::config::limits;
use model_runtime::{Config, RoutedExperts};
use moe_layer::hf::{NUM_EXPERTS, TOP_K};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::error::usage;

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

/// Checks that a recording can come from a model, as far as the model's config shows.
///
/// # Errors
/// Another number of experts per token, more layers than the model has, or an expert that it does not have.
pub fn check(recording: &RoutedExperts, config: &Config) -> Result<()> {
    const FLAG: &str = "--replay-routed-experts";
    let size = |keys: &[&str], bounds| config.opt_size(keys, bounds);
    let layers = size(&["num_hidden_layers"], limits::LAYERS)?.unwrap_or(usize::MAX);
    let top_k = size(&TOP_K, limits::EXPERTS)?;
    let experts = size(&NUM_EXPERTS, limits::EXPERTS)?.unwrap_or(usize::MAX);
    let shown_layers = recording.layers();
    let shown_top_k = recording.top_k();
    if shown_layers > layers {
        return Err(usage(format!(
            "{FLAG}: expected at most {layers} layers as the model has, got {shown_layers}"
        )));
    }
    if let Some(top_k) = top_k.filter(|top_k| *top_k != shown_top_k) {
        return Err(usage(format!("{FLAG}: expected {top_k} experts per token, got {shown_top_k}")));
    }
    match recording.ids().iter().find(|id| **id as usize >= experts) {
        Some(id) => Err(usage(format!("{FLAG}: expected ids of the model's {experts} experts, got {id}"))),
        None => Ok(()),
    }
}

/// Writes a recording in the form that vLLM has in `choices[i].routed_experts`: the output of `numpy.save` for an array
/// [T, L_moe, K], in base64. Its dtype is the smallest of u8, u16 and u32 that holds the ids.
pub fn base64_npy(routed: &RoutedExperts) -> String {
    let most = routed.ids().iter().copied().max().unwrap_or(0);
    let (dtype, width) = match most {
        0..=0xff => ("|u1", 1),
        0x100..=0xffff => ("<u2", 2),
        _ => ("<u4", 4),
    };
    let shape = format!("({}, {}, {})", routed.tokens(), routed.layers(), routed.top_k());
    let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
    // The data begins at a multiple of 64 bytes, after magic, version, the header's length and a newline.
    let padded = (10 + header.len() + 1).next_multiple_of(64) - 11;
    let length = (padded as u16 + 1).to_le_bytes();
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(length);
    file.extend(format!("{header:<padded$}\n").bytes());
    routed.ids().iter().for_each(|id| file.extend(&id.to_le_bytes()[..width]));
    base64(&file)
}

/// Encodes base64 by RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit) & 63) as usize;
            text.push(if digit <= group.len() { char::from(DIGITS[index]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let encoded = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(encoded, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    }

    /// Version 1.0 of the format; NumPy reads it as `numpy.array([[[1, 2, 3]], [[4, 5, 300]]], "<u2")`.
    #[test]
    fn an_array_is_what_numpy_saves() {
        let routed = RoutedExperts::from_ids(2, 1, 3, vec![1, 2, 3, 4, 5, 300]).unwrap();
        let file = concat!(
            "k05VTVBZAQB2AHsnZGVzY3InOiAnPHUyJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIs",
            "IDEsIDMpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoB",
            "AAIAAwAEAAUALAE="
        );
        assert_eq!(base64_npy(&routed), file);
        let small = RoutedExperts::from_ids(1, 1, 2, vec![255, 0]).unwrap();
        assert!(base64_npy(&small).ends_with("IAr/AA=="), "bytes of ids below 256");
    }

    #[test]
    fn a_recording_of_another_model_is_told_by_the_config() {
        let config = r#"{"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 8}"#;
        let config = Config::parse(config, "config.json").unwrap();
        let routed =
            |layers, top_k, ids: &[u32]| RoutedExperts::from_ids(1, layers, top_k, ids.to_vec()).unwrap();
        check(&routed(2, 2, &[0, 7, 1, 2]), &config).unwrap();
        for (routed, words) in [
            (routed(3, 2, &[0; 6]), "at most 2 layers"),
            (routed(1, 3, &[0, 1, 2]), "expected 2 experts per token, got 3"),
            (routed(1, 2, &[0, 8]), "8 experts, got 8"),
        ] {
            let error = check(&routed, &config).unwrap_err();
            assert!(error.to_string().contains(words) && crate::error::is_usage(&error), "{error}");
        }
    }

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
