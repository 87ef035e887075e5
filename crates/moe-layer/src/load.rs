//! Builds a block from a checkpoint: its weights, and the backend that the oracle chooses.

use candle_nn::VarBuilder;
use moe_dispatch::PrepareFinalize;
use moe_experts::{ExpertWeights, Experts, MonolithicKernels, Selection, build, build_batched, select};
use moe_kernels::candle::Result;

use crate::block::SparseMoeBlock;
use crate::compose::{Part, compose, load_part};
use crate::context::BlockContext;
use crate::offload::load_offloaded;
use crate::options::BlockOptions;

/// Loads a block whose experts are all on this rank, without shared experts:
/// [`with_shared_experts`](SparseMoeBlock::with_shared_experts) and [`SharedExperts::load`](crate::SharedExperts::load)
/// add these. `gate` has the prefix of the router (its `weight` [E + zero experts, H], and what the routing method
/// needs), `experts` has the prefix of the experts (see [`ExpertWeights::load`]). Matrices have the usual names; for
/// others, such as [`MlpNames::MIXTRAL`](crate::MlpNames::MIXTRAL), call [`load_block_on`] with
/// [`BlockContext::names`]. The oracle's choice is returned, too, for display to the user.
///
/// ```
/// use candle_nn::VarBuilder;
/// use moe_layer::{BlockOptions, DType, Device, RouterConfig, Tensor, load_block};
///
/// // In a model: VarBuilder::from_mmaped_safetensors(..).pp("model.layers.0.mlp").
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let router = RouterConfig { renormalize: true, ..RouterConfig::new(4, 2) };
/// let options = BlockOptions::new(router, 8, 16); // hidden size 8, intermediate size 16
/// let (block, selection) = load_block(&options, vb.pp("gate"), vb.pp("experts"))?;
/// println!("experts on {}", selection.chosen);
/// let out = block.forward(&Tensor::ones((3, 8), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(out.dims(), [3, 8]);
/// # Ok::<(), moe_layer::candle::Error>(())
/// ```
///
/// # Errors
/// Tensors that are missing or have a wrong shape; an invalid routing method; no backend that supports the block. Also
/// tensors under these prefixes that `options` do not use and that would change the results. The error names them: a
/// bias of the gate, biases of experts, `e_score_correction_bias`, more experts than the router has, scales of
/// quantised weights.
pub fn load_block(
    options: &BlockOptions,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    load_block_on(options, &BlockContext::default(), gate, experts)
}

/// Loads the part of a block on this rank: whole experts with expert parallelism, and otherwise a slice of each expert.
/// The block has the prepare/finalize backend of the geometry and the chunks of the settings. With chunks this is a
/// collective: a memory budget may allow other sizes on other ranks, and all ranks take the smallest. Everything else
/// is as in [`load_block`].
///
/// # Errors
/// The errors of [`load_block`]; sizes that the geometry cannot divide; a memory budget that is too small for one
/// token.
pub fn load_block_on(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    if let Some(offload) = &context.offload {
        return load_offloaded(offload, options, context, gate, experts);
    }
    let part = load_part(options, context, gate, experts)?;
    let weights = part.weights.packed(context.cpu_isa)?;
    let part = Part { weights: weights.clone(), ..part };
    let (mut block, selection) = compose(options, context, part, |prepare, backend| {
        choose(options, context, &weights, prepare, backend).map(|(selection, experts)| (experts, selection))
    })?;
    let computed = selection.computed();
    for experts in MonolithicKernels::all(&computed, &weights, options.backend.as_deref()) {
        block = block.with_monolithic(Box::new(experts))?;
    }
    Ok((block, selection))
}

/// Returns the experts that the oracle chooses for a prepare/finalize backend.
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
