//! Which of the two expert paths runs a sparse layer.

use std::str::FromStr;

use candle_nn::VarBuilder;
use moe_experts::Selection;
use moe_kernels::candle::{Result, bail};
use moe_kernels::{Exec, View, ViewMut};
use moe_router::Router;

use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::legacy::MoeMlp;
use crate::load::{BlockOptions, load_block_on};
use crate::shared::SharedExperts;

/// How a sparse layer runs its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoePath {
    /// Packed weights and grouped kernels: [`SparseMoeBlock`].
    Fused,
    /// Separate weights, one expert after the other: [`MoeMlp`].
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

/// A sparse layer on either path.
#[derive(Debug)]
pub enum SparseLayer {
    /// On packed weights.
    Fused(Box<SparseMoeBlock>),
    /// On separate weights.
    Legacy(Box<MoeMlp>),
}

impl SparseLayer {
    /// Loads the experts of a layer, as [`load_block`](crate::load_block) and [`MoeMlp::load`] do, with the shared
    /// experts if there are any. The oracle's choice comes along on the fused path.
    ///
    /// # Errors
    /// Those of the path's loader.
    pub fn load(
        path: MoePath,
        options: &BlockOptions,
        gate: VarBuilder,
        experts: VarBuilder,
        shared: Option<SharedExperts>,
    ) -> Result<(Self, Option<Selection>)> {
        Self::load_on(path, options, &BlockContext::default(), gate, experts, shared)
    }

    /// The same for one rank, and in chunks, as [`load_block_on`] does.
    ///
    /// # Errors
    /// Those of the path's loader; ranks or chunks on the legacy path.
    pub fn load_on(
        path: MoePath,
        options: &BlockOptions,
        context: &BlockContext,
        gate: VarBuilder,
        experts: VarBuilder,
        shared: Option<SharedExperts>,
    ) -> Result<(Self, Option<Selection>)> {
        match path {
            MoePath::Fused => {
                let (mut block, selection) = load_block_on(options, context, gate, experts)?;
                if let Some(shared) = shared {
                    block = block.with_shared_experts(shared)?;
                }
                Ok((Self::Fused(Box::new(block)), Some(selection)))
            }
            MoePath::Legacy if context.geometry.world_size > 1 || context.chunked_moe.enable_chunked_moe => {
                bail!("the legacy expert path runs on one rank and in one pass; use the fused path")
            }
            MoePath::Legacy => {
                let mut block = MoeMlp::load(options, gate, experts)?;
                if let Some(shared) = shared {
                    block = block.with_shared_experts(shared)?;
                }
                Ok((Self::Legacy(Box::new(block)), None))
            }
        }
    }

    /// The block on packed weights.
    pub fn fused(&self) -> Option<&SparseMoeBlock> {
        match self {
            Self::Fused(block) => Some(block),
            Self::Legacy(_) => None,
        }
    }

    /// The router, unless it is inside the experts' kernel.
    pub fn router(&self) -> Option<&Router> {
        match self {
            Self::Fused(block) => block.router(),
            Self::Legacy(block) => Some(block.router()),
        }
    }

    /// `out` [T, H] (model dtype or f32) = layer(`hidden` [T, H], model dtype); `observe` sees the
    /// router logits, [T, E] f32.
    pub fn forward_observed_into(
        &self,
        hidden: View<'_>,
        out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        ex: &mut Exec,
    ) -> Result<()> {
        match self {
            Self::Fused(block) => block.forward_observed_into(hidden, out, observe, ex),
            Self::Legacy(block) => block.forward_observed_into(hidden, out, observe, ex),
        }
    }
}
