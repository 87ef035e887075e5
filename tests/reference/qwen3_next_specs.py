"""The parity fixtures of Qwen3-Next and of Qwen3.5-MoE."""

from functools import partial

import torch

from spec import Spec as AnySpec

BASE = {
    "model_type": "qwen3_next",
    "vocab_size": 112,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
ROPE = {
    "rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [1, 1, 1],
}  # fmt: skip
QWEN3_5 = {key: value for key, value in BASE.items() if key != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text", "rope_parameters": ROPE,
}  # fmt: skip

Spec = partial(AnySpec, BASE)
Spec35 = partial(AnySpec, QWEN3_5)

QWEN3_NEXT_SPECS = [
    Spec("qwen3-next", "hub-style config and per-expert tensors, bf16: three layers of linear attention, whose input products are "
         "grouped by key heads, then one of full attention with an output gate", 146),
    Spec("qwen3-next-long", "one sequence of 500 positions and 12 more, f32; full attention in the middle as layer_types says, a "
         "dense layer, both experts of the others for every token, with weights that are not renormalised, convolution over two rows; "
         "transformers-5 config", 1,
         {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
          "mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 2, "num_experts": 2},
         dtype=torch.float32, layout="saved", batch=1, length=500, generate=12),
    Spec("qwen3-next-text", "byte-level BPE tokenizer with special tokens and a chat template, and the text that greedy "
         "generation gives (text_case.json); biases of attention", 8,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297, "attention_bias": True}, text=True),
    Spec("qwen3-next-tied", "tied embeddings; 63 positions, one fewer than transformers' chunks of a prompt", 27,
         {"tie_word_embeddings": True}, batch=1, length=63),
    Spec("qwen3-next-mtp", "the model of `qwen3-next` with the head mtp.* for the token after the next one, whose logits "
         "mtp_definition.py gives; per-expert tensors", 146, mtp=True),
]  # fmt: skip

QWEN3_5_SPECS = [
    Spec35("qwen3_5", "Qwen3.5's text model: four input products of linear attention, packed experts, sections of rotated pairs; "
           "65 positions", 6, layout="hub-packed", batch=1, length=65),
    Spec35("qwen3_5-text", "the text model with a tokenizer and text (text_case.json); per-expert tensors", 21,
           {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297, "num_experts": 4}, text=True),
    Spec35("qwen3_5-part", "the text part of a model that also sees pictures: keys under text_config, tensors under "
           "model.language_model, the head mtp.* and a tensor of model.visual, with a tokenizer and text (text_case.json)", 7,
           {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297},
           layout="hub-packed", text=True, composite=True, mtp=True),
]  # fmt: skip
