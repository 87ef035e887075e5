//! The parts of a block: the weights of this rank's experts, and router, dispatch and experts put together.

use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_chunking::ridge_tokens;
use moe_comm::{ExpertLayout, ExpertMap};
use moe_dispatch::PrepareFinalize;
use moe_experts::{Backend, ExpertWeights, Experts, LoadSpec};
use moe_kernels::candle::{Error, Result};
use moe_kernels::names::MlpNames;
use moe_kernels::quant::{Opened, QuantSource};
use moe_kernels::{Exec, Weight};
use moe_router::Router;
use tracing::warn;

use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::options::BlockOptions;
use crate::pack::note_packing;
use crate::placed::PlacedExperts;

/// A block of the context's prepare/finalize backends, each with the experts that `experts` makes for
/// it; what that says of the main path comes along. An explicit expert backend is asked for there
/// alone: the path of steps that only decode may have another format.
pub(crate) fn compose<S>(
    options: &BlockOptions,
    context: &BlockContext,
    part: Part,
    gate: VarBuilder,
    experts: impl Fn(&dyn PrepareFinalize, Option<&str>) -> Result<(Box<dyn Experts>, S)>,
) -> Result<(SparseMoeBlock, S)> {
    let config = &options.router;
    let router = Router::load(config, gate.clone())?;
    let weight = gate.get((config.num_logits(), options.hidden_size), "weight")?;
    let device = weight.device().clone();
    let Part { layout, weights, map } = part;
    let placed =
        map.map(|map| PlacedExperts::new(options.layer, map, weights, context).map(Arc::new)).transpose()?;
    let backends = context.backends(&layout, config.apply_router_weight_on_input, &device)?;
    let (main, said) = experts(backends.main.as_ref(), options.backend.as_deref())?;
    let mut block = SparseMoeBlock::of_placed(weight, router, (backends.main, main), options.layer, placed)?
        .with_packed_gate(context.cpu_isa)?;
    if let Some(decode) = backends.decode {
        let (experts, _) = experts(decode.as_ref(), None)?;
        block = block.with_decode_path(decode, experts)?;
    }
    let bytes = |tokens| block.chunk_bytes(tokens).unwrap_or(usize::MAX);
    let size = context.chunked_moe.size(MAX_STEP_TOKENS, bytes).map_err(Error::wrap)?;
    let size = size.map(|size| context.agreed_chunk(size, &device)).transpose()?;
    if let Some(size) = size.filter(|_| options.layer == 0) {
        warn_below_ridge(size.get(), options);
    }
    Ok((block.with_chunk_size(size), said))
}

/// The most tokens of a step: engines refuse larger ones, so a chunk of this size is never cut.
pub const MAX_STEP_TOKENS: usize = 1 << 24;

/// Rows of one expert at which a CPU's arithmetic takes about as long as reading its weights: the
/// kernels stream the weights for a dozen rows, and compute from a few dozen on.
const RIDGE_ROWS: usize = 32;

fn warn_below_ridge(size: usize, options: &BlockOptions) {
    let ridge = ridge_tokens(RIDGE_ROWS, options.packed_experts(), options.router.num_slots());
    if size < ridge {
        warn!(
            "chunks of {size} tokens read all experts' weights for few rows each; from about {ridge} tokens on \
             chunking costs little time"
        );
    }
}

/// This rank's part of the experts.
pub(crate) struct Part {
    /// Where the physical experts are.
    pub layout: ExpertLayout,
    /// The weights of the experts on this rank: what the block's experts compute with.
    pub weights: ExpertWeights,
    /// Which logical expert each physical one is, where a map places them.
    pub map: Option<ExpertMap>,
}

