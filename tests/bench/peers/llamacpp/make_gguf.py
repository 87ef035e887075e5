#!/usr/bin/env python3
"""make_gguf.py CONFIG OUT [FORMAT ..]: random-weight qwen3moe GGUF files from a config.json.

Formats: BF16, Q8_0, Q4_0 (all of them by default). Every matrix is in the format; norms and router are F32.
"""
import json
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

FILE_TYPES = {
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def byte_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = 256 - len(plain)
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(others)]


def writer(config, path, kind):
    w = gguf.GGUFWriter(str(path), "qwen3moe")
    w.add_name(path.stem)
    w.add_file_type(FILE_TYPES[kind])
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    for add in (w.add_key_length, w.add_value_length, w.add_rope_dimension_count):
        add(config["head_dim"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_expert_count(config["num_experts"])
    w.add_expert_used_count(config["num_experts_per_tok"])
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
    w.add_bos_token_id(config["bos_token_id"])
    w.add_eos_token_id(config["eos_token_id"])
    w.add_add_bos_token(False)
    return w


def main():
    config_path, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads(config_path.read_text())
    kinds = sys.argv[3:] or list(FILE_TYPES)
    writers = {kind: writer(config, out / f"{config_path.stem}-{kind}.gguf", kind) for kind in kinds}
    rng = np.random.default_rng(0)

    def matrix(name, *shape, f32=False):
        x = rng.standard_normal(shape, dtype=np.float32) * 0.02
        for kind, w in writers.items():
            if f32:
                w.add_tensor(name, x)
            else:
                raw = GGMLQuantizationType[kind]
                w.add_tensor(name, quants.quantize(x, raw), raw_dtype=raw)

    def ones(name, size):
        for w in writers.values():
            w.add_tensor(name, np.ones(size, dtype=np.float32))

    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    start = time.time()
    matrix("token_embd.weight", vocab, hidden)
    ones("output_norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("output.weight", vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        p = f"blk.{layer}."
        for name, size in [("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head), ("attn_k_norm", head)]:
            ones(f"{p}{name}.weight", size)
        matrix(p + "attn_q.weight", q, hidden)
        matrix(p + "attn_k.weight", kv, hidden)
        matrix(p + "attn_v.weight", kv, hidden)
        matrix(p + "attn_output.weight", hidden, q)
        matrix(p + "ffn_gate_inp.weight", experts, hidden, f32=True)
        matrix(p + "ffn_gate_exps.weight", experts, width, hidden)
        matrix(p + "ffn_up_exps.weight", experts, width, hidden)
        matrix(p + "ffn_down_exps.weight", experts, hidden, width)
        print(f"layer {layer}: {time.time() - start:.1f} s", flush=True)
    for w in writers.values():
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()


if __name__ == "__main__":
    main()
