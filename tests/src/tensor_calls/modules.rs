//! Calls of model-runtime: norm, embedding, vocabulary projection, attention over a paged cache.

use candle_core::{Result, Tensor};
use model_runtime::{
    Attention, AttentionConfig, AttentionWeights, Embedding, KvCache, KvLayout, LmHead, LogitsRows, QkNorm,
    RmsNorm, Rope, RopeConfig, RopeScaling, RotatedPairs, SequenceStep, Step,
};

use super::case::{Call, Case};

pub const CALLS: &[(&str, Call)] = &[
    ("RmsNorm", |case| {
        let norm = RmsNorm::new(case.weight(&[case.sizes.hidden], 1.)?, 1e-6)?;
        Ok(vec![
            norm.forward(&case.hidden()?)?,
            norm.forward(&case.input(&case.sizes.dims(), candle_core::DType::F32)?)?,
        ])
    }),
    ("Embedding", |case| {
        let table = Embedding::new(case.weight(&[VOCAB, case.sizes.hidden], 1.)?)?;
        let ids = (0..case.sizes.rows()).map(|t| (t * 7 % VOCAB) as u32).collect();
        Ok(vec![table.forward(&case.words(ids, case.sizes.tokens)?)?])
    }),
    ("LmHead", |case| {
        let head = LmHead::new(case.weight(&[VOCAB, case.sizes.hidden], 0.1)?)?;
        Ok(vec![head.forward(&case.hidden()?)?])
    }),
    ("Attention", attention),
];

/// Rows of the embedding.
const VOCAB: usize = 53;

/// A prompt in two steps: all rows but one, then the last with the cache.
fn attention(case: &Case) -> Result<Vec<Tensor>> {
    let tokens = case.sizes.rows();
    let hidden = case.sizes.hidden;
    let heads = 4;
    let kv_heads = 2;
    let dim = if hidden < 1024 { 18 } else { 128 };
    let config = AttentionConfig {
        hidden_size: hidden,
        num_heads: heads,
        num_kv_heads: kv_heads,
        head_dim: dim,
        rotary_dim: dim,
        rotated_pairs: RotatedPairs::Halves,
        qkv_bias: false,
        o_bias: true,
        qk_norm: QkNorm::PerHead,
        rms_norm_eps: 1e-6,
        sliding_window: None,
        softmax_scale: None,
        sinks: true,
        output_gate: false,
        zero_centred_norms: false,
    };
    let scale = 2. / (hidden as f32).sqrt();
    let weights = AttentionWeights {
        qkv: case.weight(&[config.qkv_rows(), hidden], scale)?,
        qkv_bias: None,
        o: case.weight(&[hidden, heads * dim], scale)?,
        o_bias: Some(case.weight(&[hidden], 0.1)?),
        qk_norm: Some((case.weight(&[dim], 1.)?, case.weight(&[dim], 1.)?)),
        sinks: Some(case.weight(&[heads], 2.)?),
    };
    let attention = Attention::new(config, weights)?;
    let layout = KvLayout { num_kv_heads: kv_heads, head_dim: dim, value_dim: Some(dim), dtype: case.dtype };
    let block_size = 16;
    let ids = vec![0; tokens];
    let blocks: Vec<u32> = (0..tokens.div_ceil(block_size) as u32).rev().collect();
    let mut cache = KvCache::new_on(&case.device, &layout.layers(1), blocks.len().max(1), block_size)?;
    let rope = RopeConfig {
        theta: 1e4,
        dim,
        head_dim: dim,
        max_position_embeddings: 512,
        scaling: RopeScaling::Default,
    };
    let rope = Rope::new(rope);
    let kv = cache.layer_mut(0)?;
    let mut outputs = Vec::new();
    for rows in [0..tokens.saturating_sub(1), tokens.saturating_sub(1)..tokens] {
        if rows.is_empty() {
            continue;
        }
        let sequence = SequenceStep {
            token_ids: &ids[rows.clone()],
            start: rows.start,
            prompt_len: tokens,
            blocks: &blocks,
            logits: LogitsRows::None,
            scored: &[],
        };
        let step = Step::new([sequence], block_size)?;
        let x = case.input(&[rows.len(), hidden], case.dtype)?;
        outputs.push(attention.forward(&x, &step.views()?, &rope, kv)?);
    }
    Ok(outputs)
}
