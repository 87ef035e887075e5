"""Families with layers of linear attention: their transformers classes and config keys."""

from transformers import (
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from family import Family

QWEN3_NEXT = Family(
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    qwen3_next.Qwen3NextRotaryEmbedding,
    qwen3_next.Qwen3NextSparseMoeBlock,
    (
        "architectures", "attention_bias", "attention_dropout", "bos_token_id",
        "decoder_sparse_step", "eos_token_id", "full_attention_interval", "head_dim", "hidden_act",
        "hidden_size", "initializer_range", "intermediate_size", "layer_types",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_value_head_dim", "max_position_embeddings",
        "mlp_only_layers", "model_type", "moe_intermediate_size", "norm_topk_prob",
        "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
        "num_key_value_heads", "output_router_logits", "partial_rotary_factor", "rms_norm_eps",
        "rope_scaling", "rope_theta", "router_aux_loss_coef", "shared_expert_intermediate_size",
        "tie_word_embeddings", "torch_dtype", "use_cache", "vocab_size",
    ),
    {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "decoder_sparse_step": 1,
        "eos_token_id": None, "full_attention_interval": 4, "hidden_act": "silu",
        "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "mlp_only_layers": [],
        "norm_topk_prob": True, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "use_cache": True,
    },
)  # fmt: skip

QWEN3_5_MOE = Family(
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeForCausalLM,
    qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding,
    qwen3_5_moe.Qwen3_5MoeSparseMoeBlock,
    (
        "architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype",
        "eos_token_id", "full_attention_interval", "head_dim", "hidden_act", "hidden_size",
        "initializer_range", "layer_types", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
        "max_position_embeddings", "model_type", "moe_intermediate_size", "num_attention_heads",
        "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "rope_parameters", "router_aux_loss_coef",
        "shared_expert_intermediate_size", "tie_word_embeddings", "torch_dtype", "use_cache",
        "vocab_size",
    ),
    {
        "architectures": ["Qwen3_5MoeForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None,
        "full_attention_interval": 4, "hidden_act": "silu", "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False, "use_cache": True,
    },
)  # fmt: skip
