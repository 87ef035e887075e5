//! Tests of moe-router, in one binary.

mod definition;
mod errors;
mod gate;
mod hf;
mod properties;
mod simulate;
mod step;
mod transformers;
mod zero;

use moe_router::candle::{Device, Result, Tensor};
use moe_router::{NO_EXPERT, Routed, Router, RouterConfig, RouterParams};

/// Returns a router with an optional correction bias.
fn router(config: RouterConfig, bias: Option<&[f32]>) -> Result<Router> {
    let correction_bias = bias.map(|b| Tensor::new(b, &Device::Cpu)).transpose()?;
    Router::new(config, RouterParams { correction_bias, ..Default::default() })
}

/// Logits as a tensor [T, E].
fn logits(rows: &[Vec<f32>], experts: usize) -> Result<Tensor> {
    Tensor::from_vec(rows.concat(), (rows.len(), experts), &Device::Cpu)
}

/// The rows of ids and weights.
fn rows(routed: &Routed) -> Result<Vec<(Vec<u32>, Vec<f32>)>> {
    let ids = routed.topk_ids.to_vec2::<u32>()?;
    Ok(ids.into_iter().zip(routed.topk_weights.to_vec2::<f32>()?).collect())
}

/// Returns the ids and the bits of the weights, for comparisons without tolerance.
fn bits(routed: &Routed) -> Result<Vec<(Vec<u32>, Vec<u32>)>> {
    Ok(rows(routed)?.into_iter().map(|(i, w)| (i, w.iter().map(|w| w.to_bits()).collect())).collect())
}

/// The message of an expected error, without the backtrace that candle appends if one is asked for.
fn message<T>(result: std::result::Result<T, impl std::fmt::Display>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(e) => e.to_string().lines().next().unwrap_or_default().to_owned(),
    }
}

/// Returns pseudo-random logits in [-4, 4) without ties, for tests that need plausible numbers.
fn some_logits(tokens: usize, experts: usize, salt: u32) -> Vec<Vec<f32>> {
    let mut state = salt.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 21) as f32 - 4.0
    };
    (0..tokens).map(|_| (0..experts).map(|_| next()).collect()).collect()
}

fn absent(id: u32) -> bool {
    id == NO_EXPERT
}
