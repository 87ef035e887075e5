//! Damaged headers and tensors are refused or read, and never cause a panic. The fuzz target `quant` tests the same for
//! longer.

use moe_quant::safetensors::tensor::TensorView;
use moe_quant::{QuantConfig, Reader, dequantise};
use proptest::prelude::*;

use crate::fixtures::{cases, headers};

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn headers_with_other_bytes(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let headers = headers();
        let mut text = which.get(&headers).1.clone().into_bytes();
        for (at, byte) in changes {
            let at = at.index(text.len());
            text[at] = byte;
        }
        let Ok(header) = serde_json::from_slice(&text) else { return Ok(()) };
        match QuantConfig::from_header("quantization_config", &header) {
            Ok(config) => drop(config.format_of("model.layers.0.mlp.experts.1.up_proj")),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// The fuzzer begins with headers that can be read.
#[test]
fn seeds_of_the_fuzz_target_are_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/quant");
    let mut seeds = 0;
    for seed in std::fs::read_dir(folder).unwrap() {
        let path = seed.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let header = bytes.split(|byte| *byte == 0).next().unwrap();
        let header = serde_json::from_slice(header).unwrap();
        let read = QuantConfig::from_header("quantization_config", &header);
        assert!(read.is_ok(), "{}: {}", path.display(), read.unwrap_err());
        seeds += 1;
    }
    assert!(seeds >= 16, "{seeds} seeds");
}

#[test]
fn tensors_with_other_bytes() {
    let mut state = 7u64;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let mut read = 0;
    let mut refused = 0;
    for case in cases() {
        for _ in 0..40 {
            let at = next();
            let byte = next() as u8;
            let damaged = |view: TensorView<'_>| {
                let mut bytes = view.data().to_vec();
                let at = at % bytes.len();
                bytes[at] = byte;
                bytes
            };
            let suffixes = case.suffixes();
            let chosen = &suffixes[at % suffixes.len()];
            let bytes = case.tensor(chosen).map(damaged).unwrap();
            let find = |suffix: &str| {
                let view = case.tensor(suffix)?;
                if suffix != chosen {
                    return Some(view);
                }
                TensorView::new(view.dtype(), view.shape().to_vec(), &bytes).ok()
            };
            match Reader::new(&case.name, case.format, case.shape, find).map(|reader| dequantise(&reader)) {
                Ok(Ok(weights)) => read += usize::from(weights.len() == case.weights.len()),
                Ok(Err(error)) => refused += usize::from(error.to_string().contains(&case.name)),
                Err(error) => refused += usize::from(error.to_string().contains(&case.name)),
            }
        }
    }
    assert_eq!(read + refused, cases().len() * 40);
    assert!(read > 0 && refused > 0);
}
