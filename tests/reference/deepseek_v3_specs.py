"""The parity fixtures of DeepSeek-V3 and of Kimi K2, which is the same network under another `model_type`."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "deepseek_v3",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 18,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

# As published, but for a context of 64 and rotated dimensions that its frequencies can tell apart.
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

NO_GROUPS = {"n_group": 1, "topk_group": 1}

DEEPSEEK_V3_SPECS = [
    Spec("deepseek3", "V3: query down-projection, sigmoid scores with a correction bias, top-3 of 12 experts in 2 of 4 "
         "groups, a shared expert, a dense first layer, YaRN; hub-style, bf16", 37,
         {"max_position_embeddings": 2560, "qk_rope_head_dim": 16, "rope_scaling": YARN, "num_hidden_layers": 2}),
    Spec("deepseek3-moonlight", "Moonlight: queries without a down-projection, no groups, two shared experts, "
         "routed_scaling_factor 2.446, rms_norm_eps 1e-5 (which the latents' norms ignore); hub-style, bf16", 18,
         NO_GROUPS | {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446,
                      "rope_theta": 50000.0, "rms_norm_eps": 1e-5}),
    Spec("deepseek3-plain", "options off: norm_topk_prob false, routed_scaling_factor 1, no dense layer, no shared "
         "experts; attention_bias true; weights stored in f32", 18,
         {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "n_shared_experts": 0,
          "attention_bias": True, "num_hidden_layers": 2}, dtype=torch.float32),
    Spec("deepseek3-odd-sizes", "H 36, 3 heads, latents of 22 and 13, head parts of 10, 6 and 7, I 11, 9 experts top-3 in "
         "3 groups, vocab 101, batch 3, large rms_norm_eps, tied embeddings", 4,
         {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 22, "q_lora_rank": 13,
          "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "moe_intermediate_size": 11,
          "n_routed_experts": 9, "n_group": 3, "vocab_size": 101, "rms_norm_eps": 0.02,
          "tie_word_embeddings": True, "num_hidden_layers": 2}, batch=3, length=17),
    Spec("deepseek3-packed", "transformers-5 config with packed 3-D experts", 29, {"num_hidden_layers": 2},
         layout="saved-packed"),
    Spec("deepseek3-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 23,
         {"vocab_size": 300, "num_hidden_layers": 2, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
    Spec("deepseek3-f32-gate", "a gate in f32 in a checkpoint in bf16, and pairs of experts that only digits beyond bf16 "
         "tell apart", 27,
         {"num_hidden_layers": 2}, batch=1, length=16, generate=8, f32_gates=True),
    Spec("kimi", "Kimi K2: model_type kimi_k2, no groups, 12 experts top-3, routed_scaling_factor 2.827; with text", 30,
         NO_GROUPS | {"vocab_size": 300, "num_hidden_layers": 2, "routed_scaling_factor": 2.827,
                      "rope_theta": 50000.0, "eos_token_id": [299, 297], "bos_token_id": 297},
         text=True, published_type="kimi_k2"),
]  # fmt: skip

# Sizes that groups of 32 and packed words divide.
QUANT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "q_lora_rank": 32,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip

DEEPSEEK_V3_QUANT_SPECS = [
    Spec("deepseek3-quant-fp8-block", "FP8 in blocks of 16 x 32 with weight_scale_inv, as the originals are published", 27,
         QUANT, quant="fp8-block"),
]  # fmt: skip
