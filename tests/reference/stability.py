"""Measures whether a reference decides clearly, so that its discrete choices can be compared.

Two correct implementations differ by rounding. Where the two best logits, or the last chosen and
the first rejected expert, are closer than that, they may choose differently and a comparison of
tokens or expert ids means nothing. The margins here are what seeds are chosen by.
"""

import torch

from make_reference import bf16_noise, family, gate, greedy, reset_rope, teacher_force


# Families in which a group of experts is as good as its two best.
TOP_TWO = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")


def kept_groups(logits, config):
    """The experts that group-limited routing may choose, as a boolean mask, and how clearly the groups of each row are
    separated from the next; all experts where there are no groups."""
    top_two = config.model_type in TOP_TWO and config.n_group > 1
    unlimited = torch.full_like(logits[:, 0], float("inf"))
    if not top_two and getattr(config, "topk_method", "greedy") != "group_limited_greedy":
        return torch.ones_like(logits, dtype=torch.bool), unlimited
    groups = logits.unflatten(-1, (config.n_group, -1))
    best = groups.topk(2).values.sum(-1) if top_two else groups.amax(-1)
    ordered = best.sort(-1, descending=True).values
    k = config.topk_group
    gaps = ordered[:, k - 1] - ordered[:, k] if k < config.n_group else unlimited
    groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(k).indices, True)
    return groups.repeat_interleave(logits.shape[-1] // config.n_group, -1), gaps


def choice_keys(model, layer, logits):
    """What the router of a layer chooses by: its logits, or scores of them plus the correction bias."""
    router, mlp = gate(model, layer), model.model.layers[layer].mlp
    statics = getattr(router, "moe_statics", None)
    if statics is not None:
        return logits.softmax(-1) + statics.e_score_correction_bias.float()
    holders = [part for part in (router, mlp) if hasattr(part, "e_score_correction_bias")]
    return logits.sigmoid() + holders[0].e_score_correction_bias.float() if holders else logits


def chosen_experts(logits, config):
    """The chosen experts of each row as a boolean mask, and the smallest gap that decides each row."""
    mask, gaps = kept_groups(logits, config)
    k, masked = config.num_experts_per_tok, logits.masked_fill(~mask, float("-inf"))
    if k < int(mask[0].sum()):
        ordered = masked.sort(-1, descending=True).values
        gaps = gaps.minimum(ordered[:, k - 1] - ordered[:, k])
    return torch.zeros_like(mask).scatter_(-1, masked.topk(k).indices, True), gaps


def topk_sets(logits, config):
    """The chosen experts of each row as a boolean mask, and the smallest gap that decides one."""
    chosen, gaps = chosen_experts(logits, config)
    return chosen, gaps.min().item()


def margins(f32, bf16, step_logits, model):
    """Smallest gaps of the f32 run, the experts that bf16 flips, and the bf16 error."""
    config = model.config
    best = step_logits.topk(2).values
    token_gap = ((best[..., 0] - best[..., 1]) / step_logits.std(-1)).min().item()
    router_gap, flips = float("inf"), 0
    for name, logits in f32.items():
        if not name.startswith("router_logits."):
            continue
        layer = int(name.rsplit(".", 1)[1])
        chosen, gap = topk_sets(choice_keys(model, layer, logits), config)
        router_gap = min(router_gap, gap)
        in_bf16 = topk_sets(choice_keys(model, layer, bf16[name]), config)[0]
        flips += int((chosen != in_bf16).any(-1).sum())
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
    as_f32(model)
    f32 = teacher_force(model, input_ids)
    steps = greedy(model, input_ids, generate)[1]
    cast(model)
    return margins(f32, teacher_force(model, input_ids), steps, model)


def as_f32(model):
    """Makes a model compute as the reference does."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.float()


def cast(model):
    """Casts a model to bf16 as `from_pretrained` does: what transformers keeps in f32 stays there."""
    strict = model._keep_in_fp32_modules_strict or ()
    tensors = lambda: (*model.named_parameters(), *model.named_buffers())
    kept = {name: tensor.data.float() for name, tensor in tensors() if any(part in name for part in strict)}
    model.bfloat16()
    for name, tensor in tensors():
        if name in kept:
            tensor.data = kept[name]
    reset_rope(model)


def gate_tokens(model, input_ids, generate):
    """Greedy tokens of a model in bf16, and of the same with its gates rounded to bf16."""
    kept = greedy(model, input_ids, generate)[0]
    for layer in family(model).moe_layers(model):
        weight = gate(model, layer).weight
        weight.data = weight.data.bfloat16().float()
    return kept, greedy(model, input_ids, generate)[0]
