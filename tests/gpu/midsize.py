"""Parity of a mid-size random model with transformers on the same GPU.

  python midsize.py BINARY [--dir /tmp/midsize]

Makes a Qwen3-MoE checkpoint of 3.1 GB in bf16, runs it through transformers on the GPU (f32 with
exact products, then bf16 for the noise), and through BINARY on the same GPU in f32 and bf16.
Prints a row per dtype; exit code 1 if one fails.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
import make_reference  # noqa: E402

CONFIG = dict(
    vocab_size=32768, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=14,
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=4096, rope_theta=1000000.0, tie_word_embeddings=False,
)


def make_checkpoint(folder):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    del model
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/midsize"))
    args = parser.parse_args()
    make_checkpoint(args.dir)
    on_host = make_reference.load
    make_reference.load = lambda folder, dtype: on_host(folder, dtype).to("cuda")
    ids = make_reference.random_ids(CONFIG["vocab_size"], 4, 96, 0).to("cuda")
    tensors = {name: t.cpu() for name, t in make_reference.make_reference(args.dir, ids, 32).items()}
    reference = args.dir / "reference.safetensors"
    save_file(tensors, reference)
    torch.cuda.empty_cache()
    noise, failed = tensors["bf16_noise"].item(), 0
    gigabytes = sum(f.stat().st_size for f in args.dir.glob("model*.safetensors")) / 1e9
    print(f"mid-size model of {gigabytes:.1f} GB, bf16_noise of transformers {noise:.2e}")
    for dtype in ["f32", "bf16"]:
        out = args.dir / f"{dtype}.json"
        command = [args.binary, "parity", "--model", args.dir, "--reference", reference, "--device", "cuda"]
        run = subprocess.run([*command, "--dtype", dtype, "--json", out], capture_output=True, text=True)
        result = json.loads(out.read_text()) if out.exists() else {}
        keys = ["relative_error", "argmax_agreement", "generated_match", "router_topk_agreement", "passed"]
        print(dtype, {key: result.get(key) for key in keys})
        if run.returncode != 0:
            failed += 1
            print(run.stderr[-600:])
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
