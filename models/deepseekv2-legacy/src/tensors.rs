//! The tensors that a DeepSeek-V2 checkpoint has, by its config.

use model_runtime::TensorSpec;

use crate::config::DeepseekV2Config;

/// All tensors of a checkpoint. `has` tells which names are present: experts come one by one, as on
/// the hub, or packed, as transformers 5 holds them.
pub(crate) fn tensors(config: &DeepseekV2Config, has: &dyn Fn(&str) -> bool) -> Vec<TensorSpec> {
    let h = config.hidden_size;
    let mut list = List(Vec::new());
    list.matrix("model.embed_tokens", config.vocab_size, h);
    for (layer, sparse) in config.is_sparse.iter().enumerate() {
        let prefix = format!("model.layers.{layer}");
        attention(config, &format!("{prefix}.self_attn"), &mut list);
        list.vector(&format!("{prefix}.input_layernorm.weight"), h);
        list.vector(&format!("{prefix}.post_attention_layernorm.weight"), h);
        let mlp = format!("{prefix}.mlp");
        if *sparse {
            experts(config, &mlp, has, &mut list);
        } else {
            list.mlp(&mlp, h, config.intermediate_size);
        }
    }
    list.vector("model.norm.weight", h);
    if !config.tie_word_embeddings {
        list.matrix("lm_head", config.vocab_size, h);
    }
    list.0
}

fn attention(config: &DeepseekV2Config, prefix: &str, list: &mut List) {
    let (h, mla) = (config.hidden_size, &config.attention);
    let (heads, l) = (mla.num_heads, mla.kv_lora_rank);
    let query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    let latent = l + mla.qk_rope_head_dim;
    match mla.q_lora_rank {
        None => list.matrix(&format!("{prefix}.q_proj"), query, h),
        Some(rank) => {
            list.biased(&format!("{prefix}.q_a_proj"), rank, h, mla.bias);
            list.vector(&format!("{prefix}.q_a_layernorm.weight"), rank);
            list.matrix(&format!("{prefix}.q_b_proj"), query, rank);
        }
    }
    list.biased(&format!("{prefix}.kv_a_proj_with_mqa"), latent, h, mla.bias);
    list.vector(&format!("{prefix}.kv_a_layernorm.weight"), l);
    list.matrix(&format!("{prefix}.kv_b_proj"), heads * (mla.qk_nope_head_dim + mla.v_head_dim), l);
    list.biased(&format!("{prefix}.o_proj"), h, heads * mla.v_head_dim, mla.bias);
}

fn experts(config: &DeepseekV2Config, prefix: &str, has: &dyn Fn(&str) -> bool, list: &mut List) {
    let (e, h, i) = (config.num_experts(), config.hidden_size, config.moe_intermediate_size);
    list.matrix(&format!("{prefix}.gate"), e, h);
    let shared = format!("{prefix}.shared_experts");
    // Without shared experts, transformers 5 writes their tensors with a width of 0.
    if config.n_shared_experts > 0 || has(&format!("{shared}.down_proj.weight")) {
        list.mlp(&shared, h, config.shared_intermediate_size());
    }
    let packed = format!("{prefix}.experts.gate_up_proj");
    if has(&packed) {
        list.0.push(TensorSpec::new(packed, &[e, 2 * i, h]));
        list.0.push(TensorSpec::new(format!("{prefix}.experts.down_proj"), &[e, h, i]));
        return;
    }
    for expert in 0..e {
        list.mlp(&format!("{prefix}.experts.{expert}"), h, i);
    }
}

struct List(Vec<TensorSpec>);

impl List {
    fn vector(&mut self, name: &str, size: usize) {
        self.0.push(TensorSpec::new(name, &[size]));
    }

    fn matrix(&mut self, name: &str, rows: usize, columns: usize) {
        self.0.push(TensorSpec::new(format!("{name}.weight"), &[rows, columns]));
    }

    fn biased(&mut self, name: &str, rows: usize, columns: usize, bias: bool) {
        self.matrix(name, rows, columns);
        if bias {
            self.vector(&format!("{name}.bias"), rows);
        }
    }

    fn mlp(&mut self, prefix: &str, hidden: usize, intermediate: usize) {
        self.matrix(&format!("{prefix}.gate_proj"), intermediate, hidden);
        self.matrix(&format!("{prefix}.up_proj"), intermediate, hidden);
        self.matrix(&format!("{prefix}.down_proj"), hidden, intermediate);
    }
}
