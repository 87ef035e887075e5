"""Records what transformers' own sparse blocks compute, in tests/families/MODEL_TYPE.safetensors for each model type,
and in MODEL_TYPE-OPTION.safetensors with an option that no published model of the type has.

    pip install torch transformers==5.24.0 safetensors
    python crates/moe-layer/tests/make_families.py

Each file holds the tensors of one block under the names of published checkpoints. Experts are stored one by one,
except in Llama-4, Granite and gpt-oss, whose published experts are packed. A file also holds rows `input` [2, 3, H]
and the result of the module, `output` [2, 3, H], in f32, and the config in the metadata. Sizes are small and odd;
weights and correction biases are random.
"""

import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN = 20
WIDTH = 12
EXPERTS = 8
OUT = Path(__file__).parent / "families"

COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH}
SHARED = {"shared_expert_intermediate_size": 16, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}

# Model type: module of transformers, class of the block, settings.
CASES = {
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeSparseMoeBlock",
                  {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeSparseMoeBlock", SHARED),
    "qwen3_next": ("qwen3_next", "Qwen3NextSparseMoeBlock", SHARED),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", SHARED),
    "olmoe": ("olmoe", "OlmoeSparseMoeBlock", {"num_experts": EXPERTS, "intermediate_size": WIDTH}),
    "mixtral": ("mixtral", "MixtralSparseMoeBlock", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
    "minimax_m2": ("minimax_m2", "MiniMaxM2SparseMoeBlock",
                   {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Moe",
                    {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE", {**GROUPS, "n_shared_experts": 2}),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32MoE", GROUPS),
    "glm4_moe": ("glm4_moe", "Glm4MoeMoE", GROUPS),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteMoE", GROUPS),
    "dots1": ("dots1", "Dots1MoE", {**GROUPS, "n_shared_experts": 2, "norm_topk_prob": True}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock",
                     {"moe_num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "moe_k": 3}),
    "llama4_text": ("llama4", "Llama4TextMoe",
                    {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "num_experts_per_tok": 1}),
    "longcat_flash": ("longcat_flash", "LongcatFlashMoE",
                      {"n_routed_experts": EXPERTS, "zero_expert_num": 4, "expert_ffn_hidden_size": WIDTH,
                       "moe_topk": 3}),
    "flex_olmo": ("flex_olmo", "FlexOlmoSparseMoeBlock", {"num_experts": EXPERTS, "intermediate_size": WIDTH}),
    "minimax": ("minimax", "MiniMaxSparseMoeBlock", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "HunYuanMoEV1Moe",
                       {"num_experts": EXPERTS, "intermediate_size": WIDTH, "moe_topk": 3}),
    "granitemoe": ("granitemoe", "GraniteMoeMoE", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
    "glm4v_moe_text": ("glm4v_moe", "Glm4vMoeTextMoE", GROUPS),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaMoE", GROUPS),
    "solar_open": ("solar_open", "SolarOpenMoE", {**GROUPS, "n_shared_experts": 2}),
    "exaone_moe": ("exaone_moe", "ExaoneMoeSparseMoEBlock",
                   {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "n_group": 4, "topk_group": 2,
                    "num_shared_experts": 2}),
    "gpt_oss": ("gpt_oss", "GptOssMLP", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "swiglu_limit": 0.9}),
    # Layer 1 of two, neither of which routes by token ids.
    "deepseek_v4": ("deepseek_v4", "DeepseekV4SparseMoeBlock",
                    {"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH, "swiglu_limit": 0.9,
                     "num_hidden_layers": 2, "mlp_layer_types": ["moe", "moe"]}),
    "qwen3_moe-relu": ("qwen3_moe", "Qwen3MoeSparseMoeBlock",
                       {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "hidden_act": "relu"}),
}

# Model types whose published experts are packed.
PACKED = ("llama4_text", "gpt_oss")

# Names of published checkpoints that differ from transformers' own.
RENAMED = {
    ("ernie4_5_moe", "gate.moe_statics.e_score_correction_bias"): "moe_statics.e_score_correction_bias",
    ("exaone_moe", "gate.e_score_correction_bias"): "e_score_correction_bias",
    ("granitemoe", "router.weight"): "router.layer.weight",
    ("granitemoe", "experts.gate_up_proj"): "input_linear.weight",
    ("granitemoe", "experts.down_proj"): "output_linear.weight",
}
NUMBERED = {"gate": "w1", "up": "w3", "down": "w2"}
USUAL = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def config_of(model_type, settings):
    """The config, and as the JSON that transformers writes, with the sizes that published configs name."""
    settings = {**COMMON, **settings}
    if model_type in ("ernie4_5_moe", "longcat_flash", "hunyuan_v1_moe"):
        del settings["num_experts_per_tok"]
    config = CONFIG_MAPPING[model_type](num_attention_heads=4, **settings)
    config._experts_implementation = "eager"
    text = json.loads(config.to_json_string(use_diff=False))
    keep = {key: value for key, value in text.items() if key in settings or key in (
        "model_type", "hidden_act", "n_shared_experts", "moe_num_shared_experts", "norm_topk_prob",
        "routed_scaling_factor", "topk_method", "scoring_func", "num_shared_experts")}
    keep.update(settings, model_type=model_type)
    return config, keep


def published(model_type, state):
    """The tensors of a module under the names of published checkpoints."""
    names = NUMBERED if model_type in ("mixtral", "minimax", "minimax_m2") else USUAL
    out = {}
    for name, tensor in state.items():
        name = RENAMED.get((model_type, name), name)
        if model_type in PACKED or not name.startswith("experts."):
            out[name] = tensor
            continue
        for expert in range(EXPERTS):
            if name == "experts.gate_up_proj":
                gate, up = tensor[expert].chunk(2)
                out[f"experts.{expert}.{names['gate']}.weight"] = gate
                out[f"experts.{expert}.{names['up']}.weight"] = up
            else:
                assert name == "experts.down_proj", name
                out[f"experts.{expert}.{names['down']}.weight"] = tensor[expert]
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}


def main():
    OUT.mkdir(exist_ok=True)
    for seed, (case, (module, name, settings)) in enumerate(CASES.items()):
        model_type = case.partition("-")[0]
        torch.manual_seed(seed)
        config, text = config_of(model_type, settings)
        package = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        layer = (1,) if model_type == "deepseek_v4" else ()
        block = getattr(package, name)(config, *layer).float().eval()
        state = {}
        for key, tensor in block.state_dict().items():
            scale = 0.3 if "bias" in key else tensor.shape[-1] ** -0.5
            state[key] = torch.randn(tensor.shape) * scale
        block.load_state_dict(state)
        rows = torch.randn(2, 3, HIDDEN)
        with torch.no_grad():
            output = block(rows.clone())
        output = output[0] if isinstance(output, tuple) else output
        tensors = {**published(model_type, state), "input": rows, "output": output.reshape(rows.shape).contiguous()}
        save_file(tensors, OUT / f"{case}.safetensors", metadata={"config": json.dumps(text)})
        print(case, len(tensors), text)


if __name__ == "__main__":
    main()
