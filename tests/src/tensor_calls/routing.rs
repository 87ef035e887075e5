//! Calls of moe-router and moe-dispatch: routing, dispatch around a caller's experts, slots by expert, reduction.

use candle_core::{DType, Result, Tensor};
use moe_dispatch::{
    Dispatcher, LocalExperts, NoEp, PrepareFinalize, group_slots, moe_align_block_size, weight_and_reduce,
};
use moe_kernels::{Exec, StepContext, WeightAndReduce};
use moe_router::{Routed, Router, RouterConfig, RouterParams};

use super::case::{Call, Case};

pub const CALLS: &[(&str, Call)] = &[
    ("Router::route", |case| results(router(case)?.route(&logits(case)?)?)),
    ("Router::route_step", |case| {
        let logits = logits(case)?;
        let hidden = rows(case)?;
        results(router(case)?.route_step(
            &logits,
            Some(&hidden),
            0,
            &mut StepContext::default(),
            &mut Exec::on(&case.device)?,
        )?)
    }),
    ("Router::gate_and_route", |case| {
        let gate = case.weight(&[case.sizes.experts + 1, case.sizes.hidden], 1.)?;
        let mut ex = Exec::on(&case.device)?;
        results(router(case)?.gate_and_route(
            &rows(case)?,
            &gate,
            None,
            0,
            &mut StepContext::default(),
            &mut ex,
        )?)
    }),
    ("Dispatcher, NoEp", |case| dispatch(case, NoEp::new().with_local_experts(local(case)?))),
    ("Dispatcher, batched NoEp", |case| dispatch(case, NoEp::batched(local(case)?, case.sizes.rows()))),
    ("group_slots", |case| {
        let (offsets, slots) = group_slots(&case.routing()?.0, Some(&map(case)?), case.sizes.experts - 1)?;
        let used = offsets.to_device(&candle_core::Device::Cpu)?.to_vec1::<u32>()?;
        let used = used.last().copied().unwrap_or(0) as usize;
        Ok(vec![offsets, slots.narrow(0, 0, used)?])
    }),
    ("moe_align_block_size", |case| {
        let all = moe_align_block_size(&case.routing()?.0, 4, case.sizes.experts - 1, Some(&map(case)?))?;
        Ok(vec![all.sorted_token_ids, all.expert_ids, all.num_tokens_post_padded])
    }),
    ("weight_and_reduce, NoOp", |case| {
        let (ids, weights) = case.routing()?;
        let rows = case.input(&[case.sizes.rows(), case.sizes.hidden], DType::F32)?;
        Ok(vec![weight_and_reduce(WeightAndReduce::NoOp, &rows, &ids, &weights, None, case.dtype)?])
    }),
    ("weight_and_reduce, Contiguous", |case| {
        let (ids, weights) = case.routing()?;
        let rows = case.input(&[case.sizes.rows(), case.sizes.top_k, case.sizes.hidden], DType::F32)?;
        let map = map(case)?;
        Ok(vec![weight_and_reduce(
            WeightAndReduce::Contiguous,
            &rows,
            &ids,
            &weights,
            Some(&map),
            case.dtype,
        )?])
    }),
    ("weight_and_reduce, NaiveBatched", |case| {
        let (ids, weights) = case.routing()?;
        let dims = [case.sizes.experts, case.sizes.rows().max(1), case.sizes.hidden];
        let rows = case.input(&dims, DType::F32)?;
        let strategy = WeightAndReduce::NaiveBatched { rank: 0 };
        Ok(vec![weight_and_reduce(strategy, &rows, &ids, &weights, None, case.dtype)?])
    }),
];

/// Token rows [T, H].
fn rows(case: &Case) -> Result<Tensor> {
    case.input(&[case.sizes.rows(), case.sizes.hidden], case.dtype)
}

fn router(case: &Case) -> Result<Router> {
    let config = RouterConfig {
        num_zero_experts: 1,
        correction_bias: true,
        ..RouterConfig::new(case.sizes.experts, case.sizes.top_k)
    };
    let bias = Tensor::zeros(case.sizes.experts + 1, DType::F32, &case.device)?;
    Router::new(config, RouterParams { correction_bias: Some(bias), ..RouterParams::default() })
}

/// Logits [T, E + 1] f32: one zero expert.
fn logits(case: &Case) -> Result<Tensor> {
    case.input(&[case.sizes.rows(), case.sizes.experts + 1], DType::F32)
}

fn results(routed: Routed) -> Result<Vec<Tensor>> {
    let mut all = vec![routed.topk_ids, routed.topk_weights];
    all.extend(routed.zero_expert_weights);
    Ok(all)
}

/// Expert 1 lives elsewhere, the others here in order.
fn places(case: &Case) -> Vec<i32> {
    (0..case.sizes.experts as i32).map(|e| if e == 1 { -1 } else { e - i32::from(e > 1) }).collect()
}

fn map(case: &Case) -> Result<Tensor> {
    Tensor::new(places(case), &case.device)
}

fn local(case: &Case) -> Result<LocalExperts> {
    LocalExperts::from_map(&places(case), case.sizes.experts - 1)?.on(&case.device)
}

/// Experts that double a row: each slot of a token then has the same row, whatever the format.
fn dispatch(case: &Case, backend: impl PrepareFinalize + 'static) -> Result<Vec<Tensor>> {
    let hidden = rows(case)?;
    let (ids, weights) = case.routing()?;
    let top_k = case.sizes.top_k;
    let out = Dispatcher::new(backend).forward(&hidden, &ids, &weights, |dispatched| {
        let rows = (&dispatched.rows * 2.)?;
        match dispatched.topk_ids {
            Some(_) => {
                let (tokens, hidden) = rows.dims2()?;
                rows.unsqueeze(1)?.broadcast_as((tokens, top_k, hidden))
            }
            None => Ok(rows),
        }
    })?;
    Ok(vec![out])
}
