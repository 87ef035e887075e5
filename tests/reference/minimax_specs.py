"""The parity fixtures of MiniMax-M2."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "minimax_m2",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

# Published configs say it as `rotary_dim`, which transformers 5.17 does not read.
HALF = {"rotary_dim": 8, "partial_rotary_factor": 0.5}

MINIMAX_SPECS = [
    Spec("minimax", "hub-style config and per-expert tensors w1, w3, w2 under block_sparse_moe, bf16: norms over all heads "
         "of q and k, half of each head rotated, sigmoid scores with a correction bias", 59, HALF),
    Spec("minimax-plain", "whole heads rotated, as many key heads as query heads, tied embeddings; weights stored in f32", 25,
         {"num_key_value_heads": 4, "tie_word_embeddings": True, "num_hidden_layers": 2}, dtype=torch.float32),
    Spec("minimax-odd-sizes", "H 36, 3 heads of 10 over 1 kv head, of which 6 dimensions are rotated, I 21, 7 experts top-3, "
         "vocab 151, batch 3, large rms_norm_eps", 7,
         {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 21,
          "num_local_experts": 7, "num_experts_per_tok": 3, "vocab_size": 151, "rms_norm_eps": 0.02,
          "partial_rotary_factor": 0.6, "num_hidden_layers": 2}, batch=3, length=17),
    Spec("minimax-packed", "packed 3-D experts under mlp, as transformers 5 writes them", 2, HALF | {"num_hidden_layers": 2},
         layout="saved-packed"),
    Spec("minimax-saved", "exactly what transformers 5 writes: partial_rotary_factor in rope_parameters, w1, w3, w2", 2,
         HALF | {"num_hidden_layers": 2}, layout="saved"),
    Spec("minimax-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 8,
         HALF | {"vocab_size": 300, "num_hidden_layers": 2, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
