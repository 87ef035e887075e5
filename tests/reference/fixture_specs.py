"""The list of parity fixtures: one tiny checkpoint per option of each architecture.

Qwen3-MoE is here, DeepSeek-V2 in `deepseek_specs.py`, Mixtral in `mixtral_specs.py`, OLMoE in `olmoe_specs.py`,
Qwen2-MoE in `qwen2_specs.py`, GLM-4.5 in `glm4_specs.py`, DeepSeek-V3 in `deepseek_v3_specs.py`, GLM-4.7-Flash in
`glm4_lite_specs.py`, MiniMax-M2 in `minimax_specs.py`, ERNIE 4.5 in `ernie_specs.py`, gpt-oss in
`gpt_oss_specs.py`, Qwen3-Next and Qwen3.5-MoE in `qwen3_next_specs.py`.

Sizes are odd on purpose (hidden size unequal to heads x head_dim, widths that are no multiple of 32), and small,
because the files are committed. Seeds were found by `search_seeds.py`. The seeds of the dynamic RoPE fixtures also make
`generated` depend on which frequencies cached keys carry.
"""

from functools import partial

import torch

from deepseek_specs import DEEPSEEK_QUANT_SPECS, DEEPSEEK_SPECS
from deepseek_v3_specs import DEEPSEEK_V3_QUANT_SPECS, DEEPSEEK_V3_SPECS
from ernie_specs import ERNIE_SPECS
from glm4_lite_specs import GLM4_LITE_SPECS
from glm4_specs import GLM4_QUANT_SPECS, GLM4_SPECS
from gpt_oss_specs import GPT_OSS_QUANT_SPECS, GPT_OSS_SPECS
from minimax_specs import MINIMAX_SPECS
from mixtral_specs import MIXTRAL_SPECS
from olmoe_specs import OLMOE_SPECS
from qwen2_specs import QWEN2_SPECS
from qwen3_next_specs import QWEN3_5_SPECS, QWEN3_NEXT_SPECS
from spec import Spec as AnySpec

