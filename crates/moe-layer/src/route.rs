//! From hidden states to experts: the gate product and the router, wherever they run.

use moe_kernels::candle::Result;
use moe_kernels::{Exec, View, ViewMut, linear_into};
use moe_router::{RouteInput, RouteOutput, Router};
use tracing::trace_span;

/// `logits` [T, E] f32 = `hidden` · `gate`ᵀ, and the experts that the router chooses by them.
///
/// On CUDA one launch does both where the method and the sizes allow.
pub(crate) fn route_into(
    router: &Router,
    layer: usize,
    hidden: View<'_>,
    gate: View<'_>,
    mut logits: ViewMut<'_>,
    out: RouteOutput<'_>,
    ex: &mut Exec,
) -> Result<()> {
    #[cfg(feature = "cuda")]
    if router.gate_route_fits(hidden, ex) {
        return router.gate_route_into(hidden, gate, logits, out, ex);
    }
    trace_span!("gate").in_scope(|| linear_into(hidden, gate, None, logits.reborrow(), ex))?;
    let _span = trace_span!("router").entered();
    let input = RouteInput { hidden: Some(hidden), ..RouteInput::new(logits.as_view(), layer) };
    router.route_into(&input, out, ex)
}
