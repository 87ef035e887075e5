//! The per-expert loop: every expert has separate gate, up and down matrices, and experts run one after the other.
//!
//! This is how models ran before packed weights and grouped kernels. It is kept as the reference for the grouped
//! experts, and as a fallback that needs only dense products. In a [`SparseMoeBlock`] [`ExpertLoop`] replaces the
//! grouped kernels. Products, activation and sum are in the same order, so on the CPU both give the same bits. On a GPU
//! the loop waits in every layer for the counts of each expert's rows, so its steps are never recorded as graphs; it
//! runs on one GPU.

mod experts;

use candle_nn::VarBuilder;
use moe_experts::Experts;
use moe_kernels::candle::{Result, bail};

use crate::block::SparseMoeBlock;
use crate::compose::{Part, compose, load_part};
use crate::context::BlockContext;
use crate::options::BlockOptions;

pub use experts::{ExpertLoop, ExpertMlp};

/// Loads a block around the loop, from the same layouts and prefixes as [`load_block`](crate::load_block).
///
/// # Errors
/// Tensors that are missing or have a wrong shape; an expert backend, because the loop has none; biases of experts;
/// several GPUs.
pub(crate) fn load_loop_on(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<SparseMoeBlock> {
    if let Some(backend) = &options.backend {
        bail!("the legacy expert path has no backends, so not {backend} either; choose the fused path")
    }
    if options.expert_bias {
        bail!("the legacy expert path has no biases of experts; choose the fused path")
    }
    if !experts.device().is_cpu() && context.geometry.world_size > 1 {
        bail!("the legacy expert path runs on one GPU, not on several; choose the fused path")
    }
    let part = load_part(options, context, gate, experts)?;
    // The loop's matrices are parts of these packs, so an expert that moves in the packs also moves here.
    let weights = part.weights.dequantised()?;
    let part = Part { weights: weights.clone(), ..part };
    let shard = context.geometry.expert_intermediate(options.intermediate_size)?;
    let experts = ExpertLoop::of_packs(&weights, options.activation)?.with_shard(&shard);
    let (block, ()) = compose(options, context, part, |prepare, _| {
        let experts = experts.clone().with_format(prepare.activation_format(), prepare.block_rows());
        Ok((Box::new(experts) as Box<dyn Experts>, ()))
    })?;
    Ok(block)
}
