//! Calls of moe-layer and moe-experts: whole blocks, shared experts, dense MLPs, experts with given routing.

use candle_core::{Result, Tensor};
use moe_experts::{ExpertWeights, FusedExperts};
use moe_layer::{
    Activation, BlockContext, BlockOptions, ChunkedMoe, GatedMlp, RouterConfig, SharedExperts,
    SparseMoeBlock, load_block, load_block_on,
};

use super::case::{Call, Case};

pub const CALLS: &[(&str, Call)] = &[
    ("SparseMoeBlock", |case| Ok(vec![block(case)?.forward(&case.hidden()?)?])),
    ("SparseMoeBlock, shared experts", |case| Ok(vec![with_shared(case)?.forward(&case.hidden()?)?])),
    ("SparseMoeBlock, zero experts", |case| Ok(vec![zero_experts(case)?.forward(&case.hidden()?)?])),
    ("SparseMoeBlock, chunks", |case| Ok(vec![chunked(case)?.forward(&case.hidden()?)?])),
    ("GatedMlp", |case| Ok(vec![mlp(case)?.forward(&case.hidden()?)?])),
    ("FusedExperts", fused_experts),
];

/// Tokens of a chunk.
const FOUR: std::num::NonZeroUsize = std::num::NonZeroUsize::new(4).unwrap();

fn options(case: &Case) -> BlockOptions {
    BlockOptions {
        router: RouterConfig { renormalize: true, ..RouterConfig::new(case.sizes.experts, case.sizes.top_k) },
        hidden_size: case.sizes.hidden,
        intermediate_size: case.sizes.inter,
        activation: Activation::SwiGlu,
        expert_bias: false,
        layer: 0,
        backend: None,
    }
}

/// Entries of a weight with this many columns whose products are of the size of their inputs.
fn scale(columns: usize) -> f32 {
    2. / (columns as f32).sqrt()
}

/// Tensors of a checkpoint of Qwen3-MoE. The gate's are larger, so that scores differ by more than roundings.
fn tensors(case: &Case, logits: usize) -> Vec<(String, Vec<usize>, f32)> {
    let h = case.sizes.hidden;
    let i = case.sizes.inter;
    let mut all = vec![("gate.weight".into(), vec![logits, h], 2. * scale(h))];
    for e in 0..case.sizes.experts {
        for (name, dims) in [("gate_proj", [i, h]), ("up_proj", [i, h]), ("down_proj", [h, i])] {
            all.push((format!("experts.{e}.{name}.weight"), dims.to_vec(), scale(dims[1])));
        }
    }
    all
}

fn block(case: &Case) -> Result<SparseMoeBlock> {
    let vb = case.checkpoint(&tensors(case, case.sizes.experts))?;
    Ok(load_block(&options(case), vb.pp("gate"), vb.pp("experts"))?.0)
}

fn with_shared(case: &Case) -> Result<SparseMoeBlock> {
    let gate = case.weight(&[1, case.sizes.hidden], scale(case.sizes.hidden))?;
    block(case)?.with_shared_experts(SharedExperts::new(mlp(case)?, Some(gate))?)
}

fn zero_experts(case: &Case) -> Result<SparseMoeBlock> {
    let mut options = options(case);
    options.router.num_zero_experts = 2;
    options.router.renormalize = false;
    options.router.correction_bias = true;
    let mut tensors = tensors(case, case.sizes.experts + 2);
    tensors.push(("gate.e_score_correction_bias".to_string(), vec![case.sizes.experts + 2], 0.1));
    let vb = case.checkpoint(&tensors)?;
    Ok(load_block(&options, vb.pp("gate"), vb.pp("experts"))?.0)
}

fn chunked(case: &Case) -> Result<SparseMoeBlock> {
    let vb = case.checkpoint(&tensors(case, case.sizes.experts))?;
    let context = BlockContext { chunked_moe: ChunkedMoe::of_size(FOUR), ..BlockContext::default() };
    Ok(load_block_on(&options(case), &context, vb.pp("gate"), vb.pp("experts"))?.0)
}

fn mlp(case: &Case) -> Result<GatedMlp> {
    let h = case.sizes.hidden;
    let i = case.sizes.inter;
    let w13 = case.weight(&[2 * i, h], scale(h))?;
    let w2 = case.weight(&[h, i], scale(i))?;
    GatedMlp::new(w13, w2, Activation::SwiGlu)
}

fn fused_experts(case: &Case) -> Result<Vec<Tensor>> {
    let h = case.sizes.hidden;
    let i = case.sizes.inter;
    let e = case.sizes.experts;
    let w13 = case.weight(&[e, 2 * i, h], scale(h))?;
    let w2 = case.weight(&[e, h, i], scale(i))?;
    let experts = FusedExperts::new(ExpertWeights::new(w13, w2, None, None)?, Activation::SwiGlu)?;
    let hidden = case.input(&[case.sizes.rows(), h], case.dtype)?;
    let (ids, weights) = case.routing()?;
    Ok(vec![experts.forward(&hidden, &ids, &weights)?])
}
