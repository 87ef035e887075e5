"""The parity fixtures of gpt-oss."""

from functools import partial

import torch

from spec import Spec as AnySpec

# Experts are packed by columns in every checkpoint of this family, published ones too.
BASE = {
    "model_type": "gpt_oss",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

Spec = partial(AnySpec, BASE, layout="hub-packed")

YARN = {
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16, "truncate": False,
    }
}  # fmt: skip

IN_TURNS = ["sliding_attention", "full_attention"]

# Sizes that blocks of 32 columns divide.
GPT_OSS_QUANT_SPECS = [
    Spec("gpt-oss-quant-mxfp4", "the container of the published checkpoints: experts in MXFP4, blocks and scales in packs, their "
         "biases and everything else in bf16", 40,
         YARN | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}, quant="mxfp4"),
]  # fmt: skip

GPT_OSS_SPECS = [
    Spec("gpt-oss", "hub-style config, bf16: sinks, a window of 8 in every other layer, YaRN with truncate false, biases of "
         "attention, router and experts, packs by columns", 1,
         YARN | {"num_hidden_layers": 3, "layer_types": [*IN_TURNS, "sliding_attention"]}),
    Spec("gpt-oss-plain", "no biases of attention, no window, no scaled rotation, as many key heads as query heads, tied "
         "embeddings; weights stored in f32", 72,
         {"attention_bias": False, "layer_types": 2 * ["full_attention"], "num_key_value_heads": 8, "tie_word_embeddings": True,
          "rope_scaling": {"rope_type": "default"}}, dtype=torch.float32),
    Spec("gpt-oss-odd-sizes", "H 36, 3 heads of 10 over 1 kv head, I 21, 7 experts top-3, vocab 151, batch 3, large "
         "rms_norm_eps, the full layer first", 29,
         YARN | {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 21,
                 "num_local_experts": 7, "num_experts_per_tok": 3, "vocab_size": 151, "rms_norm_eps": 0.02,
                 "layer_types": IN_TURNS[::-1]}, batch=3, length=17),
    Spec("gpt-oss-minimal-config", "keys left to their defaults: head_dim 64, a window of 128 in the first layer of two, YaRN, "
         "rope_theta 150000, attention_bias, ...; longer than the window", 66,
         {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128, "vocab_size": 96,
          "max_position_embeddings": 131072},
         drop=("head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_theta", "rms_norm_eps", "attention_bias",
               "num_experts_per_tok", "max_position_embeddings", "hidden_act", "swiglu_limit",
               "tie_word_embeddings", "initializer_range", "attention_dropout", "use_cache", "output_router_logits",
               "router_aux_loss_coef", "bos_token_id", "eos_token_id", "pad_token_id"), batch=1, length=150),
    Spec("gpt-oss-saved", "exactly what transformers 5 writes: rope_parameters, layer_types", 38, YARN, layout="saved"),
    Spec("gpt-oss-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json)", 57,
         YARN | {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip
