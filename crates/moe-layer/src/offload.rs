//! Loads blocks with experts in host memory, for a model that is larger than the memory of its GPU.
//!
//! Some experts of each layer are in page-locked host memory, and the others are in slots of the device. Launches
//! between the router and the products exchange experts that a step needs for experts that it does not need
//! (`moe_kernels::Residency` has the rule). So the bits are the same as with all experts on the device. The cost is the
//! traffic on the bus, which [`ExpertOffload`] computes.

use candle_nn::VarBuilder;
use moe_experts::{Backend, Selection, build_offloaded, select};
use moe_kernels::candle::{Error, Result};
use tracing::info;

use crate::block::SparseMoeBlock;
use crate::compose::{compose, load_part};
use crate::context::BlockContext;
use crate::error::refuse;
use crate::expert_offload::ExpertOffload;
use crate::options::BlockOptions;

/// Loads a block whose experts are in slots of the device and in host memory. During loading, all experts of the layer
/// are on the device for a short time.
///
/// # Errors
/// The errors of `load_block_on`; expert parallelism; a device or weights without a backend for this.
pub(crate) fn load_offloaded(
    offload: &ExpertOffload,
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<(SparseMoeBlock, Selection)> {
    if context.geometry.ep_size > 1 {
        refuse!(
            Offload,
            "experts in host memory: expected a part of every expert on each rank, got expert parallelism over {} ranks",
            context.geometry.ep_size
        )
    }
    let part = load_part(options, context, gate, experts)?;
    let weights = part.weights.clone();
    let slots = weights.shape().num_local_experts.saturating_sub(offload.experts);
    compose(options, context, part, |prepare, backend| {
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
