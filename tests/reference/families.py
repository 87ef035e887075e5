"""The model families that references are made for: their transformers classes and config keys."""

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie4_5_moe
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax_m2
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

import deepseek_definition
from family import Family
from linear_families import QWEN3_5_MOE, QWEN3_NEXT


QWEN3_MOE = Family(
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    qwen3_moe.Qwen3MoeRotaryEmbedding,
    qwen3_moe.Qwen3MoeSparseMoeBlock,
    (
        "architectures", "attention_bias", "attention_dropout", "bos_token_id",
        "decoder_sparse_step", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "max_window_layers",
        "mlp_only_layers", "model_type", "moe_intermediate_size", "norm_topk_prob",
        "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
        "num_key_value_heads", "output_router_logits", "rms_norm_eps", "rope_scaling",
        "rope_theta", "router_aux_loss_coef", "sliding_window", "tie_word_embeddings",
        "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
    ),
    {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "decoder_sparse_step": 1,
        "eos_token_id": None, "hidden_act": "silu", "initializer_range": 0.02,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "norm_topk_prob": False,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
    },
)  # fmt: skip

DEEPSEEK_V2 = Family(
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    deepseek_v2.DeepseekV2RotaryEmbedding,
    deepseek_v2.DeepseekV2Moe,
    (
        "architectures", "attention_bias", "attention_dropout", "aux_loss_alpha", "bos_token_id",
        "eos_token_id", "ep_size", "first_k_dense_replace", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
        "model_type", "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts",
        "n_shared_experts", "norm_topk_prob", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "pretraining_tp", "q_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "rope_scaling", "rope_theta",
        "routed_scaling_factor", "scoring_func", "seq_aux", "tie_word_embeddings", "topk_group",
        "topk_method", "torch_dtype", "use_cache", "v_head_dim", "vocab_size",
    ),
    {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": None,
        "eos_token_id": None, "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "deepseek_v2", "moe_layer_freq": 1, "n_group": 1, "norm_topk_prob": False,
        "pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "use_cache": True,
    },
)  # fmt: skip

