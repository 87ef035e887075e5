//! Which of the two expert paths runs a sparse layer.

use std::str::FromStr;

use candle_nn::VarBuilder;
use moe_comm::{EpBackend, Geometry};
use moe_experts::Selection;
use moe_kernels::candle::{Result, bail};
use moe_kernels::plan::{Fusion, Machine, Stage};
use moe_kernels::{Exec, MonolithicIo, StepContext, View, ViewMut};
use moe_router::Router;

use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::legacy::{MoeMlp, load_loop_on};
use crate::load::{BlockOptions, load_block_on};
use crate::plan::{MoeForm, MoePlan, PlanStep};
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
    /// Behind dispatch: packed weights, or, where ranks share the experts and in chunks, separate ones.
    Block(Box<SparseMoeBlock>),
    /// On separate weights, all of them on this rank, in one pass.
    Loop(Box<MoeMlp>),
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

    /// The same for one rank of several, and in chunks, as [`load_block_on`] does.
    ///
    /// # Errors
    /// Those of the path's loader.
    pub fn load_on(
        path: MoePath,
        options: &BlockOptions,
        context: &BlockContext,
        gate: VarBuilder,
        experts: VarBuilder,
        shared: Option<SharedExperts>,
    ) -> Result<(Self, Option<Selection>)> {
        let Geometry { backend, moe_tp_size, .. } = context.geometry;
        let whole = backend == EpBackend::Disabled && moe_tp_size == 1;
        let (mut block, selection) = match path {
            MoePath::Legacy if whole && !context.chunked_moe.enable_chunked_moe => {
                let mut block = MoeMlp::load(options, gate, experts)?;
                if let Some(shared) = shared {
                    block = block.with_shared_experts(shared)?;
                }
                return Ok((Self::Loop(Box::new(block)), None));
            }
            MoePath::Legacy => (load_loop_on(options, context, gate, experts)?, None),
            MoePath::Fused => {
                let (block, selection) = load_block_on(options, context, gate, experts)?;
                (block, Some(selection))
            }
        };
        if let Some(shared) = shared {
            block = block.with_shared_experts(shared)?;
        }
        Ok((Self::Block(Box::new(block)), selection))
    }

    /// The block behind dispatch, if this is one.
    pub fn block(&self) -> Option<&SparseMoeBlock> {
        match self {
            Self::Block(block) => Some(block),
            Self::Loop(_) => None,
        }
    }

    /// As [`SparseMoeBlock::defer_sum`].
    pub fn defer_sum(&mut self) -> bool {
        match self {
            Self::Block(block) => block.defer_sum(),
            Self::Loop(_) => false,
        }
    }

    /// The router.
    pub fn router(&self) -> &Router {
        match self {
            Self::Block(block) => block.router(),
            Self::Loop(block) => block.router(),
        }
    }

    /// As [`SparseMoeBlock::choose`]; the loop over experts has one form.
    pub fn choose(&self, step: &PlanStep, fusions: &[Fusion], machine: &Machine) -> MoeForm {
        match self {
            Self::Block(block) => block.choose(step, fusions, machine),
            Self::Loop(_) => MoeForm::Modular,
        }
    }

    /// As [`SparseMoeBlock::plan`].
    pub fn plan(&self, step: &PlanStep, fusions: &[Fusion], machine: &Machine) -> MoePlan {
        match self {
            Self::Block(block) => block.plan(step, fusions, machine),
            Self::Loop(_) => {
                let stage = Stage {
                    computes: &["router", "experts", "combine"],
                    kernel: "dense products, one expert after the other (legacy)".to_string(),
                    rejected: Vec::new(),
                };
                MoePlan { form: MoeForm::Modular, stages: vec![stage] }
            }
        }
    }

    /// `out` [T, H] (model dtype or f32) = layer(`hidden` [T, H], model dtype), in a form that [`choose`](Self::choose) chose
    /// without anything fused around it; `observe` sees the router logits [T, E] f32 of modular experts.
    ///
    /// # Errors
    /// Those of the path's forward.
    pub fn forward_as_into(
        &self,
        form: MoeForm,
        hidden: View<'_>,
        out: ViewMut<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        match self {
            Self::Block(block) => block.forward_as_into(form, hidden, out, observe, context, ex),
            Self::Loop(block) => block.forward_observed_into(hidden, out, observe, context, ex),
        }
    }

    /// As [`SparseMoeBlock::fused_into`].
    ///
    /// # Errors
    /// The loop over experts, which fuses nothing; those of the block.
    pub fn fused_into(
        &self,
        form: MoeForm,
        io: MonolithicIo<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        match self {
            Self::Block(block) => block.fused_into(form, io, context, ex),
            Self::Loop(_) => bail!("the legacy expert path fuses nothing around its experts"),
        }
    }
}
