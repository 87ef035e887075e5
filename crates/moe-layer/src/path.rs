//! Which of the two expert paths runs a sparse layer.

use std::str::FromStr;

use candle_nn::VarBuilder;
use moe_experts::Selection;
use moe_kernels::candle::Result;

use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::legacy::load_loop_on;
use crate::load::load_block_on;
use crate::options::BlockOptions;

/// How a sparse layer runs its experts.
// This enum is exhaustive: experts are packed or looped over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoePath {
    /// Packed weights and grouped kernels.
    Fused,
    /// Separate weights, one expert after the other: [`ExpertLoop`](crate::legacy::ExpertLoop).
    Legacy,
}

impl FromStr for MoePath {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "fused" => Ok(Self::Fused),
            "legacy" => Ok(Self::Legacy),
            other => Err(format!("unknown expert path {other:?}; expected fused or legacy")),
        }
    }
}

/// Loads a sparse layer on a path, like [`load_block_on`], without shared experts. On the fused path it also returns
/// the oracle's choice.
///
/// # Errors
/// The errors of [`load_block_on`]; on the legacy path also an expert backend, because that path has none, and several
/// GPUs.
pub fn load_layer_on(
    path: MoePath,
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Option<Selection>)> {
    Ok(match path {
        MoePath::Legacy => (load_loop_on(options, context, gate, experts)?, None),
        MoePath::Fused => {
            let (block, selection) = load_block_on(options, context, gate, experts)?;
            (block, Some(selection))
        }
    })
}
