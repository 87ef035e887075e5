"""Writes a quantised checkpoint of random bits, of the shapes of a config.json: what a load reads, not a model that
speaks.

  python load_quantised.py CONFIG FOLDER [--layers N]      CONFIG: tests/bench/configs/qwen3-30b-a3b-gptq-int4.json,
  ..-fp8-block.json

Files are laid out as safetensors writes them: by dtype, then by name, in shards of 4 GB. Nothing but Python is needed.
"""
import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHARD, BLOCK, PIECE = 4 << 30, 64 << 20, 4 << 20
SIZES = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def masked(block, keep, add, size):
    """Words of `size` bytes of which some bits are random and others given."""
    word = lambda bits: int.from_bytes(bits.to_bytes(size, "little") * (len(block) // size), "little")
    return (int.from_bytes(block, "little") & word(keep) | word(add)).to_bytes(len(block), "little")


def blocks():
    """Random data of each dtype: floats are of moderate size, and no FP8 value is NaN."""
    block = os.urandom(BLOCK)
    return {
        "I32": block,
        "BF16": masked(block, 0x83FF, 0x3800, 2),
        "F16": masked(block, 0x03FF, 0x2000, 2),
        "F32": masked(block, 0x007FFFFF, 0x3C000000, 4),
        "F8_E4M3": masked(block, 0xF7, 0, 1),
    }


def gptq(name, n, k, quant):
    per_word, groups = 32 // quant["bits"], -(-k // quant["group_size"])
    return [
        (f"{name}.qweight", "I32", [k // per_word, n]),
        (f"{name}.qzeros", "I32", [groups, n // per_word]),
        (f"{name}.scales", "F16", [groups, n]),
        (f"{name}.g_idx", "I32", [k]),
    ]


def fp8(name, n, k, quant):
    rows, columns = quant["weight_block_size"]
    return [(f"{name}.weight", "F8_E4M3", [n, k]), (f"{name}.weight_scale_inv", "F32", [-(-n // rows), -(-k // columns)])]


def tensors(config, layers):
    """(name, dtype, shape) of all tensors of the checkpoint."""
    h, quant, head = config["hidden_size"], config["quantization_config"], config["head_dim"]
    matrix = {"gptq": gptq, "fp8": fp8}[quant["quant_method"]]
    yield from (("model.embed_tokens.weight", "BF16", [config["vocab_size"], h]), ("lm_head.weight", "BF16", [config["vocab_size"], h]))
    yield ("model.norm.weight", "BF16", [h])
    for layer in (f"model.layers.{i}" for i in range(layers)):
        for norm, width in (("input_layernorm", h), ("post_attention_layernorm", h), ("self_attn.q_norm", head), ("self_attn.k_norm", head)):
            yield (f"{layer}.{norm}.weight", "BF16", [width])
        q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        for name, n, k in (("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)):
            yield from matrix(f"{layer}.self_attn.{name}", n, k, quant)
        yield (f"{layer}.mlp.gate.weight", "BF16", [config["num_experts"], h])
        width = config["moe_intermediate_size"]
        for expert in (f"{layer}.mlp.experts.{e}" for e in range(config["num_experts"])):
            for name, n, k in (("gate_proj", width, h), ("up_proj", width, h), ("down_proj", h, width)):
                yield from matrix(f"{expert}.{name}", n, k, quant)


def size(tensor):
    elements = SIZES[tensor[1]]
    for dim in tensor[2]:
        elements *= dim
    return elements


def content(tensor, random, quant):
    """The bytes of a tensor, or None for random bytes."""
    name, _, shape = tensor
    if name.endswith(".g_idx"):
        return b"".join((column // quant["group_size"]).to_bytes(4, "little") for column in range(shape[0]))
    if name.endswith(".qzeros"):
        return bytes([0x77 if quant["bits"] == 4 else 0x7F]) * size(tensor)  # the middle, less one
    return None


def write(path, shard, random, quant):
    header, end = {}, 0
    for tensor in shard:
        header[tensor[0]] = {"dtype": tensor[1], "shape": tensor[2], "data_offsets": [end, end + size(tensor)]}
        end += size(tensor)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
    order = {}
    for tensor in shard:
        begin, length = (header[tensor[0]]["data_offsets"][0] + 8 + len(text), size(tensor))
        key = (tensor[0].rsplit(".", 1)[-1], tuple(tensor[2]))
        if key not in order:
            order[key] = content(tensor, random, quant)
        given, block, at = order[key], memoryview(random[tensor[1]]), begin * 4099 % (BLOCK // 8) * 8
        for done in range(0, length, PIECE):
            piece = min(PIECE, length - done)
            start = (at + done) % (BLOCK - PIECE) & ~7
            os.pwrite(file, given if given is not None else block[start : start + piece], begin + done)
    os.close(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    shards, filled = [[]], 0
    for tensor in tensors(config, config["num_hidden_layers"]):
        if filled + size(tensor) > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size(tensor)
    random, quant = blocks(), config["quantization_config"]
    args.folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    ordered = [sorted(shard, key=lambda t: (-SIZES[t[1]], t[1], t[0])) for shard in shards]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda i: write(args.folder / names[i], ordered[i], random, quant), range(len(shards))))
    weight_map = {tensor[0]: name for name, shard in zip(names, ordered) for tensor in shard}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (args.folder / "config.json").write_text(json.dumps(config))
    total = sum(size(tensor) for shard in shards for tensor in shard)
    print(f"{total} bytes in {len(shards)} files, {sum(map(len, shards))} tensors")


if __name__ == "__main__":
    main()
