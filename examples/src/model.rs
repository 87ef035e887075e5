//! The three models, as candle-transformers has them and with their block replaced, in one enum.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models as theirs;
use serde_json::{Value, json};

use crate::models as ours;
use crate::weights::Tensors;

/// Logits of the last position of token ids [B, S] that follow `offset` earlier ones.
pub type Forward = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// A model of candle-transformers.
#[derive(Clone, Copy, Debug)]
pub enum Model {
    Mixtral,
    Qwen3Moe,
    DeepSeekV2,
}

pub const VOCAB: usize = 1024;
const HIDDEN: usize = 512;
const LAYERS: usize = 4;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const EXPERTS: usize = 16;
const WIDTH: usize = 256;

impl Model {
    pub const ALL: [Self; 3] = [Self::Mixtral, Self::Qwen3Moe, Self::DeepSeekV2];

    /// The file of candle-transformers without its ending: the model's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixtral => "mixtral",
            Self::Qwen3Moe => "qwen3_moe",
            Self::DeepSeekV2 => "deepseek2",
        }
    }

    /// A small config.
    fn config(self) -> Value {
        let common = json!({
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS / 2, "hidden_act": "silu",
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": false,
            "tie_word_embeddings": false, "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH,
        });
        let own = match self {
            Self::Mixtral => {
                json!({"sliding_window": 512, "num_local_experts": EXPERTS, "use_flash_attn": false})
            }
            Self::Qwen3Moe => json!({
                "head_dim": HEAD_DIM, "sliding_window": null, "max_window_layers": LAYERS, "use_sliding_window": false,
                "decoder_sparse_step": 1, "num_experts": EXPERTS, "norm_topk_prob": true,
            }),
            Self::DeepSeekV2 => json!({
                "n_shared_experts": 2, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "q_lora_rank": null,
                "qk_rope_head_dim": 32, "kv_lora_rank": 128, "v_head_dim": HEAD_DIM, "qk_nope_head_dim": 32,
                "rope_scaling": null, "n_group": 1, "topk_group": 1,
            }),
        };
        let both = [common, own].into_iter().filter_map(|part| part.as_object().cloned()).flatten();
        Value::Object(both.collect())
    }

    /// The tensors of a checkpoint.
    pub fn tensors(self) -> Tensors {
        let mut tensors = Tensors::default();
        tensors.put("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
        tensors.put("model.norm.weight", &[HIDDEN]);
        tensors.put("lm_head.weight", &[VOCAB, HIDDEN]);
        for layer in 0..LAYERS {
            let prefix = format!("model.layers.{layer}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.put(&format!("{prefix}.{norm}.weight"), &[HIDDEN]);
            }
            self.put_attention(&mut tensors, &format!("{prefix}.self_attn"));
            self.put_mlp(&mut tensors, &prefix, layer);
        }
        tensors
    }

    fn put_attention(self, tensors: &mut Tensors, prefix: &str) {
        let mut put = |name: &str, dims: &[usize]| tensors.put(&format!("{prefix}.{name}.weight"), dims);
        put("q_proj", &[HEADS * HEAD_DIM, HIDDEN]);
        put("o_proj", &[HIDDEN, HEADS * HEAD_DIM]);
        if let Self::DeepSeekV2 = self {
            put("kv_a_proj_with_mqa", &[128 + 32, HIDDEN]);
            put("kv_a_layernorm", &[128]);
            put("kv_b_proj", &[HEADS * (32 + HEAD_DIM), 128]);
            return;
        }
        put("k_proj", &[HEADS / 2 * HEAD_DIM, HIDDEN]);
        put("v_proj", &[HEADS / 2 * HEAD_DIM, HIDDEN]);
        if let Self::Qwen3Moe = self {
            put("q_norm", &[HEAD_DIM]);
            put("k_norm", &[HEAD_DIM]);
        }
    }

    fn put_mlp(self, tensors: &mut Tensors, layer_prefix: &str, layer: usize) {
        let mlp = if let Self::Mixtral = self { "block_sparse_moe" } else { "mlp" };
        let prefix = format!("{layer_prefix}.{mlp}");
        let names = match self {
            Self::Mixtral => ["w1", "w3", "w2"],
            Self::Qwen3Moe | Self::DeepSeekV2 => ["gate_proj", "up_proj", "down_proj"],
        };
        let mut put = |prefix: String, width: usize| {
            let dims = [[width, HIDDEN], [width, HIDDEN], [HIDDEN, width]];
            for (name, dims) in names.iter().zip(dims) {
                tensors.put(&format!("{prefix}.{name}.weight"), &dims);
            }
        };
        if let (Self::DeepSeekV2, 0) = (self, layer) {
            return put(prefix, WIDTH);
        }
        (0..EXPERTS).for_each(|expert| put(format!("{prefix}.experts.{expert}"), WIDTH));
        if let Self::DeepSeekV2 = self {
            put(format!("{prefix}.shared_experts"), 2 * WIDTH);
        }
        tensors.put(&format!("{prefix}.gate.weight"), &[EXPERTS, HIDDEN]);
    }

    /// The model as candle-transformers has it. Of two blocks for Qwen3-MoE it is the one that has the dtype.
    pub fn theirs(self, vb: VarBuilder) -> Result<Forward> {
        let config = self.config();
        Ok(match self {
            Self::Mixtral => {
                let mut model = theirs::mixtral::Model::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
            Self::Qwen3Moe if cfg!(feature = "cuda") && vb.dtype() == DType::F32 => {
                let mut model =
                    ours::qwen3_moe_unfused::ModelForCausalLM::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
            Self::Qwen3Moe => {
                let mut model =
                    theirs::qwen3_moe::ModelForCausalLM::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
            Self::DeepSeekV2 => {
                let mut model = theirs::deepseek2::DeepSeekV2::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
        })
    }

    /// The model with its block replaced.
    pub fn ours(self, vb: VarBuilder) -> Result<Forward> {
        let config = self.config();
        Ok(match self {
            Self::Mixtral => {
                let mut model = ours::mixtral::Model::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
            Self::Qwen3Moe => {
                let mut model = ours::qwen3_moe::ModelForCausalLM::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
            Self::DeepSeekV2 => {
                let mut model = ours::deepseek2::DeepSeekV2::new(&serde_json::from_value(config)?, vb)?;
                Box::new(move |ids, offset| model.forward(ids, offset))
            }
        })
    }
}