MIXTRAL = Family(
    MixtralConfig,
    MixtralForCausalLM,
    mixtral.MixtralRotaryEmbedding,
    mixtral.MixtralSparseMoeBlock,
    (
        "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim",
        "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "model_type", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "num_local_experts", "output_router_logits",
        "rms_norm_eps", "rope_scaling", "rope_theta", "router_aux_loss_coef", "sliding_window",
        "tie_word_embeddings", "torch_dtype", "use_cache", "vocab_size",
    ),
    {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "mixtral", "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "use_cache": True,
    },
    {
        ".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    },
)  # fmt: skip

OLMOE = Family(
    OlmoeConfig,
    OlmoeForCausalLM,
    olmoe.OlmoeRotaryEmbedding,
    olmoe.OlmoeSparseMoeBlock,
    (
        "architectures", "attention_bias", "attention_dropout", "bos_token_id", "clip_qkv",
        "eos_token_id",
        "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "model_type", "norm_topk_prob", "num_attention_heads",
        "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "output_router_logits", "pad_token_id", "rms_norm_eps", "rope_scaling", "rope_theta",
        "router_aux_loss_coef", "tie_word_embeddings", "torch_dtype", "use_cache", "vocab_size",
    ),
    {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "olmoe", "norm_topk_prob": False, "output_router_logits": False,
        "pad_token_id": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "use_cache": True,
    },
)  # fmt: skip

QWEN2_MOE = Family(
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    qwen2_moe.Qwen2MoeRotaryEmbedding,
    qwen2_moe.Qwen2MoeSparseMoeBlock,
    (
        "architectures", "attention_dropout", "bos_token_id", "decoder_sparse_step",
        "eos_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "layer_types", "max_position_embeddings", "max_window_layers", "mlp_only_layers",
        "model_type", "moe_intermediate_size", "norm_topk_prob", "num_attention_heads",
        "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "output_router_logits", "qkv_bias", "rms_norm_eps", "rope_scaling", "rope_theta",
        "router_aux_loss_coef", "shared_expert_intermediate_size", "sliding_window",
        "tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window", "vocab_size",
    ),
    {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None,
        "decoder_sparse_step": 1, "eos_token_id": None, "hidden_act": "silu",
        "initializer_range": 0.02, "model_type": "qwen2_moe", "norm_topk_prob": False,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": 32768, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False,
    },
)  # fmt: skip

GLM4_MOE = Family(
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    glm4_moe.Glm4MoeRotaryEmbedding,
    glm4_moe.Glm4MoeMoE,
    (
        "architectures", "attention_bias", "attention_dropout", "pad_token_id", "bos_token_id",
        "eos_token_id", "head_dim", "hidden_act", "hidden_size", "partial_rotary_factor",
        "initializer_range", "intermediate_size", "max_position_embeddings", "model_type",
        "moe_intermediate_size", "norm_topk_prob", "num_attention_heads", "n_group", "topk_group",
        "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "num_experts_per_tok",
        "first_k_dense_replace", "num_hidden_layers", "num_key_value_heads",
        "num_nextn_predict_layers", "rms_norm_eps", "rope_scaling", "rope_theta",
        "tie_word_embeddings", "torch_dtype", "use_cache", "use_qk_norm", "vocab_size",
    ),
    {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "eos_token_id": None, "first_k_dense_replace": 1,
        "hidden_act": "silu", "initializer_range": 0.02, "model_type": "glm4_moe", "n_group": 1,
        "norm_topk_prob": True, "pad_token_id": None, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_cache": True, "use_qk_norm": False,
    },
)  # fmt: skip

DEEPSEEK_V3 = Family(
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    deepseek_v3.DeepseekV3RotaryEmbedding,
    deepseek_v3.DeepseekV3MoE,
    (
        "architectures", "attention_bias", "attention_dropout", "aux_loss_alpha", "bos_token_id",
        "eos_token_id", "ep_size", "first_k_dense_replace", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
        "model_type", "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts",
        "n_shared_experts", "norm_topk_prob", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "num_nextn_predict_layers", "pretraining_tp",
        "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "rope_scaling",
        "rope_theta", "routed_scaling_factor", "scoring_func", "seq_aux", "tie_word_embeddings",
        "topk_group", "topk_method", "torch_dtype", "use_cache", "v_head_dim", "vocab_size",
    ),
    {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": None,
        "eos_token_id": None, "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02,
        "moe_layer_freq": 1, "norm_topk_prob": True,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 10000.0, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_method": "noaux_tc", "use_cache": True,
    },
)  # fmt: skip

GLM4_MOE_LITE = Family(
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    glm4_moe_lite.Glm4MoeLiteRotaryEmbedding,
    glm4_moe_lite.Glm4MoeLiteMoE,
    (
        "architectures", "attention_bias", "attention_dropout", "pad_token_id", "bos_token_id",
        "eos_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "model_type", "moe_intermediate_size", "mlp_layer_types",
        "topk_method", "norm_topk_prob", "num_attention_heads", "n_group", "topk_group",
        "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "num_experts_per_tok",
        "first_k_dense_replace", "num_hidden_layers", "num_key_value_heads",
        "num_nextn_predict_layers", "partial_rotary_factor", "rms_norm_eps", "rope_scaling",
        "rope_theta", "tie_word_embeddings", "torch_dtype", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "use_cache", "v_head_dim", "vocab_size",
    ),
    {
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None,
        "first_k_dense_replace": 1, "hidden_act": "silu", "initializer_range": 0.02,
        "n_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "pad_token_id": None,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "use_cache": True,
    },
)  # fmt: skip

MINIMAX_M2 = Family(
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    minimax_m2.MiniMaxM2RotaryEmbedding,
    minimax_m2.MiniMaxM2SparseMoeBlock,
    (
        "architectures", "attention_dropout", "attn_type_list", "bos_token_id", "eos_token_id",
        "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "model_type", "mtp_transformer_layers", "num_attention_heads",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
        "num_mtp_modules", "output_router_logits", "partial_rotary_factor", "qk_norm_type",
        "rms_norm_eps", "rope_scaling", "rope_theta", "rotary_dim", "router_aux_loss_coef",
        "router_jitter_noise", "scoring_func", "shared_intermediate_size", "tie_word_embeddings",
        "torch_dtype", "use_cache", "use_mtp", "use_qk_norm", "use_routing_bias", "vocab_size",
    ),
    {
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None,
        "eos_token_id": None, "hidden_act": "silu", "initializer_range": 0.02,
        "mtp_transformer_layers": 1, "num_mtp_modules": 3, "output_router_logits": False,
        "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    },
    {
        ".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    },
)  # fmt: skip

ERNIE4_5_MOE = Family(
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ernie4_5_moe.Ernie4_5_MoeRotaryEmbedding,
    ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock,
    (
        "architectures", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "model_type",
        "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "pad_token_id",
        "rms_norm_eps", "use_cache", "vocab_size", "rope_theta", "rope_scaling",
        "tie_word_embeddings", "torch_dtype", "use_bias", "moe_num_experts",
        "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index",
        "moe_layer_interval", "moe_intermediate_size", "moe_k", "moe_norm_min",
    ),
    {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": None, "eos_token_id": None,
        "hidden_act": "silu", "initializer_range": 0.02, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "pad_token_id": None,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "use_bias": False, "use_cache": True,
    },
    {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
)  # fmt: skip

GPT_OSS = Family(
    GptOssConfig,
    GptOssForCausalLM,
    gpt_oss.GptOssRotaryEmbedding,
    gpt_oss.GptOssMLP,
    (
        "architectures", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id",
        "head_dim", "hidden_act", "hidden_size", "initial_context_length", "initializer_range",
        "intermediate_size", "layer_types", "max_position_embeddings", "model_type",
        "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "num_local_experts", "output_router_logits", "pad_token_id", "rms_norm_eps",
        "rope_scaling", "rope_theta", "router_aux_loss_coef", "sliding_window", "swiglu_limit",
        "tie_word_embeddings", "torch_dtype", "use_cache", "vocab_size",
    ),
    {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": None, "hidden_act": "silu", "initializer_range": 0.02,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "use_cache": True,
    },
    gate="router",
)  # fmt: skip


FAMILIES = {
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "glm4_moe": GLM4_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "minimax_m2": MINIMAX_M2,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE,
}

deepseek_definition.install()
