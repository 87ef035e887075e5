"""Writes transformers.json: what the routers of transformers compute, for the tests of from_hf.

    python make_transformers.py > transformers.json        (transformers 5.17, torch)

Each router gets the identity as gate weight, so that hidden states are its logits. Ids and weights
are in the router's order, which is unspecified where it does not sort. `defaults` is the
configuration of a model type that is given no keys at all.
"""

import importlib
import json

import torch

EXPERTS, TOP_K, ROWS = 16, 4, 5
KEYS = (
    "model_type num_experts num_local_experts n_routed_experts num_experts_per_tok moe_topk norm_topk_prob "
    "routed_scaling_factor n_group topk_group topk_method scoring_func zero_expert_num zero_expert_type "
    "mlp_layer_types vocab_size moe_num_experts moe_k"
).split()
SIZES = {"num_experts_per_tok": TOP_K}

# name: (module, config class, router class, config overrides)
CASES = {
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeTopKRouter", {"num_experts": EXPERTS}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter",
                  {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_plain": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"num_experts": EXPERTS}),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextTopKRouter", {"num_experts": EXPERTS}),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTopKRouter", {"num_experts": EXPERTS}),
    "olmoe": ("olmoe", "OlmoeConfig", "OlmoeTopKRouter", {"num_experts": EXPERTS}),
    "mixtral": ("mixtral", "MixtralConfig", "MixtralTopKRouter", {"num_local_experts": EXPERTS}),
    "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssTopKRouter", {"num_local_experts": EXPERTS}),
    "llama4": ("llama4", "Llama4TextConfig", "Llama4Router",
               {"num_local_experts": EXPERTS, "num_experts_per_tok": 1}),
    "deepseek_v2_greedy": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter",
                           {"n_routed_experts": EXPERTS, "routed_scaling_factor": 1.5}),
    "deepseek_v2_groups": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter",
                           {"n_routed_experts": EXPERTS, "routed_scaling_factor": 16.0, "n_group": 4,
                            "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter",
                    {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}),
    "deepseek_v3_plain": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter",
                          {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
                           "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter", {"n_routed_experts": EXPERTS}),
    "dots1": ("dots1", "Dots1Config", "Dots1TopkRouter", {"n_routed_experts": EXPERTS}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2TopKRouter", {"num_local_experts": EXPERTS}),
    "longcat_flash": ("longcat_flash", "LongcatFlashConfig", "LongcatFlashTopkRouter",
                      {"n_routed_experts": EXPERTS - 6, "zero_expert_num": 6, "moe_topk": TOP_K}),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter",
                    {"n_routed_experts": EXPERTS, "num_hidden_layers": 2, "vocab_size": 7,
                     "mlp_layer_types": ["hash_moe", "moe"]}),
    "deepseek_v4_hash": ("deepseek_v4", "DeepseekV4Config", "DeepseekV4HashRouter",
                         {"n_routed_experts": EXPERTS, "num_hidden_layers": 2, "vocab_size": 7,
                          "mlp_layer_types": ["hash_moe", "moe"]}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteTopkRouter",
                      {"n_routed_experts": EXPERTS, "num_hidden_layers": 2}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeTopKRouter",
                     {"moe_num_experts": EXPERTS, "moe_k": TOP_K}),
}  # fmt: skip


def load(module, kind, name):
    """A class of one transformers model."""
    return getattr(importlib.import_module(f"transformers.models.{module}.{kind}_{module}"), name)


def routing_keys(config):
    """The part of config.json that routing depends on."""
    values = config.to_dict()
    return {key: values[key] for key in KEYS if key in values}


def run(router, logits, bias, token_ids):
    """(ids, weights) of one router on logits [T, E]."""
    name = type(router).__name__
    with torch.no_grad():
        gate = router.classifier.weight if hasattr(router, "classifier") else router.weight
        gate.copy_(torch.eye(EXPERTS))
        for key in ("e_score_correction_bias", "bias"):
            if isinstance(getattr(router, key, None), torch.Tensor):
                getattr(router, key).copy_(bias if key != "bias" else torch.zeros_like(bias))
        if hasattr(router, "moe_statics"):
            router.moe_statics.e_score_correction_bias.copy_(bias[None])
        if name.startswith("Llama4"):
            scores, _ = router(logits)
            weights, ids = scores.topk(router.top_k, dim=-1)
        elif name.startswith("MiniMaxM2"):
            _, weights, ids = router(logits, bias)
        elif name == "DeepseekV4HashRouter":
            _, weights, ids = router(logits, token_ids)
        else:
            *_, weights, ids = router(logits)
    return ids, weights


def main():
    """Prints the reference as JSON, one case per line."""
    torch.manual_seed(20)
    lines = []
    for name, (module, config_class, router_class, overrides) in CASES.items():
        make = load(module, "configuration", config_class)
        config = make(**(SIZES | overrides))
        config.hidden_size = EXPERTS  # afterwards: the constructor wants it to fit the heads
        router = load(module, "modeling", router_class)(config)
        # Multiples of 1/1024 keep the file short and exact.
        logits = (torch.randn(ROWS, EXPERTS) * 2048).round() / 1024
        bias = (torch.randn(EXPERTS) * 200).round() / 1024
        tokens = torch.randint(0, 7, (ROWS,))
        case = {"name": name, "config": routing_keys(config), "defaults": routing_keys(make())}
        if hasattr(router, "tid2eid"):
            table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(7)])
            router.tid2eid.copy_(table)
            case |= {"table": table.tolist(), "tokens": tokens.tolist()}
        ids, weights = run(router, logits, bias, tokens)
        case |= {"logits": logits.tolist(), "bias": bias.tolist(), "ids": ids.tolist()}
        case |= {"weights": [[float(f"{w:.9g}") for w in row] for row in weights.tolist()]}
        lines.append(json.dumps(case))
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
