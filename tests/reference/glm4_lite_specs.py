"""The parity fixtures of GLM-4.7-Flash."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.8,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

GLM4_LITE_SPECS = [
    Spec("glm4-lite", "hub-style config and per-expert tensors, bf16: query down-projection, values wider than the parts "
         "of keys, sigmoid scores with a correction bias, a shared expert, a dense first layer", 89),
    Spec("glm4-lite-groups", "mlp_layer_types with a sparse first layer, groups of experts, norm_topk_prob false, queries "
         "without a down-projection, attention_bias true; bf16", 3,
         {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
          "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2}),
    Spec("glm4-lite-odd-sizes", "H 36, 3 heads, latents of 22 and 13, head parts of 10, 6 and 7, I 11, 7 experts top-3, "
         "vocab 101, batch 3, large rms_norm_eps (which the latents' norms ignore), YaRN with mscale_all_dim; stored in f32", 6,
         {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 22, "q_lora_rank": 13,
          "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "moe_intermediate_size": 11,
          "n_routed_experts": 7, "num_experts_per_tok": 3, "vocab_size": 101, "rms_norm_eps": 0.02,
          "num_hidden_layers": 2,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.6,
                           "original_max_position_embeddings": 64}},
         dtype=torch.float32, batch=3, length=17),
    Spec("glm4-lite-packed", "transformers-5 config with packed 3-D experts", 4, {"num_hidden_layers": 2},
         layout="saved-packed"),
    Spec("glm4-lite-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 4,
         {"vocab_size": 300, "num_hidden_layers": 2, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
