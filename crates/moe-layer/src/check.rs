//! Checks that the parts of a block fit each other. They run once, when the block is built.

use moe_dispatch::{ExpertsSide, PrepareFinalize, check_composition};
use moe_experts::Experts;
use moe_kernels::candle::{DType, Result, Tensor};
use moe_router::RouterConfig;

use crate::error::refuse;
use crate::placed::PlacedExperts;

/// Checks router, prepare/finalize and modular experts: formats, limits, which part applies the weights, and the number
/// of experts.
pub(crate) fn check_modular(
    config: &RouterConfig,
    prepare: &dyn PrepareFinalize,
    experts: &dyn Experts,
    placed: Option<&PlacedExperts>,
) -> Result<()> {
    let side = ExpertsSide {
        name: experts.name(),
        activation_format: experts.activation_format(),
        weight_and_reduce: experts.weight_and_reduce(),
        max_rows: experts.max_rows(),
    };
    check_composition(prepare, &side)?;
    let by_router = config.apply_router_weight_on_input;
    let by_prepare = prepare.applies_router_weight_on_input();
    if by_router != by_prepare {
        refuse!(
            Parts,
            "the router has apply_router_weight_on_input = {by_router}, but {} = {by_prepare}; \
             build both from one setting",
            prepare.name()
        )
    }
    check_expert_counts(config, prepare, experts, placed)
}

/// Checks that every id that the router chooses is an expert of prepare, and that every local slot of prepare is one of
/// the experts. If a map places experts, it is applied between router and prepare.
fn check_expert_counts(
    config: &RouterConfig,
    prepare: &dyn PrepareFinalize,
    experts: &dyn Experts,
    placed: Option<&PlacedExperts>,
) -> Result<()> {
    let routed = config.num_experts + config.num_fused_shared_experts;
    let local = experts.shape().num_local_experts;
    let placement = prepare.local_experts();
    let (known, slots) = placement.map_or((local, local), |p| (p.num_experts(), p.num_local()));
    if slots != local {
        refuse!(
            Parts,
            "{} sends rows to {slots} local experts, but {} has weights of {local}",
            prepare.name(),
            experts.name()
        )
    }
    if let Some((logical, physical)) = placed.map(PlacedExperts::sizes) {
        if (logical, physical) != (routed, known) {
            refuse!(
                Parts,
                "the map of experts is from {logical} experts to {physical} slots, but the router chooses among {routed} and {} \
                 has {known}",
                prepare.name()
            )
        }
        return Ok(());
    }
    if routed != known {
        let side = if placement.is_some() { prepare.name() } else { experts.name() };
        refuse!(
            Parts,
            "the router chooses among {routed} experts ({} routed + {} fused shared), but {side} has {known}",
            config.num_experts,
            config.num_fused_shared_experts
        )
    }
    Ok(())
}

/// The router's weight must be [logits, hidden] in the experts' dtype or in f32.
pub(crate) fn check_gate(gate: &Tensor, logits: usize, hidden: usize, dtype: DType) -> Result<()> {
    if gate.dims() != [logits, hidden] || ![dtype, DType::F32].contains(&gate.dtype()) {
        let or_f32 = if dtype == DType::F32 { "" } else { " or f32" };
        refuse!(
            Parts,
            "router gate: expected weight [{logits}, {hidden}] of dtype {}{or_f32}, got {:?} of {}",
            dtype.as_str(),
            gate.dims(),
            gate.dtype().as_str()
        )
    }
    Ok(())
}
