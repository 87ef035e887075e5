//! From hidden states to experts: the gate product and the router, wherever they run.

use moe_kernels::candle::Result;
use moe_kernels::{Exec, View, ViewMut, linear_into};
use moe_router::{RouteInput, RouteOutput, Router};
use tracing::trace_span;

/// `logits` [T, E] f32 = `hidden` · `gate`ᵀ, and the experts that the router chooses by them.
///
/// On CUDA one launch does both if it can. What it cannot (groups, hash tables, routing that is
/// recorded or forced) is routed on the host, which waits for the device.
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
    if ex.is_cuda() {
        return route_on_host(router, layer, hidden, logits.as_view(), out, ex);
    }
    let input = RouteInput { hidden: Some(hidden), ..RouteInput::new(logits.as_view(), layer) };
    router.route_into(&input, out, ex)
}

fn route_on_host(
    router: &Router,
    layer: usize,
    hidden: View<'_>,
    logits: View<'_>,
    out: RouteOutput<'_>,
    ex: &mut Exec,
) -> Result<()> {
    let (hidden, logits) = (ex.to_host(hidden)?, ex.to_host(logits)?);
    let mut host = Exec::cpu();
    std::mem::swap(&mut host.step, &mut ex.step);
    let RouteOutput { topk_ids, topk_weights, zero_expert_weights } = out;
    let mut ids = host.scratch(topk_ids.dtype(), topk_ids.dims())?;
    let mut weights = host.scratch(topk_weights.dtype(), topk_weights.dims())?;
    let mut identity = host.scratch(topk_weights.dtype(), &[logits.dims()[0]])?;
    let input = RouteInput { hidden: Some(hidden.view()), ..RouteInput::new(logits.view(), layer) };
    let output = RouteOutput {
        topk_ids: ids.view_mut(),
        topk_weights: weights.view_mut(),
        zero_expert_weights: Some(identity.view_mut()),
    };
    let routed = router.route_into(&input, output, &mut host);
    std::mem::swap(&mut host.step, &mut ex.step);
    routed?;
    ex.copy_from_host(ids.view(), topk_ids)?;
    ex.copy_from_host(weights.view(), topk_weights)?;
    match zero_expert_weights {
        Some(weights) => ex.copy_from_host(identity.view(), weights),
        None => Ok(()),
    }
}
