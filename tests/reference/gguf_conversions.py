"""Converts the tensors of gpt-oss, Qwen3-Next and Qwen3.5 as llama.cpp's converter does: their names, their order and
their values are changed."""

import re

import gguf
import numpy as np

MODULES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    """Returns the name in a GGUF file of a tensor that is neither cut nor joined."""
    module, ending = name.rsplit(".", 1)
    if module in ROOT:
        return f"{ROOT[module]}.{ending}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{MODULES[module]}.{ending}"


def mxfp4(blocks, scales):
    """Returns blocks [E, N, G, 16] and scales [E, N, G] as ggml's blocks of 17 bytes. In the checkpoint a byte holds
    two neighbours; in ggml it holds a value and the value that comes 16 later."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    codes = values[..., :16] | values[..., 16:] << 4
    return np.concatenate([scales[..., None], codes], axis=-1).reshape(*scales.shape[:2], -1)


def gpt_oss(tensors):
    """Yields names, values and, of MXFP4, whether the values are blocks of bytes."""
    for name, values in tensors.items():
        pack = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(|_bias|_blocks|_scales)", name)
        if name.endswith(".sinks"):
            yield f"blk.{name.split('.')[2]}.attn_sinks.weight", values, False
        elif pack is None:
            yield gguf_name(name), values, False
        elif pack[3] != "_scales":
            layer, ending = pack[1], "bias" if pack[3] == "_bias" else "weight"
            if is_blocks := pack[3] == "_blocks":
                values = mxfp4(values, tensors[name.replace("_blocks", "_scales")])
            elif ending == "weight":
                values = values.swapaxes(1, 2)
            parts = {"down": values} if pack[2] == "down" else {"gate": values[:, ::2], "up": values[:, 1::2]}
            for part, rows in parts.items():
                yield f"blk.{layer}.ffn_{part}_exps.{ending}", np.ascontiguousarray(rows), is_blocks


def stacked(tensors):
    """Yields all tensors; experts that are stored one by one, or in packs, become gate, up and down of all experts."""
    single = {}
    for name, values in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        if expert := re.search(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$", name):
            single.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = values
        elif name.endswith(".experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif name.endswith(".experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", values
        else:
            yield name, values
    for name, experts in single.items():
        yield name, np.stack([experts[expert] for expert in sorted(experts)])


def in_turns(values, axis, keys, width):
    """Returns value heads of `width`, grouped by key heads, in turns: the first one of each key head comes first."""
    shape = values.shape
    heads = shape[axis] // width
    apart = values.reshape(*shape[:axis], keys, heads // keys, width, *shape[axis + 1 :])
    return np.ascontiguousarray(apart.swapaxes(axis, axis + 1)).reshape(shape)


def reordered(name, values, config):
    """Returns a tensor of linear attention in the order of heads that files of Qwen3.5 have."""
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    key_rows = 2 * keys * config["linear_key_head_dim"]
    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        return np.concatenate([values[:key_rows], in_turns(values[key_rows:], 0, keys, width)])
    if name.endswith(".in_proj_z.weight"):
        return in_turns(values, 0, keys, width)
    if name.endswith((".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")):
        return in_turns(values, 0, keys, 1)
    return in_turns(values, 1, keys, width) if name.endswith(".out_proj.weight") else values


def apart(values, config):
    """Separates rows that are grouped by key heads: returns the rows of q, k, v of all heads, and the rows of z."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_key = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    grouped = values.reshape(keys, -1, values.shape[-1])
    parts = np.split(grouped, [width, 2 * width, 2 * width + of_key], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
    return np.concatenate([q, k, v]), z


def linear(tensors, config):
    """Yields names, values and that these are not blocks, of Qwen3-Next or Qwen3.5."""
    for name, values in stacked(tensors):
        if name.startswith("blk."):
            yield name, values, False
            continue
        layer = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else None
        if ".linear_attn." in name and config["model_type"] != "qwen3_next":
            values = reordered(name, values, config)
        if name.endswith(".in_proj_qkvz.weight"):
            qkv, z = apart(values, config)
            yield f"{layer}.attn_qkv.weight", qkv, False
            yield f"{layer}.attn_gate.weight", z, False
        elif name.endswith(".A_log"):
            yield f"{layer}.ssm_a", -np.exp(values), False
        elif name.endswith(".dt_bias"):
            yield f"{layer}.ssm_dt.bias", values, False
        else:
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                values = values + 1
            if name.endswith("conv1d.weight"):
                values = values.squeeze(1)
            yield gguf_name(name), values, False


def converted(tensors, config):
    """Yields all tensors of a file: names, values, and whether the values are blocks of MXFP4."""
    return gpt_oss(tensors) if config["model_type"] == "gpt_oss" else linear(tensors, config)


def metadata(writer, config):
    """Adds the metadata that only these families have."""
    text = config.get
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        scaling = text("rope_scaling") or config["rope_parameters"]
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        return
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    interval = config["full_attention_interval"]
    is_linear = [(layer + 1) % interval != 0 for layer in range(config["num_hidden_layers"])]
    if text("layer_types"):
        is_linear = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_linear)
    if config["model_type"] != "qwen3_next":
        sections = (text("rope_parameters") or {}).get("mrope_section") or [11, 11, 10]
        writer.add_rope_dimension_sections([*sections, 0])
