//! Shared experts as additional slots of the routed ones. They are at the end of the pack, and every token chooses
//! them.
//!
//! They need neither a launch nor a stream of their own. The grouped kernels stream their weights together with the
//! weights of the chosen experts. The single launch for few tokens begins with them, while the router is still
//! choosing. If ranks cut every expert along its width, shared experts are part of the same sum.

use moe_kernels::candle::{DType, Device};
use moe_kernels::gpu_of;
use moe_kernels::plan::{BULK_COPIES, Reason, Target};

use crate::context::BlockContext;
use crate::path::MoePath;
use crate::shared_stream::SharedExpertsStream;

/// Returns the number of shared experts that run as slots of the routed ones: all of them. `count` is their number, or
/// `None` if they are not as wide as a routed one. `backend` is the name of the requested backend. `quantised` says
/// whether any expert is stored quantised.
///
/// # Errors
/// The first reason why they cannot.
pub fn shared_fit_slots(
    count: Option<usize>,
    path: MoePath,
    backend: Option<&str>,
    (dtype, quantised, device): (DType, bool, &Device),
    context: &BlockContext,
) -> Result<usize, Reason> {
    Target::Tuned(BULK_COPIES).expect(gpu_of(device).as_ref())?;
    let part = |part| Err(Reason::Part { part });
    match context.shared_experts_stream {
        SharedExpertsStream::Auto => {}
        SharedExpertsStream::On => {
            return Err(Reason::NotRequested { requested: "`shared_experts_stream` on" });
        }
        SharedExpertsStream::Off => {
            return Err(Reason::NotRequested { requested: "`shared_experts_stream` off" });
        }
    }
    if dtype != DType::BF16 {
        return Err(Reason::Dtype { got: dtype.as_str(), accepted: vec!["bf16"] });
    }
    let Some(count) = count else {
        return part("shared experts of another width than the routed ones'");
    };
    if path == MoePath::Legacy {
        return part("experts one after the other");
    }
    if backend.is_some() {
        return Err(Reason::NotRequested { requested: "an expert backend" });
    }
    if context.geometry.ep_size > 1 {
        return part("experts spread over ranks");
    }
    if quantised {
        return part("quantised experts");
    }
    if context.offload.is_some() {
        return part("experts in host memory");
    }
    Ok(count)
}
