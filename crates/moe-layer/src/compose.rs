//! Composes a block: loads the weights of this rank's experts, and combines router, dispatch and experts.

use std::sync::Arc;

use candle_nn::VarBuilder;
use moe_chunking::ridge_tokens;
use moe_comm::{ExpertLayout, ExpertMap};
use moe_dispatch::{PrepareFinalize, WhoAdds};
use moe_experts::{Backend, ExpertWeights, Experts, LoadSpec};
use moe_kernels::candle::{Error, Result};
use moe_kernels::names::MlpNames;
use moe_kernels::quant::{Opened, QuantSource};
use moe_kernels::{Exec, Weight};
use tracing::warn;

use crate::block::SparseMoeBlock;
use crate::context::BlockContext;
use crate::gate::Gate;
use crate::options::BlockOptions;
use crate::pack::note_packing;
use crate::placed::PlacedExperts;

/// Makes a block of the context's prepare/finalize backends, each with the experts that `experts` returns for it. Also
/// returns the result of `experts` for the main path. An expert backend that the user names is used only on the main
/// path, because the path for decoding may need another format.
pub(crate) fn compose<S>(
    options: &BlockOptions,
    context: &BlockContext,
    part: Part,
    experts: impl Fn(&dyn PrepareFinalize, Option<&str>) -> Result<(Box<dyn Experts>, S)>,
) -> Result<(SparseMoeBlock, S)> {
    let config = &options.router;
    let Part { gate, layout, weights, map } = part;
    let Gate { router, weight, bias } = gate;
    let device = weight.device().clone();
    let placed =
        map.map(|map| PlacedExperts::new(options.layer, map, weights, context).map(Arc::new)).transpose()?;
    let backends = context.backends(&layout, config.apply_router_weight_on_input, &device)?;
    let (main, said) = experts(backends.main.as_ref(), options.backend.as_deref())?;
    let mut block = SparseMoeBlock::of_placed(weight, router, (backends.main, main), options.layer, placed)?
        .with_packed_gate(context.cpu_isa)?;
    if let Some(bias) = bias {
        block = block.with_gate_bias(bias)?;
    }
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

/// The largest number of tokens in a step. Engines refuse larger steps, so a chunk of this size is never cut.
pub const MAX_STEP_TOKENS: usize = 1 << 24;

/// The number of rows of one expert at which a CPU's arithmetic takes about as long as reading its weights. The kernels
/// stream the weights for a dozen rows, and are bound by arithmetic from a few dozen on.
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

/// This rank's part of a block.
pub(crate) struct Part {
    /// The router.
    pub gate: Gate,
    /// The places of the physical experts.
    pub layout: ExpertLayout,
    /// The weights of the experts on this rank.
    pub weights: ExpertWeights,
    /// The logical expert of each physical one, if a map places experts.
    pub map: Option<ExpertMap>,
}

/// Loads this rank's part of a block. The settings are checked first, then the gate, which is small, and the experts
/// come last, so that a fault is not found after they were read.
pub(crate) fn load_part(
    options: &BlockOptions,
    context: &BlockContext,
    gate: VarBuilder,
    experts: VarBuilder,
) -> Result<Part> {
    options.check()?;
    let geometry = &context.geometry;
    let map = context.placements.map(options.layer, options.packed_experts(), geometry.ep_size)?;
    let layout = match &map {
        Some(map) => map.layout(geometry.ep_rank)?,
        None => geometry.expert_layout(options.packed_experts())?,
    };
    // These are the numbers of the experts in the checkpoint.
    let logical = map.as_ref().map_or(&layout.local_experts[..], |map| map.experts(geometry.ep_rank));
    let width = geometry.expert_intermediate(options.intermediate_size)?.range.len();
    let sliced = context.sliced_weights;
    let intermediate = if sliced { width } else { options.intermediate_size };
    let mut spec =
        LoadSpec::new(options.packed_experts(), options.hidden_size, intermediate).with_names(context.names);
    spec = spec.with_bias(options.expert_bias);
    if geometry.ep_size > 1 {
        spec = spec.with_local_experts(logical.iter().map(|&id| id as usize).collect());
    }
    if map.is_some() {
        // Packs of the source hold the experts of the geometry, and not the experts of the map.
        spec = spec.one_by_one();
    }
    if !sliced {
        spec = spec.with_tp(geometry.moe_tp_rank, geometry.moe_tp_size);
    }
    spec.check()?;
    let gate = Gate::load(options, gate)?;
    spec.refuse_unread(&experts)?;
    let weights = match &context.quant {
        Some(source) => load_quantised(options, context, logical, source.as_ref(), &spec, experts)?,
        None => ExpertWeights::load(&spec, experts)?,
    };
    let weights = with_one_down_bias(weights, context)?;
    Ok(Part { gate, weights, map, layout })
}

/// Returns the weights for ranks that cut every expert and add their parts. Only one part may contain the bias of w2,
/// so the other ranks get zeros.
fn with_one_down_bias(weights: ExpertWeights, context: &BlockContext) -> Result<ExpertWeights> {
    let who = context.who_adds.unwrap_or(WhoAdds::usual(weights.device()));
    match weights.w2_bias() {
        Some(bias) if context.geometry.moe_tp_rank > 0 && who == WhoAdds::ByRank => {
            let zeros = bias.zeros_like()?;
            let w13_bias = weights.w13_bias().cloned();
            weights.with_biases(w13_bias, Some(zeros))
        }
        _ => Ok(weights),
    }
}

/// Loads this rank's experts from a checkpoint with quantised modules. They are packed without conversion. With
/// emulation they are converted to floats.
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
    // On a device the rows of gate and up are put into the order of down's columns, and nothing does that with biases.
    if spec.has_bias && scheme.act_order && experts.device().is_cuda() {
        warn!("experts loaded as floats: {prefix}: they have act-order and biases");
        return ExpertWeights::load(spec, experts);
    }
    let segments = geometry.expert_intermediate(options.intermediate_size)?.local_segments.len();
    let dtype = experts.dtype();
    let ex = Exec::on(experts.device())?;
    match Weight::quantised_experts(source, [&gate_up, &down], segments, dtype, &ex)? {
        Opened::Packed([w13, w2]) => {
            note_packing(&format!("{prefix}: gate and up"), &w13);
            note_packing(&format!("{prefix}: down"), &w2);
            let [w13_bias, w2_bias] = ExpertWeights::load_biases(spec, &experts)?;
            return ExpertWeights::quantised(w13, w2)?.with_biases(w13_bias, w2_bias);
        }
        Opened::Apart(why) => warn!("experts loaded as floats: {why}"),
        Opened::Floats => {}
    }
    ExpertWeights::load(spec, experts)
}

/// Whether each matrix has the same scheme in all experts of all ranks. Otherwise one rank could multiply integers
/// where another one multiplies floats, and the bits of a token would depend on the number of ranks.
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
