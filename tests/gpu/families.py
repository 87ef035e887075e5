"""Prints what families.sh measured, ours next to vLLM's: python families.py FOLDER SHAPE...

For each row the share of the card that it uses: of decode steps the bytes of weights and of the KV cache that a step
must read, of prompts the FLOPs of products and attention, at the rates below. Experts of a step: those that B tokens
choose if they choose evenly and apart.
"""

import json
import sys
from pathlib import Path

BYTES = 4.59e12  # a second, of reads: the fastest card of docs/kernels.md
FLOPS = 790e12  # a second, bf16
PROMPT, OUTPUT = 128, 256  # tokens of a decode row: half of the output is there on average


class Shape:
    """Numbers of parameters and of cached values of a config."""

    def __init__(self, config):
        get = lambda *names: next((config[name] for name in names if config.get(name) is not None), None)
        self.hidden = get("hidden_size")
        self.layers = get("num_hidden_layers")
        self.vocabulary = get("vocab_size") * self.hidden
        self.experts = get("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        self.top_k = get("num_experts_per_tok", "moe_k")
        width = get("moe_intermediate_size", "intermediate_size")
        self.expert = 3 * self.hidden * width
        # MXFP4 has a scale of a byte for each 32 numbers of 4 bits.
        packed = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
        self.expert_bytes = self.expert * (17 / 32 if packed else 2)
        shared = get("shared_expert_intermediate_size") or (get("n_shared_experts", "moe_num_shared_experts") or 0) * width
        self.shared = 3 * self.hidden * shared
        self.dense_layers = get("first_k_dense_replace") or 0
        self.dense = 3 * self.hidden * (get("intermediate_size") or 0)
        heads = get("num_attention_heads")
        if get("kv_lora_rank"):
            latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
            plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
            low = get("q_lora_rank")
            query = heads * (plain + rope)
            self.attention = (self.hidden * low + low * query if low else self.hidden * query) + self.hidden * (latent + rope)
            self.attention += latent * heads * (plain + value) + heads * value * self.hidden
            self.cached = latent + rope
            self.scores = heads * (plain + rope + value)
        else:
            head = get("head_dim") or self.hidden // heads
            groups = get("num_key_value_heads")
            self.attention = self.hidden * head * (2 * heads + 2 * groups)
            self.cached = 2 * groups * head
            self.scores = 2 * heads * head

    def step_bytes(self, batch):
        chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** batch)
        sparse = self.layers - self.dense_layers
        others = sparse * self.shared + self.dense_layers * self.dense + self.vocabulary
        positions = batch * (PROMPT + OUTPUT / 2)
        kept = self.layers * (self.attention + positions * self.cached)
        return 2 * (kept + others) + sparse * chosen * self.expert_bytes

    def prompt_flops(self, tokens):
        sparse = self.layers - self.dense_layers
        weights = self.layers * self.attention + sparse * (self.top_k * self.expert + self.shared) + self.dense_layers * self.dense
        return tokens * (2 * weights + self.layers * self.scores * tokens) + 2 * self.vocabulary


def rate(row):
    return row["tok_s"] if isinstance(row, dict) else row


def table(folder, shape):
    """The rows of a shape, as they are printed and as they are stored."""
    parts = {name: folder / f"{shape}.{name}.json" for name in ("ours", "vllm")}
    found = {name: json.loads(path.read_text()) for name, path in parts.items() if path.exists()}
    sizes = Shape(json.loads((folder / f"{shape}.config.json").read_text()))
    rows = []
    for kind in ("decode", "prefill"):
        of = {name: {str(size): rate(row) for size, row in part.get(kind, {}).items()} for name, part in found.items()}
        for size in dict.fromkeys(size for part in of.values() for size in part):
            row = {"shape": shape, "row": f"{kind} {size}"} | {name: part.get(size) for name, part in of.items()}
            n = int(size)
            if row.get("ours") and kind == "decode":
                row["share_of_bytes"] = sizes.step_bytes(n) * row["ours"] / n / BYTES
            elif row.get("ours"):
                row["share_of_flops"] = sizes.prompt_flops(n) * row["ours"] / n / FLOPS
            rows.append(row)
    return rows


def show(row):
    number = lambda value, width: f"{value:{width}.0f}" if value else f"{'-':>{width}}"
    ours, vllm = row.get("ours"), row.get("vllm")
    ratio = f"{ours / vllm:7.2f}" if ours and vllm else f"{'-':>7}"
    share = next((f"{100 * row[key]:5.1f} % of {key[9:]}" for key in ("share_of_bytes", "share_of_flops") if key in row), "")
    return f"{row['shape']:20} {row['row']:14} {number(ours, 9)} {number(vllm, 9)} {ratio} {share}"


def main():
    folder, shapes = Path(sys.argv[1]), sys.argv[2:]
    rows = [row for shape in shapes for row in table(folder, shape)]
    print(f"{'shape':20} {'tok/s':14} {'ours':>9} {'vLLM':>9} {'ratio':>7}")
    for row in rows:
        print(show(row))
    (folder / "families.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
