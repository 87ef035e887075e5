//! Chooses the memory in which moved experts arrive: on the hosts, or on the GPUs.

use std::sync::Arc;

use moe_comm::Window;
use moe_experts::ExpertWeights;
use moe_kernels::candle::{Result, bail};

#[cfg(feature = "cuda")]
use crate::device_landing::DeviceLanding;
use crate::host_landing::HostLanding;
use crate::landing::{Landing, landing_bytes};

/// Returns the landing for the weights of a rank.
///
/// # Errors
/// Weights on a device without a window, or with a window that is too small.
pub(crate) fn landing(
    rank: usize,
    slot_len: usize,
    weights: &ExpertWeights,
    window: Option<&Arc<dyn Window>>,
) -> Result<Box<dyn Landing>> {
    if weights.device().is_cpu() {
        return Ok(Box::new(HostLanding::new(rank)));
    }
    let needed = landing_bytes(weights.shape().num_local_experts, slot_len);
    let Some(window) = window.filter(|window| window.bytes() >= needed) else {
        let got = window.map_or("none".to_string(), |window| format!("{window:?}"));
        bail!("experts that move between GPUs: expected a window of at least {needed} bytes, got {got}")
    };
    device_landing(rank, slot_len, weights, window)
}

#[cfg(feature = "cuda")]
fn device_landing(
    rank: usize,
    slot_len: usize,
    weights: &ExpertWeights,
    window: &Arc<dyn Window>,
) -> Result<Box<dyn Landing>> {
    Ok(Box::new(DeviceLanding::new(rank, slot_len, weights, window.clone())?))
}

#[cfg(not(feature = "cuda"))]
fn device_landing(
    rank: usize,
    _: usize,
    _: &ExpertWeights,
    window: &Arc<dyn Window>,
) -> Result<Box<dyn Landing>> {
    bail!("experts that move to rank {rank} through {window:?}: this program has no CUDA")
}
