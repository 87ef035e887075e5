//! Experts more than the device has memory for: some in slots, the others at home in host memory.

use candle_core::{Result, bail};

use crate::experts::Experts;
use crate::oracle::{Backend, Selection};
use crate::weights::ExpertWeights;

/// Experts of which some live in host memory.
pub struct Offloaded {
    /// Compute all experts, wherever their weights are.
    pub experts: Box<dyn Experts>,
    /// Bytes a second that come to the device when experts change places, as measured here; `None`: not measured.
    pub bytes_per_second: Option<f64>,
}

/// Builds the chosen backend over weights of which `num_slots` experts stay on the device and the others go to host memory;
/// `measure`: how fast they come back is measured. `weights` holds all experts; their memory is free when they are
/// dropped.
///
/// # Errors
/// A backend that does not compute so; quantised weights with act-order; a build without CUDA; memory that the host refuses.
pub fn build_offloaded(
    selection: &Selection,
    weights: &ExpertWeights,
    num_slots: usize,
    measure: bool,
) -> Result<Offloaded> {
    if selection.chosen != Backend::CudaFused {
        bail!(
            "experts in host memory are computed by {}, and these layers run {}",
            Backend::CudaFused,
            selection.chosen
        )
    }
    split(weights, num_slots, measure)
}

#[cfg(feature = "cuda")]
fn split(weights: &ExpertWeights, num_slots: usize, measure: bool) -> Result<Offloaded> {
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
    let experts = Box::new(CudaFusedExperts::slotted(weights, slots)?);
    Ok(Offloaded { experts, bytes_per_second })
}

#[cfg(not(feature = "cuda"))]
fn split(_: &ExpertWeights, _: usize, _: bool) -> Result<Offloaded> {
    bail!("experts in host memory need a build with the feature `cuda`")
}