/// Loads this rank's part of the experts.
pub(crate) fn load_part(options: &BlockOptions, context: &BlockContext, experts: VarBuilder) -> Result<Part> {
    let geometry = &context.geometry;
    let map = context.placements.map(options.layer, options.packed_experts(), geometry.ep_size)?;
    let layout = match &map {
        Some(map) => map.layout(geometry.ep_rank)?,
        None => geometry.expert_layout(options.packed_experts())?,
    };
    // What the checkpoint calls them.
    let logical = map.as_ref().map_or(&layout.local_experts[..], |map| map.experts(geometry.ep_rank));
    let width = geometry.expert_intermediate(options.intermediate_size)?.range.len();
    let sliced = context.sliced_weights;
    let intermediate = if sliced { width } else { options.intermediate_size };
    let mut spec =
        LoadSpec::new(options.packed_experts(), options.hidden_size, intermediate).with_names(context.names);
    if geometry.ep_size > 1 {
        spec = spec.with_local_experts(logical.iter().map(|&id| id as usize).collect());
    }
    if map.is_some() {
        // Packs that the source shows are of the experts that the geometry places here.
        spec = spec.one_by_one();
    }
    if !sliced {
        spec = spec.with_tp(geometry.moe_tp_rank, geometry.moe_tp_size);
    }
    spec.refuse_unread(&experts)?;
    let weights = match &context.quant {
        Some(source) => load_quantised(options, context, logical, source.as_ref(), &spec, experts)?,
        None => ExpertWeights::load(&spec, experts)?,
    };
    Ok(Part { weights, map, layout })
}

/// Loads this rank's experts from a checkpoint with quantised modules: packed as they are, or where emulation is asked for
/// as the floats that they mean.
fn load_quantised(
    options: &BlockOptions,
    context: &BlockContext,
    local_experts: &[u32],
    source: &dyn QuantSource,
    spec: &LoadSpec,
    experts: VarBuilder,
) -> Result<ExpertWeights> {
    let prefix = experts.prefix();
    let geometry = &context.geometry;
    let modules = |names: &[&str]| -> Vec<Vec<String>> {
        let of = |id: &u32| names.iter().map(|name| format!("{prefix}.{id}.{name}")).collect();
        local_experts.iter().map(of).collect()
    };
    let names = &context.names;
    let gate_up = modules(&[names.gate, names.up]);
    let down = modules(&[names.down]);
    let Some(first) = gate_up.first().and_then(|expert| expert.first()) else {
        return ExpertWeights::load(spec, experts);
    };
    let scheme = source.scheme(first)?;
    let emulates = options.backend.as_deref() == Some(Backend::Emulation.name());
    if emulates {
        return Ok(ExpertWeights::load(spec, experts)?.emulating(scheme));
    }
    if !alike(source, &prefix, names, options.router.num_experts)? {
        warn!("experts loaded as floats: {prefix}: expected one scheme for all experts, got several");
        return ExpertWeights::load(spec, experts);
    }
    let segments = geometry.expert_intermediate(options.intermediate_size)?.local_segments.len();
    let dtype = experts.dtype();
    let ex = Exec::on(experts.device())?;
    match Weight::quantised_experts(source, [&gate_up, &down], segments, dtype, &ex)? {
        Opened::Packed([w13, w2]) => {
            note_packing(&format!("{prefix}: gate and up"), &w13);
            note_packing(&format!("{prefix}: down"), &w2);
            return ExpertWeights::quantised(w13, w2);
        }
        Opened::Apart(why) => warn!("experts loaded as floats: {why}"),
        Opened::Floats => {}
    }
    ExpertWeights::load(spec, experts)
}

/// Whether each matrix has one scheme in all experts of all ranks: else a rank whose own experts are alike would multiply integers
/// where another multiplies floats, and the bits of a token would depend on the number of ranks.
fn alike(source: &dyn QuantSource, prefix: &str, names: &MlpNames, experts: usize) -> Result<bool> {
    for name in names.matrices() {
        let first = source.scheme(&format!("{prefix}.0.{name}"))?;
        for id in 1..experts {
            if source.scheme(&format!("{prefix}.{id}.{name}"))? != first {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
