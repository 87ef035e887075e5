//! The DeepSeek-V2 model: the decoder with latent attention and shared experts, and its tensors.

use candle_nn::VarBuilder;
use model_runtime::{
    Decoder, DecoderOptions, Geometry, GeometryError, KvLayout, MlaAttention, MlaConfig, MlaForm, MlaNames,
    TensorLayout,
};
use moe_layer::BackendSelection;
use moe_layer::candle::{DType, Result};

use super::config::DeepseekV2Config;

/// A loaded DeepSeek-V2 model.
pub type DeepseekV2 = Decoder<MlaAttention>;

/// What errors call the reduced size of o_proj.
const OUTPUT: &str = "the width of all value heads";

/// Loads the model with its attention in a form, or one rank's part of it; `vb` is at the root of the
/// checkpoint, has the model dtype and shows the rank's slices. The oracle's choice of expert backend
/// comes along, unless there was none to make.
pub fn load(
    config: &DeepseekV2Config,
    mla: MlaForm,
    options: &DecoderOptions,
    vb: VarBuilder,
) -> Result<(DeepseekV2, Option<BackendSelection>)> {
    let (context, whole) = (options.context, config.mla(mla));
    let heads = context.geometry.attention_heads(whole.num_heads, whole.num_heads)?.heads;
    let ranks = context.row_parallel(OUTPUT, whole.num_heads * whole.v_head_dim)?;
    let part = whole.with_heads(heads.len());
    let kv = kv_layout(config, &context.geometry, mla, vb.dtype())?;
    Decoder::load(&config.decoder, options, kv, vb, |_, vb| {
        let attention = MlaAttention::load_on(part.clone(), config.decoder.names.latent, vb, context)?;
        Ok(attention.with_row_parallel(ranks.clone()))
    })
}

/// What a rank caches of a token, in this form of attention.
pub(crate) fn kv_layout(
    config: &DeepseekV2Config,
    geometry: &Geometry,
    mla: MlaForm,
    dtype: DType,
) -> std::result::Result<KvLayout, GeometryError> {
    let whole = config.mla(mla);
    let heads = geometry.attention_heads(whole.num_heads, whole.num_heads)?.heads;
    Ok(whole.with_heads(heads.len()).kv_layout(config.decoder.num_layers(), dtype))
}

/// The tensors of a checkpoint and the parts of them that a rank holds.
pub(crate) fn layout(
    config: &DeepseekV2Config,
    geometry: &Geometry,
    has: &dyn Fn(&str) -> bool,
) -> std::result::Result<TensorLayout, GeometryError> {
    let names = &config.decoder.names.latent;
    config.decoder.layout(geometry, has, |_, prefix, list| attention(&config.attention, names, prefix, list))
}

/// Up-projections have the rows of this rank's heads, o_proj their columns; down-projections and norms
/// are whole, because all heads read the latents.
fn attention(
    config: &MlaConfig,
    names: &MlaNames,
    prefix: &str,
    list: &mut TensorLayout,
) -> std::result::Result<(), GeometryError> {
    let MlaConfig { hidden_size: h, num_heads, kv_lora_rank: l, v_head_dim: v, bias, .. } = *config;
    let (query, up) = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_nope_head_dim + v);
    let heads = list.geometry.attention_heads(num_heads, num_heads)?.heads;
    let output = list.geometry.row_shard(OUTPUT, num_heads * v)?.range;
    let weight = |name: &str| format!("{prefix}.{name}.weight");
    let by_head = |list: &mut TensorLayout, name: &str, width: usize, columns: usize| {
        list.rows(weight(name), [num_heads * width, columns], heads.start * width..heads.end * width);
    };
    let biases = |list: &mut TensorLayout, name: &str, rows: usize| {
        if bias {
            list.whole(format!("{prefix}.{name}.bias"), &[rows]);
        }
    };
    match config.q_lora_rank {
        None => by_head(list, names.q, query, h),
        Some(rank) => {
            list.whole(weight(names.q_a), &[rank, h]);
            biases(list, names.q_a, rank);
            list.whole(weight(names.q_a_norm), &[rank]);
            by_head(list, names.q_b, query, rank);
        }
    }
    let latent = l + config.qk_rope_head_dim;
    list.whole(weight(names.kv_a), &[latent, h]);
    biases(list, names.kv_a, latent);
    list.whole(weight(names.kv_a_norm), &[l]);
    by_head(list, names.kv_b, up, l);
    list.columns(weight(names.o), [h, num_heads * v], output);
    biases(list, names.o, h);
    Ok(())
}
