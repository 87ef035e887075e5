"""Writes a checkpoint of one of the families of docs/gguf.md as a GGUF file, as llama.cpp's converter does it, by the
package `gguf`.

    python tests/reference/write_gguf.py MODEL_FOLDER OUT.gguf --type Q8_0 [--split 2]

Matrices whose rows no block divides stay in F16; --type K makes a mixture of types of which the package can only decode
most: their blocks are random, for tests against a twin in floats (`--twin FOLDER` writes the dequantised weights as
safetensors). Experts in MXFP4 stay as they are; gpt-oss, Qwen3-Next and Qwen3.5 have no twin.
"""

import argparse
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.numpy import save_file

import gguf_conversions
from make_gguf_fixtures import HALVES

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "olmoe": "olmoe", "mixtral": "llama", "glm4_moe": "glm4moe"}
CONVERTED = {"gpt_oss": "gpt-oss", "qwen3_next": "qwen3next", "qwen3_5_moe_text": "qwen35moe"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
ROOT = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def read(folder):
    """All tensors, floats in f32."""
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                tensor = f.get_tensor(name)
                tensors[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return tensors


def places(name, architecture):
    """The name in GGUF and the expert's number, if the tensor is one expert's."""
    if name in ROOT:
        return ROOT[name], None
    _, _, layer, rest = name.split(".", 3)
    module, ending = rest.rsplit(".", 1)
    if ".experts." in rest:
        _, expert, matrix = module.rsplit(".", 2)
        return f"blk.{layer}.ffn_{EXPERT[matrix]}_exps.weight", int(expert)
    if ".shared_expert" in rest and module.rsplit(".", 1)[1] in EXPERT:
        return f"blk.{layer}.ffn_{EXPERT[module.rsplit('.', 1)[1]]}_shexp.weight", None
    if module == "post_attention_layernorm":
        norm = "post_attention_norm" if architecture == "glm4moe" else "ffn_norm"
        return f"blk.{layer}.{norm}.weight", None
    if ending == "e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias", None
    return f"blk.{layer}.{LAYER[module]}.{ending}", None


def permuted(weights, heads):
    """Rows of q or k in the order in which neighbours are rotated together."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def unpermuted(weights, heads):
    return weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def random_blocks(kind, shape, deviation, rng):
    """Random blocks of a type that nothing here can quantise to, whose weights have about this deviation."""
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, bytes_), dtype=np.uint8)
    for at in HALVES[kind.name]:
        halves = np.full(data.shape[:-1], 1, np.float16)
        data[..., at : at + 2] = halves.view(np.uint8).reshape(*data.shape[:-1], 2)
    if kind.name == "MXFP4":
        data[..., 0] = 127
    flat = data.reshape(*shape[:-1], -1)
    scale = deviation / gguf.dequantize(flat, kind).std()
    for at in HALVES[kind.name]:
        halves = np.full(data.shape[:-1], scale, np.float16)
        data[..., at : at + 2] = halves.view(np.uint8).reshape(*data.shape[:-1], 2)
    if kind.name == "MXFP4":
        data[..., 0] = 127 + round(np.log2(scale))
    return data.reshape(*shape[:-1], -1)


QUANTISABLE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"}


def stored(name, weights, kind, rng):
    """A tensor's data, their type, and the weights that they stand for."""
    is_float = weights.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or "ssm_conv1d" in name
    if is_float:
        return weights, Type.F32, weights
    if weights.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0:
        kind = Type.F16
    if kind.name in QUANTISABLE:
        data = gguf.quantize(weights, kind)
    else:
        data = random_blocks(kind, weights.shape, weights.std(), rng)
    return data, kind, gguf.dequantize(data, kind).reshape(weights.shape).astype(np.float32)


def metadata(writer, config, architecture):
    text = config.get
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if text("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head = text("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(text("rope_theta") or rope.get("rope_theta") or 10000.0))
    if architecture != "gpt-oss":
        writer.add_rope_dimension_count(int(head * float(text("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1)))
    experts = text("num_experts") or text("num_local_experts") or text("n_routed_experts")
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if text("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if text("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] in CONVERTED:
        gguf_conversions.metadata(writer, config)
    if architecture == "glm4moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def tokenizer(writer, folder, pre):
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    json_ = json.loads(path.read_text())
    tokens = dict(json_["model"]["vocab"])
    kinds = {}
    for token in json_["added_tokens"]:
        tokens[token["content"]] = token["id"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    by_id = {id_: text for text, id_ in tokens.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([kinds.get(i, gguf.TokenType.NORMAL if i in by_id else gguf.TokenType.UNUSED) for i in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in json_["model"]["merges"]])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for key, add in (("eos_token", writer.add_eos_token_id), ("bos_token", writer.add_bos_token_id), ("pad_token", writer.add_pad_token_id)):
        if config.get(key):
            add(tokens[config[key]])
    writer.add_add_bos_token(False)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def add_converted(writer, tensors, config, kind):
    """Adds the tensors of a family whose conversion is more than names."""
    for name, values, is_blocks in gguf_conversions.converted(tensors, config):
        if is_blocks:
            writer.add_tensor(name, values, raw_dtype=Type.MXFP4)
        else:
            data, stored_as, _ = stored(name, np.ascontiguousarray(values, np.float32), kind, None)
            writer.add_tensor(name, data, raw_dtype=stored_as)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q8_0", help="a type, or several by commas, which take turns")
    parser.add_argument("--split", type=int, default=0, help="tensors of a part")
    parser.add_argument("--pre", default="gpt-2")
    parser.add_argument("--twin", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    is_converted = config["model_type"] in CONVERTED
    if is_converted and args.twin:
        raise SystemExit("this family has no twin")
    architecture = (ARCHITECTURES | CONVERTED)[config["model_type"]]
    kinds = [Type[name] for name in args.type.split(",")]
    rng = np.random.default_rng(50)
    tensors = {}
    read_tensors = read(args.model)
    for name, weights in [] if is_converted else read_tensors.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            raise SystemExit("experts must be stored one by one")
        to, expert = places(name, architecture)
        tensors.setdefault(to, {})[expert] = (name, weights)
    writer = gguf.GGUFWriter(args.out, architecture, split_max_tensors=args.split)
    metadata(writer, config, architecture)
    tokenizer(writer, args.model, args.pre)
    if is_converted:
        add_converted(writer, read_tensors, config, kinds[0])
    twin = {}
    turn = 0
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for to, parts in tensors.items():
        names = [parts[expert][0] for expert in sorted(parts, key=lambda e: -1 if e is None else e)]
        weights = [parts[expert][1] for expert in sorted(parts, key=lambda e: -1 if e is None else e)]
        weights = np.stack(weights) if None not in parts else weights[0]
        module = to.split(".")[-2]
        rotates = architecture == "llama" and module in heads
        if rotates:
            weights = permuted(weights, heads[module])
        if module == "ffn_gate_inp_shexp":
            weights = weights.reshape(-1)
        data, kind, stands_for = stored(to, weights, kinds[turn % len(kinds)], rng)
        turn += kind != Type.F32
        writer.add_tensor(to, data, raw_dtype=kind)
        if rotates:
            stands_for = unpermuted(stands_for, heads[module])
        if module == "ffn_gate_inp_shexp":
            stands_for = stands_for.reshape(1, -1)
        for at, name in enumerate(names):
            twin[name] = np.ascontiguousarray(stands_for[at] if None not in parts else stands_for)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if args.twin:
        args.twin.mkdir(parents=True, exist_ok=True)
        save_file(twin, args.twin / "model.safetensors")
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (args.model / name).is_file():
                shutil.copy(args.model / name, args.twin / name)


if __name__ == "__main__":
    main()
