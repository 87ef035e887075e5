"""The parity fixtures of OLMoE."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "olmoe",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}

Spec = partial(AnySpec, BASE)

OLMOE_SPECS = [
    Spec("olmoe", "hub-style config and per-expert tensors, bf16: norms over all heads of q and of k, top-2 weights that "
         "are not renormalised", 20, {"num_hidden_layers": 3, "num_experts": 8}),
    Spec("olmoe-grouped", "two key-value heads for four query heads, norm_topk_prob true, weights stored in f32", 26,
         {"num_key_value_heads": 2, "norm_topk_prob": True}, dtype=torch.float32),
    Spec("olmoe-attention-bias", "attention_bias true: biases on q, k, v and o, before the norms", 1,
         {"attention_bias": True}),
    Spec("olmoe-saved", "exactly what transformers 5 writes: rope_parameters, dtype, per-expert tensors", 5,
         layout="saved"),
    Spec("olmoe-packed", "packed 3-D experts, as transformers 5 writes them; the model of `olmoe-saved`", 5,
         layout="saved-packed"),
    Spec("olmoe-minimal-config", "keys left to their defaults: num_key_value_heads = num_attention_heads, num_experts 64, "
         "num_experts_per_tok 8, norm_topk_prob false, rope_theta 10000, rms_norm_eps 1e-5, ...", 47,
         {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 4},
         drop=("num_key_value_heads", "num_experts", "num_experts_per_tok", "norm_topk_prob", "rope_theta",
               "rope_scaling", "rms_norm_eps", "hidden_act", "attention_bias", "clip_qkv", "tie_word_embeddings",
               "initializer_range", "attention_dropout", "use_cache", "output_router_logits",
               "router_aux_loss_coef", "pad_token_id", "eos_token_id")),
    Spec("olmoe-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 10,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
