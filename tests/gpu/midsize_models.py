"""The models of midsize.py: published shapes with few layers, and their random checkpoints.

Widths of attention, numbers of heads and of experts, groups and routing rules are the published ones unless a comment
says what is cut; every vocabulary is cut.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from families import FAMILIES  # noqa: E402
from tiny_checkpoints import weight_scale  # noqa: E402

QWEN3 = dict(
    vocab_size=32768, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=14,
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=32768, rope_theta=1000000.0, tie_word_embeddings=False,
)
# The latent rows have the sizes of DeepSeek's models, so that the fast kernels run.
V2_LITE = dict(
    vocab_size=32768, hidden_size=1024, intermediate_size=2816, moe_intermediate_size=704, num_hidden_layers=7,
    num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
    first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
    max_position_embeddings=32768, rope_theta=10000.0, tie_word_embeddings=False,
)
V2 = V2_LITE | dict(
    num_attention_heads=32, num_key_value_heads=32, q_lora_rank=768, n_routed_experts=80, topk_method="group_limited_greedy",
    n_group=8, topk_group=3, routed_scaling_factor=4.0,
)
# Experts have 128 columns instead of 2,048, the dense layer 4,608 instead of 18,432.
V3 = dict(
    vocab_size=16384, hidden_size=7168, intermediate_size=4608, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    first_k_dense_replace=1, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5, rms_norm_eps=1e-6,
    max_position_embeddings=163840, rope_theta=10000.0, tie_word_embeddings=False,
    rope_scaling=dict(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0,
    ),
)  # fmt: skip
# Experts have 384 columns instead of 1,408.
GLM_AIR = dict(
    vocab_size=16384, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=384, num_hidden_layers=3,
    num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True, use_qk_norm=False,
    partial_rotary_factor=0.5, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, rms_norm_eps=1e-5,
    max_position_embeddings=131072, rope_theta=1000000.0, tie_word_embeddings=False,
)
# One layer with a window and one without; the experts are whole.
GPT_OSS = dict(
    vocab_size=16384, hidden_size=2880, intermediate_size=2880, num_hidden_layers=2, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"], attention_bias=True, rms_norm_eps=1e-5,
    max_position_embeddings=131072, rope_theta=150000.0, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None,
    rope_scaling=dict(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A row of the table."""

    model_type: str
    options: dict
    # Flags of the runs: one run for each.
    variants: tuple = ((),)
    # Weights of other sizes than transformers starts a training with: biases, norms, sinks and correction biases that
    # are not 0 or 1, and routers that tell their experts apart.
    spread: bool = False


LATENT = (("--moe-path", "fused"), ("--moe-path", "legacy"), ("--mla", "naive"))
MODELS = {
    "qwen3": Model("qwen3_moe", QWEN3),
    "deepseek-v2-lite": Model("deepseek_v2", V2_LITE, LATENT),
    "deepseek-v2": Model("deepseek_v2", V2, LATENT),
    "deepseek-v3": Model("deepseek_v3", V3, ((), ("--mla", "naive")), spread=True),
    "glm-4.5-air": Model("glm4_moe", GLM_AIR, spread=True),
    "gpt-oss": Model("gpt_oss", GPT_OSS, spread=True),
}


@torch.no_grad()
def make_checkpoint(folder, row, device):
    """Writes a checkpoint in bf16, a function of the row and the kind of device."""
    family = FAMILIES[row.model_type]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = family.model(family.config(**row.options))
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16)
    if row.spread:
        for name, parameter in model.named_parameters():
            mean, deviation = weight_scale(name, parameter, model.config)
            parameter.normal_(mean, deviation)
        # Published checkpoints store these in f32. They move some choices, and leave the others to the tokens.
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.randn(buffer.shape, device=device) * 0.05
    model.save_pretrained(folder, max_shard_size="1GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
