//! The gate of a decoder's router.

use candle_nn::VarBuilder;
use moe_kernels::names::TensorNames;
use moe_layer::BlockNames;

/// The place from which a router loads its parameters: the gate of the MLP at `mlp`, under which the correction bias
/// has its usual name.
pub fn router_gate<'a>(names: &TensorNames, mlp: &VarBuilder<'a>) -> VarBuilder<'a> {
    let names = BlockNames { gate: names.gate, correction_bias: names.correction_bias, ..BlockNames::USUAL };
    moe_layer::router_gate(&names, mlp)
}
