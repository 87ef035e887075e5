"""Measures whether a reference decides clearly, so that its discrete choices can be compared.

Two correct implementations differ by rounding. Where the two best logits, or the last chosen and
the first rejected expert, are closer than that, they may choose differently and a comparison of
tokens or expert ids means nothing. The margins here are what seeds are chosen by.
"""

import torch

from make_reference import bf16_noise, greedy, reset_rope, teacher_force


def topk_sets(logits, k):
    """The chosen experts of each row as a boolean mask."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(k).indices, True)


def margins(f32, bf16, step_logits, k):
    """Smallest gaps of the f32 run, the experts that bf16 flips, and the bf16 error."""
    best = step_logits.topk(2).values
    token_gap = ((best[..., 0] - best[..., 1]) / step_logits.std(-1)).min().item()
    router_gap, flips = float("inf"), 0
    for name, logits in f32.items():
        if not name.startswith("router_logits."):
            continue
        ordered = logits.sort(-1, descending=True).values
        if k < logits.shape[-1]:
            router_gap = min(router_gap, (ordered[:, k - 1] - ordered[:, k]).min().item())
            changed = topk_sets(logits, k) != topk_sets(bf16[name], k)
            flips += int(changed.any(-1).sum())
    return {
        "token_gap": token_gap,
        "router_gap": router_gap,
        "bf16_flips": flips,
        "bf16_noise": bf16_noise(bf16, f32),
        "logit_std": f32["logits"].std().item(),
        "hidden_rms": max(
            t.square().mean().sqrt().item() for n, t in f32.items() if n.startswith("hidden")
        ),
        "distinct_tokens": len(step_logits.argmax(-1).unique()),
    }


def measure(model, input_ids, generate):
    """Margins of an in-memory model, which is left in bf16."""
    k = model.config.num_experts_per_tok
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    model.float()
    f32 = teacher_force(model, input_ids)
    steps = greedy(model, input_ids, generate)[1]
    model.bfloat16()
    reset_rope(model)
    return margins(f32, teacher_force(model, input_ids), steps, k)
