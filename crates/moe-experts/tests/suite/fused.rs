//! The candle door.

use candle_core::{DType, Device, Result, Tensor};
use moe_experts::{FusedExperts, NO_EXPERT};
use proptest::prelude::*;

use crate::reference::{Problem, example, problems, values};

/// Output [T, H] in f64, and the router weights [T, K].
fn forward(p: &Problem) -> Result<(Vec<f64>, Vec<f64>)> {
    let experts = FusedExperts::new(p.weights()?, p.activation)?;
    let weights = values(p.ids.len(), 1., 11, DType::F32);
    let ids = Tensor::from_slice(&p.ids, (p.tokens, p.top_k), &Device::Cpu)?;
    let topk_weights =
        Tensor::from_slice(&weights, (p.tokens, p.top_k), &Device::Cpu)?.to_dtype(DType::F32)?;
    let out = experts.forward(&p.rows()?, &ids, &topk_weights)?;
    assert_eq!((out.dims(), out.dtype()), (&[p.tokens, p.hidden][..], p.dtype));
    Ok((out.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?, weights))
}

proptest! {
    #[test]
    fn a_token_is_the_weighted_sum_of_its_experts(p in problems()) {
        let p = Problem { ids: (0..p.ids.len()).map(|s| p.local(s).map_or(NO_EXPERT, |e| e as u32)).collect(), map: None, ..p };
        let (out, weights) = forward(&p).unwrap();
        for (t, got) in out.chunks(p.hidden).enumerate() {
            let mut want = vec![(0f64, 0f64, 0f64); p.hidden];
            for (k, w) in weights[t * p.top_k..(t + 1) * p.top_k].iter().enumerate() {
                let Some(e) = p.local(t * p.top_k + k) else { continue };
                for (want, (row, bound)) in want.iter_mut().zip(p.expert_row(t, e)) {
                    *want = (want.0 + w * row, want.1 + w.abs() * bound, want.2 + (w * row).abs());
                }
            }
            let rounding = match p.dtype { DType::F32 => -24, DType::BF16 => -8, _ => -11 };
            for (got, (want, bound, magnitude)) in got.iter().zip(want) {
                let bound = bound + magnitude * 2f64.powi(-20) + want.abs() * 2f64.powi(rounding) + 1e-7;
                prop_assert!((got - want).abs() <= bound, "token {}: got {}, want {} ± {}", t, got, want, bound);
            }
        }
    }
}

#[test]
fn bad_tensors_are_errors() -> Result<()> {
    let p = example(DType::F32);
    let experts = FusedExperts::new(p.weights()?, p.activation)?;
    let dev = &Device::Cpu;
    let x = p.rows()?;
    let ids = Tensor::from_slice(&p.ids, (5, 2), dev)?;
    let w = Tensor::ones((5, 2), DType::F32, dev)?;
    let refused =
        |x: &Tensor, ids: &Tensor, w: &Tensor| experts.forward(x, ids, w).map(drop).unwrap_err().to_string();
    for (got, want) in [
        (refused(&x, &(&ids + 3.)?, &w), "expert id 4 is out of range; expected 0..4"),
        (refused(&x, &ids.to_dtype(DType::I64)?, &w), "expected topk_ids of dtype u32, got i64"),
        (refused(&x, &ids.narrow(0, 0, 4)?, &w), "expected topk_ids with dims [5, 2], got [4, 2]"),
        (refused(&x, &ids, &w.to_dtype(DType::BF16)?), "expected topk_weights of dtype f32, got bf16"),
        (refused(&x, &ids, &w.narrow(0, 0, 4)?), "expected topk_weights with dims [5, 2], got [4, 2]"),
        (refused(&x.to_dtype(DType::F16)?, &ids, &w), "expected rows of dtype f32, got f16"),
        (refused(&x.unsqueeze(0)?, &ids, &w), "dims [1, 5, 24] are not in the Standard format"),
    ] {
        assert!(got.contains(want), "{got}");
    }
    let name = format!("{experts:?}");
    assert!(name.contains("cpu") && name.contains("hidden_size: 24"), "{name}");
    Ok(())
}
