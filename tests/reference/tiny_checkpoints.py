"""Builds tiny random models and writes them in each checkpoint layout that loaders meet.

Weights are scaled so that a comparison means something: every sublayer moves the residual stream
by a similar amount, attention and routing are far from uniform, norms are not all ones and biases
not zero, so that no tensor can be dropped, transposed or misplaced without a visible difference.
"""

import json

import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES


def build(config_values, dtype, seed, f32_gates=False):
    """A model with random weights of storage type `dtype`, a function of config and seed alone. With `f32_gates` its
    gates are in f32, and experts come in pairs."""
    family = FAMILIES[config_values.get("model_type", "qwen3_moe")]
    config = family.config(**config_values)
    model = family.model(config)
    generator = torch.Generator().manual_seed(seed)
    # Sorted names: the draw order must not depend on the order in which modules register.
    for name, parameter in sorted(model.named_parameters()):
        mean, std = weight_scale(name, parameter, config)
        values = torch.randn(parameter.shape, generator=generator) * std + mean
        parameter.data.copy_(values)
    model = model.to(dtype).eval()
    # Published checkpoints store these in f32. They come last, so that they change no other family's weights.
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape, generator=generator) * 0.2
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data = parameter.data.float()
    if f32_gates:
        pair_experts(model, generator)
    return model


def pair_experts(model, generator):
    """Gives the experts 2i and 2i + 1 one row of the gate, but for digits that bf16 does not hold, and one bias. Where
    such a pair is at the end of the chosen experts, these digits decide."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            continue
        experts = tensor.shape[-1] if name.endswith("bias") else len(tensor)
        first = torch.arange(experts) // 2 * 2
        if name.endswith("bias"):
            tensor.data = tensor.data[..., first]
            continue
        # Less than half of the distance between two values of bf16.
        digits = (torch.rand(tensor.shape, generator=generator) * 2 - 1) * 0.9 * 2**-9
        tensor.data = tensor.data[first].bfloat16().float() * (1 + digits)


def weight_scale(name, parameter, config):
    """(mean, standard deviation) of one tensor; matrices are scaled by their fan-in."""
    by_columns = config.model_type == "gpt_oss" and parameter.dim() == 3
    fan_in = max(parameter.shape[-2 if by_columns else -1], 1)
    if name.endswith(".A_log"):
        # A state that lasts for some tokens in one head and for dozens in another.
        return -2.5, 1.0
    if name.endswith(".dt_bias"):
        return 1.0, 0.5
    zero_centred = config.model_type in ("qwen3_next", "qwen3_5_moe_text")
    if name.endswith("norm.weight") and zero_centred and "linear_attn" not in name:
        return (0.4, 0.3) if "q_norm" in name or "k_norm" in name else (0.0, 0.25)
    if name.endswith("norm.weight"):
        # Sharper queries and keys, so that attention depends on position and not on the mean.
        return (1.4, 0.3) if "q_norm" in name or "k_norm" in name else (1.0, 0.25)
    if name.endswith((".bias", "_proj_bias")):
        return 0.0, 0.3
    if name.endswith(".sinks"):
        # From negligible to as much as all positions together.
        return 1.0, 1.5
    if by_columns and name.endswith("gate_up_proj"):
        # Wide enough that the clamps of gate and of up matter.
        return 0.0, 4.0 * fan_in**-0.5
    if name.endswith("e_score_correction_bias"):
        # Added to a softmax, whose scores are small.
        return 0.0, 0.05
    if name.endswith("embed_tokens.weight"):
        # A tied embedding is also the output head, whose logits grow with sqrt(hidden).
        return 0.0, 0.3 if config.tie_word_embeddings else 1.0
    gain = 1.0
    if name.endswith(("mlp.gate.weight", "mlp.router.weight", "lm_head.weight")):
        gain = 2.0
    elif "down_proj" in name:
        gain = 0.3 if by_columns else 1.5
    elif name.endswith(("q_a_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
        # Latent attention has no norm on its queries and keys to sharpen them by.
        gain = 1.5
    return 0.0, gain * fan_in**-0.5


def hub_state(packed, tied):
    """One tensor per expert and projection, as published checkpoints have it, from packed ones."""
    state = {}
    for name, tensor in packed.items():
        if tensor.numel() == 0:
            continue  # no shared experts: transformers holds them with a width of 0
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            split = {"gate_proj": gate, "up_proj": up}
        elif name.endswith("experts.down_proj"):
            split = {"down_proj": tensor}
        else:
            state[name] = tensor.contiguous().clone()
            continue
        prefix = name.rsplit(".", 1)[0]
        for projection, experts in split.items():
            for e, expert in enumerate(experts):
                state[f"{prefix}.{e}.{projection}.weight"] = expert.contiguous().clone()
    if tied:
        state.pop("lm_head.weight", None)
    return state


def hub_config(config_values, dtype, drop):
    """config.json in the style of published checkpoints, in their key order, less `drop`."""
    family = FAMILIES[config_values.get("model_type", "qwen3_moe")]
    values = family.hub_defaults | {
        "max_window_layers": config_values["num_hidden_layers"],
        "num_key_value_heads": config_values["num_attention_heads"],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    values = {key: value for key, value in values.items() if key in family.hub_keys} | config_values
    unknown = set(values) - set(family.hub_keys)
    if unknown:
        raise ValueError(f"keys without a place in a hub-style config: {sorted(unknown)}")
    return {key: values[key] for key in family.hub_keys if key in values and key not in drop}


def write_json(path, value):
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_hub(model, directory, config_values, dtype, shards, drop, packed=False):
    """Hub-style config and tensors, in one file or in `shards` files with an index."""
    write_json(directory / "config.json", hub_config(config_values, dtype, drop))
    if packed:
        state = {name: t.contiguous().clone() for name, t in model.state_dict().items()}
    else:
        state = hub_state(model.state_dict(), model.config.tie_word_embeddings)
        family = FAMILIES[model.config.model_type]
        state = {family.hub_name(name): tensor for name, tensor in state.items()}
    if shards == 1:
        save_file(state, directory / "model.safetensors", {"format": "pt"})
        return
    names, weight_map = sorted(state), {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        # Strided assignment: a layer's tensors, even one expert's, are in different shards.
        chosen = names[s::shards]
        save_file({name: state[name] for name in chosen}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def make_composite(directory):
    """Turns the checkpoint of a text model into the checkpoint of a model with a vision part: keys under text_config,
    tensors under model.language_model, and one tensor of the vision part."""
    path = directory / "config.json"
    text = json.loads(path.read_text())
    dtype = text.pop("torch_dtype")
    text.pop("architectures")
    write_json(path, {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": text | {"dtype": dtype, "mtp_num_hidden_layers": 1},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                          "out_hidden_size": text["hidden_size"], "model_type": "qwen3_5_moe"},
    })  # fmt: skip
    path = directory / "model.safetensors"
    state = {}
    for name, tensor in load_file(path).items():
        state[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = tensor
    state["model.visual.merger.norm.weight"] = torch.ones(16)
    save_file(state, path, {"format": "pt"})


def write_saved(model, directory, packed, max_shard_size="1GB"):
    """The directory as transformers 5 saves it; `packed` keeps the 3-D expert tensors."""
    model.save_pretrained(directory, save_original_format=not packed, max_shard_size=max_shard_size)
