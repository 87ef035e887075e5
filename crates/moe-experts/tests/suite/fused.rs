//! Tests of fused experts that are called with candle tensors.

use candle_core::{DType, Device, Result, Tensor};
use moe_experts::{Activation, ExpertWeights, FusedExperts, NO_EXPERT};
use proptest::prelude::*;

use crate::reference::{Problem, example, problems, values};

/// Returns the output [T, H] in f64, and the router weights [T, K].
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
        (refused(&x.to_dtype(DType::F16)?, &ids, &w), "expected hidden of dtype f32, got f16"),
        (refused(&x.unsqueeze(0)?, &ids, &w), "expected hidden with 2 dimensions, got [1, 5, 24]"),
        // No view has five dimensions or holds f64, so these are refused before there is one.
        (refused(&x.reshape((1, 1, 1, 5, 24))?, &ids, &w), "hidden with 2 dimensions, got [1, 1, 1, 5, 24]"),
        (refused(&x, &ids, &w.to_dtype(DType::F64)?), "expected topk_weights of dtype f32, got f64"),
        (refused(&x, &ids.flatten_all()?, &w), "expected topk_ids with 2 dimensions, got [10]"),
    ] {
        assert!(got.contains(want), "{got}");
    }
    let slots = |ids: &Tensor, map: &Tensor| experts.slot_rows(&x, ids, Some(map)).unwrap_err().to_string();
    let map = Tensor::from_slice(&[0i32, 1, 2, 3], 4, dev)?;
    for (got, want) in [
        (slots(&ids.flatten_all()?, &map), "experts: expected topk_ids with 2 dimensions, got [10]"),
        (slots(&ids, &map.to_dtype(DType::I64)?), "experts: expected expert_map of dtype i32, got i64"),
        (slots(&ids, &map.reshape((2, 2))?), "experts: expected expert_map with dims [4], got [2, 2]"),
    ] {
        assert!(got.starts_with(want), "{got}");
    }
    let name = format!("{experts:?}");
    assert!(name.contains("cpu") && name.contains("hidden_size: 24"), "{name}");
    Ok(())
}

#[test]
fn slot_rows_under_a_map_weighted_and_added_are_the_output() -> Result<()> {
    let dev = &Device::Cpu;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let p = example(dtype);
        let experts = FusedExperts::new(p.weights()?, p.activation)?;
        let rows = p.rows()?;
        let local = Tensor::from_slice(&p.ids, (p.tokens, p.top_k), dev)?;
        let weights = Tensor::rand(0f32, 1., (p.tokens, p.top_k), dev)?;
        let want = experts.forward(&rows, &local, &weights)?;
        // Expert e of the weights has the id 2 e + 1. Expert 0 is on another rank, and no token chooses it.
        let count = p.weights()?.shape().num_local_experts;
        let map: Vec<i32> = (0..2 * count as i32).map(|id| if id % 2 == 1 { id / 2 } else { -1 }).collect();
        let map = Tensor::from_slice(&map, map.len(), dev)?;
        let ids = ((local * 2.)? + 1.)?;
        let slots = experts.slot_rows(&rows, &ids, Some(&map))?;
        assert_eq!((slots.dims(), slots.dtype()), (&[p.tokens, p.top_k, p.hidden][..], DType::F32));
        let sum = slots.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?;
        let difference = (sum - want.to_dtype(DType::F32)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < if dtype == DType::F32 { 1e-5 } else { 0.05 }, "{dtype:?}: {difference}");
        let elsewhere = Tensor::zeros((p.tokens, p.top_k), DType::U32, dev)?;
        let none = experts.slot_rows(&rows, &elsewhere, Some(&map))?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert_eq!(none, 0.0);
    }
    Ok(())
}

#[test]
fn weights_keep_their_order_on_request_with_the_same_bits() -> Result<()> {
    let dev = &Device::Cpu;
    let w13 = Tensor::randn(0f32, 0.1, (3, 64, 48), dev)?;
    let w2 = Tensor::randn(0f32, 0.1, (3, 48, 32), dev)?;
    let weights = ExpertWeights::new(w13, w2, None, None)?;
    let packed = FusedExperts::new(weights.clone(), Activation::SwiGlu)?;
    let rows = FusedExperts::keeping_order(weights, Activation::SwiGlu)?;
    let x = Tensor::randn(0f32, 1., (5, 48), dev)?;
    let ids = Tensor::new(&[[0u32, 1], [2, 0], [1, 2], [0, 2], [1, 0]], dev)?;
    let topk_weights = Tensor::rand(0f32, 1., (5, 2), dev)?;
    let out = |experts: &FusedExperts| experts.forward(&x, &ids, &topk_weights)?.to_vec2::<f32>();
    assert_eq!(out(&packed)?, out(&rows)?);
    assert_eq!(out(&packed.clone())?, out(&rows)?, "a clone shares the weights");
    Ok(())
}
