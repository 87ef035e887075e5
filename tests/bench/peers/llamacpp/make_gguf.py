#!/usr/bin/env python3
"""make_gguf.py CONFIG OUT [--layers N] [FORMAT ..]: random-weight GGUF files from a config.json of Qwen3-MoE or OLMoE.

Formats: BF16, Q8_0, Q4_0 (all of them by default), Q4_K_M. Every matrix is in the format; norms and router are F32. In
Q4_K_M they are Q4_K, with Q6_K where llama-quantize has it. Integers are drawn as they are stored, with scales that
give the deviation 0.02, and a tensor is written before the next is made: a model of 30 B parameters takes a minute and
the memory of its largest tensor.
"""
import json
import math
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

FILE_TYPES = {
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
}
DEFAULT = ("BF16", "Q8_0", "Q4_0")
# llama.cpp's names of families.
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "olmoe": "olmoe"}


def byte_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = 256 - len(plain)
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(others)]


def writer(config, path, kind):
    w = gguf.GGUFWriter(str(path), ARCHITECTURES[config["model_type"]])
    w.add_name(path.stem)
    w.add_file_type(FILE_TYPES[kind])
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    for add in (w.add_key_length, w.add_value_length, w.add_rope_dimension_count):
        add(head_dim(config))
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_expert_count(config["num_experts"])
    w.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    # A made-up BPE vocabulary of the right size, so that llama.cpp's programs load the file.
    vocab = config["vocab_size"]
    w.add_vocab_size(vocab)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    alphabet = byte_alphabet()
    w.add_token_list(alphabet + [f"<t{i}>" for i in range(vocab - len(alphabet))])
    w.add_token_types([1] * vocab)
    w.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    w.add_bos_token_id(config.get("bos_token_id", 0))
    w.add_eos_token_id(config.get("eos_token_id", 0))
    w.add_add_bos_token(False)
    return w


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def random_rows(rng, kind, rows, columns):
    """Rows of `columns` weights of deviation 0.02, as a format stores them."""
    if kind == "F32":
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    if kind == "BF16":
        # Uniform over +- 0.02 sqrt(3). The values are the upper halves of f32 numbers, so no separate float is made for
        # each weight.
        x = (rng.random((rows, columns), dtype=np.float32) - np.float32(0.5)) * np.float32(0.04 * 3**0.5)
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if kind == "Q4_K":
        return q4_k_rows(rng, rows, columns)
    if kind == "Q6_K":
        return q6_k_rows(rng, rows, columns)
    # A block of 32: a scale in f16, then its integers.
    size, span = (34, 255) if kind == "Q8_0" else (18, 15)
    blocks = rng.integers(0, 256, (rows, columns // 32, size), dtype=np.uint8)
    quants = blocks[:, :, 2:]
    if kind == "Q8_0":
        quants[quants == 128] = 0
    else:
        # The values are 1 to 15, around the middle 8.
        quants[quants & 15 == 0] |= 8
        quants[quants < 16] |= 128
    scale = np.array([0.02 * 12**0.5 / span], dtype=np.float16)
    blocks[:, :, :2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def q4_k_rows(rng, rows, columns):
    """Blocks of 256: a scale and a minimum in f16, 8 scales and 8 minima of 6 bits in 12 bytes, 256 integers of 4 bits.
    A minimum has the integer of its scale, 32 to 47, and the f16 of the minima is 7.5 times the other one, so that the
    mean weight is 0."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    low = blocks[:, :, 4:8] & 15
    high = blocks[:, :, 8:12] & 15
    # The upper two bits of bytes 0 to 7 belong to the groups 4 to 7; bytes 8 to 11 hold their other four.
    blocks[:, :, 4:8] = 0b10_10_0000 | low
    blocks[:, :, 8:12] = 0b10_10_0000 | low
    blocks[:, :, 12:16] = high << 4 | high
    scale = 0.02 / (39.5 * (255 / 12) ** 0.5)
    blocks[:, :, 0:4] = np.array([scale, 7.5 * scale], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def q6_k_rows(rng, rows, columns):
    """Blocks of 256: the lower four bits of the integers, their upper two, 16 scales of 8 bits, here 16 to 31, and an
    f16."""
    blocks = rng.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
    blocks[:, :, 192:208] = 16 | blocks[:, :, 192:208] & 15
    scale = 0.02 / (23.5 * (4095 / 12) ** 0.5)
    blocks[:, :, 208:210] = np.array([scale], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def type_of(kind, name, layers):
    """The type of a matrix in a file of this format: llama-quantize's choice for Qwen3-MoE."""
    if kind != "Q4_K_M":
        return kind
    if name == "output.weight":
        return "Q6_K"
    part = name.split(".")
    if part[0] != "blk" or part[2] not in ("attn_v", "ffn_down_exps"):
        return "Q4_K"
    layer, eighth = int(part[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def tensors(config, kind):
    """Names, shapes and types: matrices are in the file's format, norms and routers in F32."""
    layers = config["num_hidden_layers"]
    for name, shape, matrix in shapes(config):
        yield name, shape, type_of(kind, name, layers) if matrix else "F32"


def shapes(config):
    """Names, shapes and whether a tensor is in the file's format."""
    hidden, head, vocab = config["hidden_size"], head_dim(config), config["vocab_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts = config["num_experts"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    # OLMoE norms all heads together.
    q_norm, k_norm = (q, kv) if config["model_type"] == "olmoe" else (head, head)
    yield "token_embd.weight", (vocab, hidden), True
    yield "output_norm.weight", (hidden,), False
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden), True
    for layer in range(config["num_hidden_layers"]):
        p = f"blk.{layer}."
        norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": q_norm, "attn_k_norm": k_norm}
        for name, size in norms.items():
            yield f"{p}{name}.weight", (size,), False
        yield p + "attn_q.weight", (q, hidden), True
        yield p + "attn_k.weight", (kv, hidden), True
        yield p + "attn_v.weight", (kv, hidden), True
        yield p + "attn_output.weight", (hidden, q), True
        yield p + "ffn_gate_inp.weight", (experts, hidden), False
        yield p + "ffn_gate_exps.weight", (experts, width, hidden), True
        yield p + "ffn_up_exps.weight", (experts, width, hidden), True
        yield p + "ffn_down_exps.weight", (experts, hidden, width), True


def main():
    args = sys.argv[1:]
    layers = None
    if "--layers" in args:
        at = args.index("--layers")
        layers = int(args[at + 1])
        del args[at : at + 2]
    config_path, out = Path(args[0]), Path(args[1])
    config = json.loads(config_path.read_text())
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    for kind in args[2:] or DEFAULT:
        write(config, out / f"{config_path.stem}-{kind}.gguf", kind)


def write(config, path, kind):
    start = time.time()
    w = writer(config, path, kind)
    rng = np.random.Generator(np.random.SFC64(0))
    for name, shape, stored_as in tensors(config, kind):
        raw = GGMLQuantizationType[stored_as]
        block, size = gguf.GGML_QUANT_SIZES[raw]
        count = math.prod(shape)
        # The sizes of quantised tensors are given in bytes.
        stored = (*shape[:-1], shape[-1] // block * size)
        as_bytes = stored_as != "F32"
        dtype = np.dtype(np.uint8 if as_bytes else np.float32)
        w.add_tensor_info(name, stored if as_bytes else shape, dtype, count // block * size, raw)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _, shape, stored_as in tensors(config, kind):
        if len(shape) == 1:
            w.write_tensor_data(np.ones(shape, dtype=np.float32))
        else:
            w.write_tensor_data(random_rows(rng, stored_as, math.prod(shape[:-1]), shape[-1]))
    w.close()
    print(f"{path}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
