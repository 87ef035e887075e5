//! Experts in host memory: a model that is larger than the memory of its GPU.
//!
//! Of each layer some experts live in page-locked host memory, the others in slots of the device. Experts that a step
//! needs change places with experts that it does not need, by launches between router and products (`moe_kernels::Residency` has
//! the rule), so the bits are the same as with all experts on the device. What this costs is the bus: [`ExpertOffload`] says how much.

use candle_nn::VarBuilder;
use moe_experts::{Backend, Selection, build_offloaded, select};
use moe_kernels::candle::{Error, Result, bail};
use tracing::info;

use crate::block::SparseMoeBlock;
use crate::compose::{compose, load_part};
use crate::context::BlockContext;
use crate::expert_offload::ExpertOffload;
use crate::options::BlockOptions;

/// A block whose experts are in slots of the device and in host memory; the whole pack of the layer is on the device for a moment.
///
/// # Errors
/// The errors of `load_block_on`; expert parallelism; a device or weights for which there is no such backend.
pub(crate) fn load_offloaded(
    offload: &ExpertOffload,
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    if context.geometry.ep_size > 1 {
        bail!(
            "experts in host memory: expected a part of every expert on each rank, got expert parallelism over {} ranks",
            context.geometry.ep_size
        )
    }
    let part = load_part(options, context, experts)?;
    let weights = part.weights.clone();
    let slots = weights.shape().num_local_experts.saturating_sub(offload.experts);
    compose(options, context, part, gate, |prepare, backend| {
        let spec = options.spec(&weights, prepare.activation_format(), context);
        let selection = select(&spec, backend.or(Some(Backend::CudaFused.name())))
            .map_err(|e| Error::wrap(e).context("experts in host memory"))?;
        let first = options.layer == 0;
        let built = build_offloaded(&selection, &weights, slots, first)?;
        if let Some(rate) = built.bytes_per_second {
            info!("{}", offload.describe(rate));
        }
        Ok((built.experts, selection))
    })
}