BASE = {
    "vocab_size": 128,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

Spec = partial(AnySpec, BASE)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

QWEN_SPECS = [
    Spec("base", "hub-style config and per-expert tensors, bf16, renormalised top-2; the eos token "
         "of generation_config.json occurs in `generated` and must not stop it", 24,
         {"num_hidden_layers": 3, "num_experts": 8, "rope_theta": 1000000.0, "eos_token_id": 84}),
    Spec("f32", "weights stored in f32", 9, dtype=torch.float32),
    Spec("f16", "weights stored in f16; top-3 of 10 experts, MHA", 2,
         {"num_experts": 10, "num_experts_per_tok": 3, "num_key_value_heads": 4}, dtype=torch.float16),
    Spec("no-renorm", "norm_topk_prob false; a sliding_window that use_sliding_window switches off",
         16, {"norm_topk_prob": False, "sliding_window": 4, "num_experts_per_tok": 3}),
    Spec("tied", "tie_word_embeddings true, no lm_head.weight in the file", 30,
         {"tie_word_embeddings": True}),
    Spec("attention-bias", "attention_bias true: biases on q, k, v and o", 13,
         {"attention_bias": True, "moe_intermediate_size": 40}),
    Spec("sliding-window", "use_sliding_window true, window 8 < T on every layer: transformers 5 "
         "ignores max_window_layers for this model", 31,
         {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    Spec("rope-linear", "linear RoPE under the legacy key `type`", 36,
         {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    Spec("rope-dynamic", "dynamic RoPE, prompt already longer than max_position_embeddings", 34,
         {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    Spec("rope-dynamic-crossing", "dynamic RoPE, generation crosses max_position_embeddings, so "
         "cached keys keep older frequencies; transformers-5 config", 9,
         {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
         layout="saved", generate=20),
    Spec("rope-yarn", "YaRN with the default attention factor; transformers-5 rope_parameters", 30,
         {"max_position_embeddings": 256, "head_dim": 32, "rope_scaling": YARN}, layout="saved"),
    Spec("rope-yarn-explicit", "YaRN with explicit attention_factor, beta_fast and beta_slow, and "
         "original_max_position_embeddings left to max_position_embeddings; hub-style", 52,
         {"max_position_embeddings": 48, "head_dim": 32,
          "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.8,
                           "beta_fast": 2.0, "beta_slow": 0.25}}),
    Spec("rope-yarn-mscale", "YaRN with mscale, mscale_all_dim and truncate false; hub-style", 43,
         {"max_position_embeddings": 256, "head_dim": 32,
          "rope_scaling": YARN | {"mscale": 1.2, "mscale_all_dim": 0.6, "truncate": False,
                                  "beta_fast": 4.0}}),
    Spec("mlp-only-layers", "dense MLP in the layers that mlp_only_layers names", 40,
         {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    Spec("sparse-step", "decoder_sparse_step 2 (MoE in layers 1 and 3) less mlp_only_layers [3]; "
         "transformers-5 config", 36,
         {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
         layout="saved"),
    Spec("saved", "exactly what transformers 5 writes: num_local_experts, rope_parameters, dtype, "
         "per-expert tensors", 5, {"num_experts": 8}, layout="saved"),
    Spec("packed", "transformers-5 config with packed 3-D experts.gate_up_proj and down_proj; the "
         "model of `saved`", 5,
         {"num_experts": 8}, layout="saved-packed"),
    Spec("packed-hub", "packed 3-D experts under a hub-style config, three shards with an index, "
         "the model of `sharded`", 9, layout="hub-packed", shards=3),
    Spec("sharded", "per-expert tensors dealt over three shards with an index, so that one expert "
         "spans several files", 9, shards=3),
    Spec("minimal-config", "keys left to their defaults: head_dim (hidden / heads = 10), "
         "num_key_value_heads 4, rope_theta 10000, norm_topk_prob false, rms_norm_eps, ...", 40,
         {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 10,
          "norm_topk_prob": False},
         drop=("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "norm_topk_prob",
               "rms_norm_eps", "hidden_act", "attention_bias", "decoder_sparse_step",
               "mlp_only_layers", "tie_word_embeddings", "sliding_window", "use_sliding_window",
               "max_window_layers", "initializer_range", "attention_dropout", "use_cache",
               "output_router_logits", "router_aux_loss_coef", "bos_token_id", "eos_token_id")),
    Spec("odd-sizes", "H 36, 3 heads of 10 over 1 kv head, I 21, 7 experts top-3, vocab 151, "
         "batch 3, large rms_norm_eps", 6,
         {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10,
          "moe_intermediate_size": 21, "num_experts": 7, "num_experts_per_tok": 3,
          "vocab_size": 151, "rms_norm_eps": 0.02}, batch=3, length=17),
    Spec("narrow-experts", "moe_intermediate_size 12, 16 experts top-4", 20,
         {"moe_intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 4}),
    Spec("top-1", "one expert per token, renormalised to weight 1", 44,
         {"num_experts_per_tok": 1}),
    Spec("top-1-no-renorm", "one expert per token with its softmax probability as weight", 58,
         {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    Spec("all-experts", "every expert chosen for every token (k = E)", 15,
         {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": False}),
    Spec("gelu", "hidden_act gelu (erf form) in experts and dense layer", 38,
         {"hidden_act": "gelu", "mlp_only_layers": [1]}),
    Spec("long", "200 positions: many KV blocks in prefill", 11,
         {"vocab_size": 96}, batch=1, length=200),
    Spec("long-window", "200 positions with a window of 70, not a multiple of any block", 46,
         {"vocab_size": 96, "use_sliding_window": True, "sliding_window": 70},
         batch=1, length=200),
    Spec("text", "byte-level BPE tokenizer with special tokens and a chat template, and the text "
         "that greedy generation gives (text_case.json)", 9,
         {"vocab_size": 300, "eos_token_id": [299, 297], "bos_token_id": 297}, text=True),
]  # fmt: skip

# Sizes that groups of 32 and packed words divide.
QUANT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4}

QUANT_SPECS = [
    Spec("quant-gptq-int4-act-order", "GPTQ version 1, int4 group 32, desc_act; a dense layer", 16,
         QUANT | {"mlp_only_layers": [1]}, quant="gptq-int4-act-order"),
    Spec("quant-gptq-int8-channel", "GPTQ version 1, int8, one scale for each row", 16, QUANT,
         quant="gptq-int8-channel"),
    Spec("quant-awq", "AWQ, int4 group 32, zero points; biases on q, k, v and o", 9,
         QUANT | {"attention_bias": True}, quant="awq"),
    Spec("quant-auto-round", "AutoRound's export in GPTQ's packing, int4 group 32", 16, QUANT, quant="auto-round"),
    Spec("quant-compressed-int4-asym", "compressed-tensors pack-quantized, int4 group 32, zero points", 1, QUANT,
         quant="compressed-int4-asym"),
    Spec("quant-compressed-fp8", "compressed-tensors float-quantized, FP8 with one scale for each row", 24, QUANT,
         quant="compressed-fp8-channel"),
    Spec("quant-modelopt-nvfp4", "ModelOpt's NVFP4: weight_scale_2 multiplies; a dense layer", 21,
         QUANT | {"mlp_only_layers": [1]}, quant="modelopt-nvfp4"),
    Spec("quant-compressed-nvfp4", "compressed-tensors nvfp4-pack-quantized: weight_global_scale divides", 17, QUANT,
         quant="compressed-nvfp4"),
    Spec("quant-fp8-block", "FP8 in blocks of 16 x 32 with weight_scale_inv", 3, QUANT, quant="fp8-block"),
]  # fmt: skip

SPECS = [
    *QWEN_SPECS, *DEEPSEEK_SPECS, *MIXTRAL_SPECS, *OLMOE_SPECS, *QWEN2_SPECS, *GLM4_SPECS, *DEEPSEEK_V3_SPECS,
    *GLM4_LITE_SPECS, *MINIMAX_SPECS, *ERNIE_SPECS, *GPT_OSS_SPECS, *QWEN3_NEXT_SPECS, *QWEN3_5_SPECS, *QUANT_SPECS, *DEEPSEEK_QUANT_SPECS, *GLM4_QUANT_SPECS,
    *DEEPSEEK_V3_QUANT_SPECS, *GPT_OSS_QUANT_SPECS,
]  # fmt: skip


def by_name(names):
    """The specs named in a comma-separated list, or all of them."""
    if not names:
        return SPECS
    table = {spec.name: spec for spec in SPECS}
    return [table[name] for name in names.split(",")]
