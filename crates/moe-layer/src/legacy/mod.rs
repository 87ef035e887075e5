//! The per-expert loop: separate gate, up and down matrices of every expert, one expert after the
//! other.
//!
//! This is how models ran before packed weights and grouped kernels, kept as the reference that
//! the grouped experts are compared with and as a fallback that depends on nothing but dense products.
//! In a [`SparseMoeBlock`] [`ExpertLoop`] takes the place of the grouped kernels. Products, activation
//! and sum are in their order, so on the CPU both give the same bits. On a GPU the loop waits in every layer for the
//! counts of each expert's rows, so its steps are never recorded as graphs; it runs on one GPU.

mod experts;

use candle_nn::VarBuilder;
use moe_experts::Experts;
use moe_kernels::candle::{Result, bail};

use crate::block::SparseMoeBlock;
use crate::compose::{Part, compose, load_part};
use crate::context::BlockContext;
use crate::options::BlockOptions;

pub use experts::{ExpertLoop, ExpertMlp};

/// A block around the loop, from the layouts and prefixes of [`load_block`](crate::load_block).
///
/// # Errors
/// Missing or wrongly shaped tensors; an expert backend, which the loop has none of; several GPUs.
pub(crate) fn load_loop_on(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<SparseMoeBlock> {
    if let Some(backend) = &options.backend {
        bail!("the legacy expert path has no backends, so not {backend} either; choose the fused path")
    }
    if !experts.device().is_cpu() && context.geometry.world_size > 1 {
        bail!("the legacy expert path runs on one GPU, not on several; choose the fused path")
    }
    let part = load_part(options, context, experts)?;
    // The loop's matrices are parts of these packs, so that an expert that moves there moves here.
    let weights = part.weights.dequantised()?;
    let part = Part { weights: weights.clone(), ..part };
    let shard = context.geometry.expert_intermediate(options.intermediate_size)?;
    let experts = ExpertLoop::of_packs(&weights, options.activation)?.with_shard(&shard);
    let (block, ()) = compose(options, context, part, gate, |prepare, _| {
        let experts = experts.clone().with_format(prepare.activation_format(), prepare.block_rows());
        Ok((Box::new(experts) as Box<dyn Experts>, ()))
    })?;
    Ok(block)
}
