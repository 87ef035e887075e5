"""The parity fixtures of ERNIE 4.5."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 20,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

ERNIE_SPECS = [
    Spec("ernie", "hub-style config and per-expert tensors, bf16: neighbouring dimensions rotated together, softmax scores "
         "with a correction bias [1, E] under moe_statics, two shared experts, a dense first layer, tied embeddings", 72),
    Spec("ernie-interval", "moe_layer_interval 2 from layer 1 to layer 3 of 5, no shared experts, head_dim of its own, "
         "untied; bf16", 16,
         {"moe_layer_interval": 2, "moe_layer_end_index": 3, "moe_num_shared_experts": 0, "num_hidden_layers": 5,
          "head_dim": 16, "tie_word_embeddings": False, "moe_num_experts": 6}),
    Spec("ernie-odd-sizes", "H 36, 3 heads of 12 over 1 kv head, I 21, 7 experts top-2, no dense layer, vocab 151, batch 3, "
         "large rms_norm_eps, linear RoPE; weights stored in f32", 22,
         {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "moe_intermediate_size": 21,
          "moe_num_experts": 7, "moe_k": 2, "vocab_size": 151, "rms_norm_eps": 0.02, "moe_layer_start_index": 0,
          "num_hidden_layers": 2, "rope_scaling": {"type": "linear", "factor": 2.0}},
         dtype=torch.float32, batch=3, length=17),
    Spec("ernie-packed", "packed 3-D experts, and the correction bias where transformers 5 keeps it", 15,
         {"num_hidden_layers": 2}, layout="saved-packed"),
    Spec("ernie-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 9,
         {"vocab_size": 300, "num_hidden_layers": 2, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
    Spec("ernie-f32-gate", "a gate in f32 in a checkpoint in bf16, and pairs of experts that only digits beyond bf16 "
         "tell apart; one expert for each token", 128, {"num_hidden_layers": 2, "moe_k": 1},
         batch=1, length=16, generate=8, f32_gates=True),
]  # fmt: skip
