"""The parity fixtures of GLM-4.5."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "glm4_moe",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
}

Spec = partial(AnySpec, BASE)

# Sizes that groups of 32 and packed words divide.
QUANT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4}

GLM4_SPECS = [
    Spec("glm4", "hub-style config and per-expert tensors, bf16: half of each head rotated, biases of q, k and v alone, a "
         "dense first layer, sigmoid scores with a correction bias, a shared expert", 30,
         {"attention_bias": True, "n_routed_experts": 8, "routed_scaling_factor": 2.5}),
    Spec("glm4-qk-norm", "use_qk_norm: norms over each head of q and of k before half of it is rotated; two dense layers; "
         "weights stored in f32", 4,
         {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2, "num_hidden_layers": 4},
         dtype=torch.float32),
    Spec("glm4-quarter", "partial_rotary_factor 0.25, groups of experts (n_group 3, topk_group 2), norm_topk_prob false, two "
         "shared experts", 17,
         {"partial_rotary_factor": 0.25, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2}),
    Spec("glm4-saved", "exactly what transformers 5 writes: partial_rotary_factor in rope_parameters, linear RoPE", 25,
         {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, layout="saved"),
    Spec("glm4-packed", "packed 3-D experts, as transformers 5 writes them", 36, layout="saved-packed"),
    Spec("glm4-minimal-config", "keys left to their defaults: partial_rotary_factor 0.5, num_key_value_heads 8, "
         "n_routed_experts 128, num_experts_per_tok 8, first_k_dense_replace 1, n_shared_experts 1, ...", 25,
         {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
          "moe_intermediate_size": 4, "num_hidden_layers": 2},
         drop=("partial_rotary_factor", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok",
               "first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob",
               "routed_scaling_factor", "rms_norm_eps", "rope_scaling", "hidden_act", "attention_bias", "use_qk_norm",
               "tie_word_embeddings", "initializer_range", "attention_dropout", "use_cache", "bos_token_id",
               "eos_token_id", "pad_token_id")),
    Spec("glm4-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 17,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
    Spec("glm4-f32-gate", "a gate in f32 in a checkpoint in bf16, and pairs of experts that only digits beyond bf16 "
         "tell apart", 414,
         {"num_hidden_layers": 2, "num_experts_per_tok": 3}, batch=1, length=16, generate=8, f32_gates=True),
]  # fmt: skip

GLM4_QUANT_SPECS = [
    Spec("glm4-quant-gptq-int4", "GPTQ, int4 group 32 with act-order: q and k are loaded as floats, since half of each head "
         "is rotated", 5, QUANT | {"attention_bias": True}, quant="gptq-int4-act-order"),
]  # fmt: skip
