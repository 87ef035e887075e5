//! Shared experts as further slots of the routed ones: packed behind them, chosen by every token.
//!
//! They need no launch or stream of their own: the grouped kernels stream their weights with the chosen experts' weights, and
//! the one launch of few tokens begins with them, while the router still chooses. Over ranks that cut every expert along its
//! width they join the same sum.

use moe_kernels::candle::{DType, Device};
use moe_kernels::gpu_of;
use moe_kernels::plan::{BULK_COPIES, Reason, Target};

use crate::context::BlockContext;
use crate::path::MoePath;
use crate::shared_stream::SharedExpertsStream;

/// How many shared experts run as slots of the routed ones: all `count` of them, each as wide as a routed one; `None`: they
/// have another width. `backend` is asked for by name; `quantised`: some expert is stored so.
///
/// # Errors
/// The first reason why none does.
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
            return Err(Reason::NotRequested { requested: "--shared-experts-stream on" });
        }
        SharedExpertsStream::Off => {
            return Err(Reason::NotRequested { requested: "--shared-experts-stream off" });
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
