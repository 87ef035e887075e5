"""The parity fixtures of DeepSeek-V2.

`norm_topk_prob`, `scoring_func` and `moe_layer_freq` come from `deepseek_definition.py`, everything
else from transformers alone.
"""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "deepseek_v2",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 14,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

Spec = partial(AnySpec, BASE)

GROUPS = {
    "q_lora_rank": 18, "n_routed_experts": 12, "num_experts_per_tok": 3,
    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 4.0,
}  # fmt: skip

# As published, but for a context of 64 and rotated dimensions that its frequencies can tell apart.
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip

DEEPSEEK_SPECS = [
    Spec("deepseek-v2-lite", "V2-Lite: queries without a down-projection, greedy top-2, two shared "
         "experts, first layer dense, YaRN with equal mscales; hub-style, bf16", 10,
         {"max_position_embeddings": 2560, "qk_rope_head_dim": 16, "rope_scaling": YARN}),
    Spec("deepseek-v2", "V2: query down-projection, group_limited_greedy (top-3 of 12 experts, 2 of 4 "
         "groups), routed_scaling_factor 4, YaRN; hub-style, bf16", 155,
         GROUPS | {"max_position_embeddings": 2560, "qk_rope_head_dim": 16, "rope_scaling": YARN}),
    Spec("deepseek-f32", "weights stored in f32; one shared expert, no dense layer", 41,
         {"n_shared_experts": 1, "first_k_dense_replace": 0, "num_hidden_layers": 2},
         dtype=torch.float32),
    Spec("deepseek-f16", "weights stored in f16; groups of 3, of which one stays", 13,
         GROUPS | {"topk_group": 1, "num_hidden_layers": 2}, dtype=torch.float16),
    Spec("deepseek-no-shared", "n_shared_experts 0, without tensors for them; hub-style", 29,
         {"n_shared_experts": 0}),
    Spec("deepseek-no-shared-saved", "n_shared_experts 0 as transformers 5 writes it: tensors of "
         "width 0", 54, {"n_shared_experts": 0, "num_hidden_layers": 2}, layout="saved"),
    Spec("deepseek-saved", "exactly what transformers 5 writes: rope_parameters, dtype, head_dim = "
         "rotated dimensions, per-expert tensors", 54, GROUPS | {"num_hidden_layers": 2},
         layout="saved"),
    Spec("deepseek-packed", "transformers-5 config with packed 3-D experts; the model of "
         "`deepseek-saved`", 54, GROUPS | {"num_hidden_layers": 2}, layout="saved-packed"),
    Spec("deepseek-packed-hub", "packed experts under a hub-style config, three shards with an index",
         27, {"num_hidden_layers": 2}, layout="hub-packed", shards=3),
    Spec("deepseek-yarn-mscale", "YaRN whose mscale and mscale_all_dim differ, so that cos, sin and the "
         "softmax scale all change; transformers-5 rope_parameters", 37,
         {"max_position_embeddings": 256, "qk_rope_head_dim": 16, "num_hidden_layers": 2,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.6,
                           "original_max_position_embeddings": 64}}, layout="saved"),
    Spec("deepseek-yarn-all-dim", "YaRN with mscale_all_dim alone: the default attention factor and a "
         "softmax scale; hub-style", 43,
         {"max_position_embeddings": 256, "qk_rope_head_dim": 16, "num_hidden_layers": 2,
          "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.9,
                           "original_max_position_embeddings": 64}}),
    Spec("deepseek-rope-linear", "linear RoPE with mscale_all_dim, which scales the softmax for every "
         "RoPE type but the default", 10,
         {"num_hidden_layers": 2,
          "rope_scaling": {"type": "linear", "factor": 2.5, "mscale_all_dim": 0.5}}),
    Spec("deepseek-tied", "tie_word_embeddings true, no lm_head.weight in the file", 28,
         {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    Spec("deepseek-attention-bias", "attention_bias true: biases on both down-projections and o", 15,
         {"attention_bias": True, "q_lora_rank": 18, "num_hidden_layers": 2}),
    Spec("deepseek-dense-layers", "first_k_dense_replace 2 of 4 layers", 47,
         {"first_k_dense_replace": 2, "num_hidden_layers": 4}),
    Spec("deepseek-odd-sizes", "H 36, 3 heads, latents of 22 and 13, head parts of 10, 6 and 7, I 11, 7 "
         "experts top-3, vocab 101, batch 3, large rms_norm_eps (which the latents' norms ignore)", 11,
         {"hidden_size": 36, "num_attention_heads": 3, "kv_lora_rank": 22, "q_lora_rank": 13,
          "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "moe_intermediate_size": 11,
          "n_routed_experts": 7, "num_experts_per_tok": 3, "vocab_size": 101, "rms_norm_eps": 0.02},
         batch=3, length=17),
    Spec("deepseek-minimal-config", "keys left to their defaults: num_key_value_heads, n_shared_experts "
         "2, first_k_dense_replace 0, routing greedy without scaling, rope_theta, rms_norm_eps, ...", 34,
         {"first_k_dense_replace": 0, "num_hidden_layers": 2},
         drop=("num_key_value_heads", "n_shared_experts", "first_k_dense_replace", "topk_method",
               "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "scoring_func",
               "moe_layer_freq", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act",
               "attention_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id", "ep_size",
               "aux_loss_alpha", "seq_aux", "pretraining_tp", "use_cache", "initializer_range",
               "attention_dropout")),
    Spec("deepseek-long", "150 positions: many KV blocks in prefill", 46,
         {"vocab_size": 96, "num_hidden_layers": 2}, batch=1, length=150),
    Spec("deepseek-norm-topk", "norm_topk_prob true with routed_scaling_factor 2.5: renormalised, then "
         "scaled (own definition)", 5,
         GROUPS | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_hidden_layers": 2}),
    Spec("deepseek-sigmoid", "scoring_func sigmoid under group_limited_greedy (own definition)", 34,
         GROUPS | {"scoring_func": "sigmoid", "routed_scaling_factor": 1.5, "num_hidden_layers": 2}),
    Spec("deepseek-layer-freq", "moe_layer_freq 2 after a dense layer: MoE in layers 2 and 4 of 5 (own "
         "definition)", 10, {"moe_layer_freq": 2, "num_hidden_layers": 5}),
    Spec("deepseek-text", "byte-level BPE tokenizer with special tokens and a chat template, and the "
         "text that greedy generation gives (text_case.json)", 40,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
    Spec("deepseek-f32-gate", "a gate in f32 in a checkpoint in bf16, and pairs of experts that only digits beyond bf16 "
         "tell apart", 56,
         {"num_hidden_layers": 2, "num_experts_per_tok": 3}, batch=1, length=16, generate=8, f32_gates=True),
]  # fmt: skip

# Sizes that groups of 32 and packed words divide.
QUANT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "q_lora_rank": 32,
}  # fmt: skip

DEEPSEEK_QUANT_SPECS = [
    Spec("deepseek-quant-gptq-int4", "GPTQ version 2, int4 group 32, zero points: latent attention with both "
         "down-projections, shared experts, a dense layer", 24, QUANT, quant="gptq-int4-asym-v2"),
    Spec("deepseek-quant-compressed-int8", "compressed-tensors pack-quantized, int8, one scale for each row", 12,
         QUANT, quant="compressed-int8-channel"),
    Spec("deepseek-quant-fp8-block", "FP8 in blocks of 16 x 32 with weight_scale_inv", 25, QUANT, quant="fp8-block"),
]  # fmt: skip
