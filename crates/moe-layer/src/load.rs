//! Building a block from a checkpoint: weights, and the oracle's backend.

use candle_nn::VarBuilder;
use moe_dispatch::PrepareFinalize;
use moe_experts::{ExpertWeights, Experts, MonolithicKernels, Selection, build, build_batched, select};
use moe_kernels::candle::Result;

use crate::block::SparseMoeBlock;
use crate::compose::{Part, compose, load_part};
use crate::context::BlockContext;
use crate::offload::load_offloaded;
use crate::options::BlockOptions;

/// Loads a block whose experts all live on this rank, without shared experts: add those by
/// [`with_shared_experts`](SparseMoeBlock::with_shared_experts) and
/// [`SharedExperts::load`](crate::SharedExperts::load). `gate` has the
/// prefix of the router (its `weight` [E + zero experts, H], and what the routing method needs),
/// `experts` has the prefix of the experts (see [`ExpertWeights::load`]). Matrices have the usual names; for others, such as
/// [`MlpNames::MIXTRAL`](crate::MlpNames::MIXTRAL), call [`load_block_on`] with [`BlockContext::names`]. The oracle's choice comes along,
/// to be shown to the user.
///
/// # Errors
/// Missing or wrongly shaped tensors; an invalid routing method; no backend that fits. Tensors under these prefixes that
/// `options` do not ask for and that would change the results, by name: a bias of the gate, biases of experts,
/// `e_score_correction_bias`, more experts than the router knows, scales of quantised weights.
pub fn load_block(
    options: &BlockOptions,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    load_block_on(options, &BlockContext::default(), gate, experts)
}

/// Loads the part of a block that lives on this rank: whole experts with expert parallelism, else a
/// slice of each, with the prepare/finalize backend of the geometry and the chunks of the settings. With chunks a
/// collective: a budget may mean other sizes on other ranks, and all take the smallest.
/// The rest is as in [`load_block`].
///
/// # Errors
/// As [`load_block`]; sizes that the geometry cannot cut; a memory budget below one token.
pub fn load_block_on(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    if let Some(offload) = &context.offload {
        return load_offloaded(offload, options, context, gate, experts);
    }
    let part = load_part(options, context, experts)?;
    let weights = part.weights.packed(context.cpu_isa)?;
    let part = Part { weights: weights.clone(), ..part };
    let (mut block, selection) = compose(options, context, part, gate, |prepare, backend| {
        choose(options, context, &weights, prepare, backend).map(|(selection, experts)| (experts, selection))
    })?;
    let computed = selection.computed();
    for experts in MonolithicKernels::all(&computed, &weights, options.backend.as_deref()) {
        block = block.with_monolithic(Box::new(experts))?;
    }
    Ok((block, selection))
}

/// The oracle's experts for a prepare/finalize backend.
fn choose(
    options: &BlockOptions,
    context: &BlockContext,
    weights: &ExpertWeights,
    prepare: &dyn PrepareFinalize,
    backend: Option<&str>,
) -> Result<(Selection, Box<dyn Experts>)> {
    let spec = options.spec(weights, prepare.activation_format(), context);
    let selection = select(&spec, backend)?;
    let experts = match prepare.block_rows() {
        Some(rows) => build_batched(&selection, weights.clone(), rows)?,
        None => build(&selection, weights.clone())?,
    };
    Ok((selection, experts))
}
