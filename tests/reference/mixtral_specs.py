"""The parity fixtures of Mixtral."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "mixtral",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}

Spec = partial(AnySpec, BASE)

MIXTRAL_SPECS = [
    Spec("mixtral", "hub-style config and w1, w3, w2 of each expert under block_sparse_moe, bf16; head_dim = hidden / heads",
         37, {"num_local_experts": 8, "num_hidden_layers": 3}),
    Spec("mixtral-window", "sliding_window 8 < T on every layer, head_dim of its own, weights stored in f32", 8,
         {"sliding_window": 8, "head_dim": 16}, dtype=torch.float32),
    Spec("mixtral-saved", "exactly what transformers 5 writes: rope_parameters, dtype, per-expert tensors", 11,
         {"num_local_experts": 8}, layout="saved"),
    Spec("mixtral-packed", "packed 3-D experts under mlp, as transformers 5 writes them; the model of `mixtral-saved`", 11,
         {"num_local_experts": 8}, layout="saved-packed"),
    Spec("mixtral-minimal-config", "keys left to their defaults: num_key_value_heads 8, num_local_experts 8, "
         "num_experts_per_tok 2, rope_theta 1000000, rms_norm_eps 1e-5, ...", 38,
         {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 6, "num_local_experts": 8, "hidden_size": 48},
         drop=("head_dim", "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "rope_theta",
               "rms_norm_eps", "hidden_act", "sliding_window", "tie_word_embeddings", "initializer_range",
               "attention_dropout", "use_cache", "output_router_logits", "router_aux_loss_coef", "bos_token_id",
               "eos_token_id")),
    Spec("mixtral-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 24,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
