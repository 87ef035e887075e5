//! The Qwen3-MoE model: the decoder with grouped-query attention, and its tensors.

use candle_nn::VarBuilder;
use model_runtime::{
    Attention, AttentionConfig, AttentionNames, Decoder, DecoderOptions, Geometry, GeometryError, KvLayout,
    TensorLayout,
};
use moe_layer::BackendSelection;
use moe_layer::candle::{DType, Result};

use super::config::Qwen3MoeConfig;

/// A loaded Qwen3-MoE model.
pub type Qwen3Moe = Decoder<Attention>;

/// Loads the model, or one rank's part of it; `vb` is at the root of the checkpoint, has the model dtype
/// and shows the rank's slices. The oracle's choice of expert backend comes along, unless there was
/// none to make.
pub fn load(
    config: &Qwen3MoeConfig,
    options: &DecoderOptions,
    vb: VarBuilder,
) -> Result<(Qwen3Moe, Option<BackendSelection>)> {
    let (context, whole) = (options.context, &config.attention);
    let heads = context.geometry.attention_heads(whole.num_heads, whole.num_kv_heads)?;
    let ranks = context.row_parallel("the width of all query heads", whole.num_heads * whole.head_dim)?;
    let part =
        AttentionConfig { num_heads: heads.heads.len(), num_kv_heads: heads.kv_heads.len(), ..whole.clone() };
    let names = config.decoder.names.grouped_query;
    let kv = kv_layout(config, &context.geometry, vb.dtype())?;
    Decoder::load(&config.decoder, options, kv, vb, |vb| {
        let attention = Attention::load_on(part.clone(), names, vb, context)?;
        Ok(attention.with_row_parallel(ranks.clone()))
    })
}

/// What a rank caches of a token.
pub(crate) fn kv_layout(
    config: &Qwen3MoeConfig,
    geometry: &Geometry,
    dtype: DType,
) -> std::result::Result<KvLayout, GeometryError> {
    let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = config.attention;
    let num_kv_heads = geometry.attention_heads(num_heads, num_kv_heads)?.kv_heads.len();
    let num_layers = config.decoder.num_layers();
    Ok(KvLayout { num_layers, num_kv_heads, head_dim, value_dim: Some(head_dim), dtype })
}

/// The tensors of a checkpoint and the parts of them that a rank holds.
pub(crate) fn layout(
    config: &Qwen3MoeConfig,
    geometry: &Geometry,
    has: &dyn Fn(&str) -> bool,
) -> std::result::Result<TensorLayout, GeometryError> {
    let (names, attention) = (&config.decoder.names.grouped_query, &config.attention);
    config.decoder.layout(geometry, has, |prefix, list| attention_layout(attention, names, prefix, list))
}

fn attention_layout(
    config: &AttentionConfig,
    names: &AttentionNames,
    prefix: &str,
    list: &mut TensorLayout,
) -> std::result::Result<(), GeometryError> {
    let AttentionConfig { hidden_size: h, head_dim: d, num_heads, num_kv_heads, .. } = *config;
    let heads = list.geometry.attention_heads(num_heads, num_kv_heads)?;
    let output = list.geometry.row_shard("the width of all query heads", num_heads * d)?.range;
    let kv = heads.kv_heads.start * d..heads.kv_heads.end * d;
    for (name, heads, held) in
        [(names.q, num_heads, &output), (names.k, num_kv_heads, &kv), (names.v, num_kv_heads, &kv)]
    {
        list.rows(format!("{prefix}.{name}.weight"), [heads * d, h], held.clone());
        if config.qkv_bias {
            list.part(format!("{prefix}.{name}.bias"), &[heads * d], std::slice::from_ref(held));
        }
    }
    list.columns(format!("{prefix}.{}.weight", names.o), [h, num_heads * d], output);
    if config.o_bias {
        list.whole(format!("{prefix}.{}.bias", names.o), &[h]);
    }
    for norm in [names.q_norm, names.k_norm] {
        list.whole(format!("{prefix}.{norm}.weight"), &[d]);
    }
    Ok(())
}
