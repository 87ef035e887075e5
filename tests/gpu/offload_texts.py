"""Compares the greedy tokens of 24 prompts with experts in host memory and with all experts on the GPU.

  python offload_texts.py BINARY [--dir /tmp/offload]

The script writes a random checkpoint whose sizes the fast kernels support (6 layers of 32 experts, 0.2 GB in bf16). It
needs torch and transformers. It runs the checkpoint with no experts in host memory, with half of each layer's experts
there, and with 28 of 32, where most steps need several passes. It does so with CUDA graphs, without them and in small
batches, always with --batch-invariant. Every token must be the same. The script prints a row per run, and exits with 1
if one fails.
"""
import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS, EXPERTS, HIDDEN, WIDTH, VOCABULARY = 6, 32, 512, 256, 2048
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1024, moe_intermediate_size=WIDTH, num_hidden_layers=LAYERS,
    num_attention_heads=8, num_key_value_heads=2, head_dim=128, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True,
    max_position_embeddings=2048, rope_theta=1000000.0, tie_word_embeddings=False, initializer_range=0.1,
)
ONE_OF_EACH_LAYER = LAYERS * 3 * HIDDEN * WIDTH * 2


def prompts():
    draw = random.Random(1)
    lengths = [1, 2, 3, 5, 8, 17, 40, 64, 65, 100, 130, 200] * 2
    return [",".join(str(draw.randrange(VOCABULARY)) for _ in range(n)) for n in lengths]


def tokens(binary, folder, flags):
    """The tokens of each prompt, and what --stats says."""
    command = [binary, "generate", "--model", folder, "--device", "cuda", "--dtype", "bf16", "--skip-tokenizer-init", "--json", "--stats",
               "--temperature", "0", "--max-new-tokens", "48", "--ignore-eos", "--log", "error", "--batch-invariant", *flags]
    run = subprocess.run([*command, *(f"--prompt={ids}" for ids in prompts())], capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stderr[-800:])
        return None, ""
    return [json.loads(line)["choices"][0]["token_ids"] for line in run.stdout.splitlines()], run.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/offload"))
    args = parser.parse_args()
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(torch.bfloat16).save_pretrained(args.dir)
    want, _ = tokens(args.binary, args.dir, [])
    failed = not want or len({tuple(ids) for ids in want}) < 20
    for experts, more in ((16, []), (28, []), (16, ["--enforce-eager"]), (28, ["--max-num-seqs", "3"]), (1, ["--max-num-seqs", "1"])):
        got, said = tokens(args.binary, args.dir, ["--expert-offload", f"{experts * ONE_OF_EACH_LAYER}B", *more])
        equal = sum(a == b for a, b in zip(got or [], want or []))
        traffic = re.search(r"needed (\d+) experts, (\d+) of them were fetched \(hit rate ([\d.]+)\)", said)
        passed = equal == len(prompts()) and traffic and int(traffic[2]) > 0
        failed |= not passed
        print("ok     " if passed else "FAILED ", f"{experts} of {EXPERTS} experts in host memory", *more, f": {equal} of 24 texts,",
              traffic and f"{traffic[2]} of {traffic[1]} experts fetched", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
