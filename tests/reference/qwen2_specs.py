"""The parity fixtures of Qwen2-MoE."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "qwen2_moe",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

QWEN2_SPECS = [
    Spec("qwen2", "hub-style config and per-expert tensors, bf16: biases of q, k and v alone, a shared expert whose output "
         "a sigmoid scales, top-2 weights that are not renormalised", 37, {"num_experts": 8, "num_hidden_layers": 3}),
    Spec("qwen2-windows", "use_sliding_window: window 8 < T in every other layer below max_window_layers, full attention in "
         "the rest; weights stored in f32", 28,
         {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
         dtype=torch.float32),
    Spec("qwen2-layer-types", "transformers-5 config with layer_types that say which layers have the window, dense layers",
         39, {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [2],
             "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
         layout="saved"),
    Spec("qwen2-packed", "packed 3-D experts, as transformers 5 writes them; norm_topk_prob true, no bias", 17,
         {"norm_topk_prob": True, "qkv_bias": False}, layout="saved-packed"),
    Spec("qwen2-minimal-config", "keys left to their defaults: num_key_value_heads 16, num_experts 60, num_experts_per_tok "
         "4, norm_topk_prob false, rope_theta 10000, qkv_bias true, ...", 2,
         {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 64, "num_experts": 60,
          "num_experts_per_tok": 4, "moe_intermediate_size": 4},
         drop=("num_key_value_heads", "num_experts", "num_experts_per_tok", "norm_topk_prob", "rope_theta", "rms_norm_eps",
               "hidden_act", "tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
               "initializer_range", "attention_dropout", "use_cache", "output_router_logits", "router_aux_loss_coef",
               "decoder_sparse_step", "bos_token_id", "eos_token_id")),
    Spec("qwen2-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 19,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
