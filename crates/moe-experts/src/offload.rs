//! More experts than the device has memory for: some are in slots on the device, and the others in host memory.

use candle_core::Result;
use moe_kernels::Activation;

use crate::error::refuse;
use crate::experts::Experts;
use crate::oracle::{Backend, Selection};
use crate::weights::ExpertWeights;

/// Experts, some of which are in host memory.
pub struct Offloaded {
    /// The backend. It computes all experts, wherever they are.
    pub experts: Box<dyn Experts>,
    /// The measured rate at which experts are copied to the device when they change places, in bytes per second. `None`
    /// if it was not measured.
    pub bytes_per_second: Option<f64>,
}

/// Builds the chosen backend. `num_slots` experts stay on the device, and the others go to host memory. `measure` says
/// whether to measure the rate at which they are copied to the device. `weights` holds all experts; their memory is
/// freed when they are dropped.
///
/// # Errors
/// A backend that cannot use such slots; biases; quantised weights with act-order; a build without CUDA; host memory
/// that cannot be allocated.
pub fn build_offloaded(
    selection: &Selection,
    weights: &ExpertWeights,
    num_slots: usize,
    measure: bool,
) -> Result<Offloaded> {
    if selection.chosen != Backend::CudaFused {
        refuse!(
            Offload,
            "experts in host memory are computed by {}, and these layers run {}",
            Backend::CudaFused,
            selection.chosen
        )
    }
    if weights.has_bias() {
        refuse!(Offload, "experts in host memory have no biases, and these have")
    }
    split(weights, selection.spec.activation, num_slots, measure)
}

#[cfg(feature = "cuda")]
fn split(
    weights: &ExpertWeights,
    activation: Activation,
    num_slots: usize,
    measure: bool,
) -> Result<Offloaded> {
    use moe_kernels::Exec;
    use moe_kernels::cuda::ExpertSlots;

    use crate::cuda::CudaFusedExperts;

    let ex = Exec::on(weights.device())?;
    let (mut slots, [w13, w2]) = ExpertSlots::split([weights.w13(), weights.w2()], num_slots, &ex)?;
    let bytes_per_second = measure.then(|| slots.measure([&w13, &w2], &ex)).transpose()?;
    let weights = match weights.quantisation() {
        Some(_) => ExpertWeights::quantised(w13, w2)?,
        None => ExpertWeights::new(w13.to_tensor()?, w2.to_tensor()?, None, None)?,
    };
    let experts = Box::new(CudaFusedExperts::slotted(weights, activation, slots)?);
    Ok(Offloaded { experts, bytes_per_second })
}

#[cfg(not(feature = "cuda"))]
fn split(_: &ExpertWeights, _: Activation, _: usize, _: bool) -> Result<Offloaded> {
    refuse!(Offload, "experts in host memory need a build with the feature `cuda`")
}
