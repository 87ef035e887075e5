//! Which parts of a Qwen3-MoE checkpoint a rank holds.
//!
//! Attention heads, dense MLPs and the vocabulary are cut over the tensor-parallel group. Experts
//! are cut along their intermediate size, or, with expert parallelism, whole on one rank each.
//! Norms and router gates are on every rank.

use std::ops::Range;

use model_runtime::{Geometry, GeometryError, TensorSlice};

use crate::config::Qwen3MoeConfig;

/// The slices of the rank of this geometry; `packed(layer)` as in [`Qwen3MoeConfig::tensors`].
///
/// # Errors
/// Sizes that the geometry cannot cut.
pub(crate) fn slices(
    config: &Qwen3MoeConfig,
    geometry: &Geometry,
    packed: impl Fn(usize) -> bool,
) -> Result<Vec<TensorSlice>, GeometryError> {
    let mut list = Vec::new();
    if geometry.tp_size > 1 {
        let rows = [geometry.vocab_shard(config.vocab_size), 0..config.hidden_size];
        list.push(TensorSlice::new("model.embed_tokens.weight", &rows));
        if !config.tie_word_embeddings {
            list.push(TensorSlice::new("lm_head.weight", &rows));
        }
    }
    for (layer, sparse) in config.is_sparse.iter().enumerate() {
        let prefix = format!("model.layers.{layer}");
        if geometry.tp_size > 1 {
            attention(config, geometry, &format!("{prefix}.self_attn"), &mut list)?;
        }
        let mlp = format!("{prefix}.mlp");
        if *sparse {
            experts(config, geometry, &format!("{mlp}.experts"), packed(layer), &mut list)?;
        } else if geometry.tp_size > 1 {
            let part = geometry.row_shard("intermediate_size", config.intermediate_size)?.range;
            gated_mlp(&mlp, config.hidden_size, &part, &mut list);
        }
    }
    Ok(list)
}

fn attention(
    config: &Qwen3MoeConfig,
    geometry: &Geometry,
    prefix: &str,
    list: &mut Vec<TensorSlice>,
) -> Result<(), GeometryError> {
    let (h, d) = (config.hidden_size, config.head_dim);
    let heads = geometry.attention_heads(config.num_attention_heads, config.num_key_value_heads)?;
    let rows = |heads: &Range<usize>| heads.start * d..heads.end * d;
    let (q, kv) = (rows(&heads.heads), rows(&heads.kv_heads));
    for (name, rows) in [("q_proj", &q), ("k_proj", &kv), ("v_proj", &kv)] {
        list.push(TensorSlice::new(format!("{prefix}.{name}.weight"), &[rows.clone(), 0..h]));
        if config.attention_bias {
            list.push(TensorSlice::new(format!("{prefix}.{name}.bias"), std::slice::from_ref(rows)));
        }
    }
    list.push(TensorSlice::new(format!("{prefix}.o_proj.weight"), &[0..h, q]));
    Ok(())
}

fn gated_mlp(prefix: &str, hidden: usize, part: &Range<usize>, list: &mut Vec<TensorSlice>) {
    for name in ["gate_proj", "up_proj"] {
        list.push(TensorSlice::new(format!("{prefix}.{name}.weight"), &[part.clone(), 0..hidden]));
    }
    list.push(TensorSlice::new(format!("{prefix}.down_proj.weight"), &[0..hidden, part.clone()]));
}

/// Packed experts are shown one by one, so that a rank reads its own only.
fn experts(
    config: &Qwen3MoeConfig,
    geometry: &Geometry,
    prefix: &str,
    packed: bool,
    list: &mut Vec<TensorSlice>,
) -> Result<(), GeometryError> {
    if geometry.ep_size == 1 && geometry.moe_tp_size == 1 {
        return Ok(());
    }
    let (h, i) = (config.hidden_size, config.moe_intermediate_size);
    let part = geometry.expert_intermediate(i)?.range;
    for expert in geometry.expert_layout(config.num_experts)?.local_experts {
        let (e, name) = (expert as usize, format!("{prefix}.{expert}"));
        if !packed {
            gated_mlp(&name, h, &part, list);
            continue;
        }
        let pack = format!("{prefix}.gate_up_proj");
        for (half, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let rows = half * i + part.start..half * i + part.end;
            let ranges = [e..e + 1, rows, 0..h];
            list.push(TensorSlice::renamed(format!("{name}.{projection}.weight"), &pack, &ranges));
        }
        let ranges = [e..e + 1, 0..h, part.clone()];
        let pack = format!("{prefix}.down_proj");
        list.push(TensorSlice::renamed(format!("{name}.down_proj.weight"), pack, &ranges));
    }
    Ok(())
}
