"""Parity of a mid-size random model with transformers on the same GPU.

  python midsize.py BINARY [--model qwen3|deepseek-v2-lite|deepseek-v2] [--dir /tmp/midsize] [--prompts
  1,17,1023,4097,20000]
      [--scheme gptq-int4-channel|gptq-int4-g64|gptq-int4-g128|fp8-block] [--flags="--tp 2"]..

Makes a checkpoint of 1.5 to 3.1 GB in bf16, runs it through transformers on the GPU (f32 with
exact products, then bf16 for the noise), and through BINARY on the same GPU: 4 sequences of 96 tokens in f32 and
bf16, then one prompt of each length in bf16, whose logits are compared. DeepSeek-V2's also run on the per-expert loop
and with keys and values of every head in the cache: in f32 all of them must give transformers' greedy tokens. With a
SCHEME BINARY gets the checkpoint quantised and transformers what the quantised weights mean; activations keep 16 bits.
FLAGS are further flags of BINARY, such as a number of ranks; of several each is run. Prints a row per run; exit code 1
if one fails.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
import make_reference  # noqa: E402
from quantise import SCHEMES, quantise  # noqa: E402

QWEN3 = dict(
    vocab_size=32768, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=14,
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=32768, rope_theta=1000000.0, tie_word_embeddings=False,
)
# The latent rows have the sizes of DeepSeek's models, so that the fast kernels run.
V2_LITE = dict(
    vocab_size=32768, hidden_size=1024, intermediate_size=2816, moe_intermediate_size=704, num_hidden_layers=7,
    num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
    first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
    max_position_embeddings=32768, rope_theta=10000.0, tie_word_embeddings=False,
)
V2 = V2_LITE | dict(
    num_attention_heads=32, num_key_value_heads=32, q_lora_rank=768, n_routed_experts=80, topk_method="group_limited_greedy",
    n_group=8, topk_group=3, routed_scaling_factor=4.0,
)
LATENT = (["--moe-path", "fused"], ["--moe-path", "legacy"], ["--mla", "naive"])
MODELS = {
    "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3, ([],)),
    "deepseek-v2-lite": (DeepseekV2Config, DeepseekV2ForCausalLM, V2_LITE, LATENT),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM, V2, LATENT),
}


def make_checkpoint(folder, kind, family, options):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = family(kind(**options))
    torch.set_default_dtype(torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    del model
    torch.cuda.empty_cache()


def reference_of(folder, ids, generate):
    """The reference for 4 sequences of 96 tokens, with hidden states and a greedy continuation."""
    return {name: t.cpu() for name, t in make_reference.make_reference(folder, ids, generate).items()}


@torch.no_grad()
def logits_of(folder, family, dtype, prompts):
    """The logits of each prompt, in host memory. Attention is fused, because the scores of a whole long prompt would
    not fit."""
    model = family.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager").to("cuda").eval()
    found = [model(ids, use_cache=False).logits.float().cpu() for ids in prompts]
    del model
    torch.cuda.empty_cache()
    return found


def prompt_references(folder, family, vocabulary, lengths):
    """The pairs (length, tensors), with one prompt of each length."""
    prompts = [make_reference.random_ids(vocabulary, 1, n, n).to("cuda") for n in lengths]
    exact, rounded = (logits_of(folder, family, dtype, prompts) for dtype in (torch.float32, torch.bfloat16))
    for n, ids, want, got in zip(lengths, prompts, exact, rounded):
        noise = make_reference.bf16_noise({"logits": got.to("cuda")}, {"logits": want.to("cuda")})
        yield n, {"logits": want, "input_ids": ids.cpu(), "bf16_noise": torch.tensor([noise])}


def passes(binary, folder, tensors, dtype, name, flags=()):
    """Runs BINARY against a reference and prints a row."""
    reference, out = folder / "reference.safetensors", folder / "result.json"
    out.unlink(missing_ok=True)
    save_file(tensors, reference)
    command = [binary, "parity", "--model", folder, "--reference", reference, "--device", "cuda"]
    run = subprocess.run([*command, "--dtype", dtype, "--json", out, *flags], capture_output=True, text=True)
    result = json.loads(out.read_text()) if out.exists() else {}
    keys = ["relative_error", "argmax_agreement", "generated_match", "router_topk_agreement", "passed"]
    noise = tensors["bf16_noise"].item()
    print(name, dtype, *flags, {key: result[key] for key in keys if key in result}, f"bf16_noise of transformers {noise:.2e}", flush=True)
    if run.returncode != 0:
        print(run.stderr[-600:])
    return run.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/midsize"))
    parser.add_argument("--prompts", default="1,17,1023,4097,20000")
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--scheme", choices=SCHEMES)
    parser.add_argument("--flags", action="append")
    args = parser.parse_args()
    forms = [flags.split() for flags in args.flags or [""]]
    kind, family, options, variants = MODELS[args.model]
    make_checkpoint(args.dir, kind, family, options)
    ours, meant = quantise(args.dir, args.scheme) if args.scheme else (args.dir, args.dir)
    if args.scheme == "fp8-block":
        forms = [[*flags, "--fp8-activations", "off"] for flags in forms]
    on_host = make_reference.load
    make_reference.load = lambda folder, dtype: on_host(folder, dtype).to("cuda")
    ids = make_reference.random_ids(options["vocab_size"], 4, 96, 0).to("cuda")
    tensors = reference_of(meant, ids, 32)
    torch.cuda.empty_cache()
    gigabytes = sum(f.stat().st_size for f in ours.glob("model*.safetensors")) / 1e9
    print(f"mid-size model of {gigabytes:.1f} GB")
    runs = [(dtype, [*variant, *flags]) for dtype in ("f32", "bf16") for variant in variants for flags in forms]
    passed = [passes(args.binary, ours, tensors, dtype, "4 x 96 tokens", flags) for dtype, flags in runs]
    for n, tensors in prompt_references(meant, family, options["vocab_size"], [int(n) for n in args.prompts.split(",") if n]):
        passed += [passes(args.binary, ours, tensors, "bf16", f"prompt of {n}", flags) for flags in forms]
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
