"""Parity of mid-size random models with transformers on the same GPU.

  python midsize.py BINARY [--model qwen3|deepseek-v2-lite|deepseek-v2|deepseek-v3|glm-4.5-air|gpt-oss,..]
      [--dir /tmp/midsize] [--prompts 1,17,1023,4097,20000] [--flags="--tp 2"]..
      [--scheme gptq-int4-channel|gptq-int4-g64|gptq-int4-g128|fp8-block]

Makes a checkpoint of 1.5 to 4.7 GB in bf16, runs it through transformers on the GPU (f32 with
exact products, then bf16 for the noise), and through BINARY on the same GPU: 4 sequences of 96 tokens in f32 and
bf16, then one prompt of each length in bf16, whose logits are compared and whose routing is free. Models with latent
attention run in both of its forms, DeepSeek-V2's on the per-expert loop too: in f32 all of them must give transformers'
greedy tokens. With a SCHEME BINARY gets the checkpoint quantised and transformers what the quantised weights mean;
activations keep 16 bits. FLAGS are further flags of BINARY, such as a number of ranks; of several each is run. Prints a
row per run, with the error and transformers' own in bf16; exit code 1 if one fails.
"""
import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from midsize_models import MODELS, make_checkpoint
from quantise import SCHEMES, quantise

# midsize_models.py adds the folder of these to the path.
from make_reference import bf16_noise, greedy, load, random_ids, reset_rope, teacher_force
from stability import choice_keys, chosen_experts

# Shorter prompts than this are chosen so that no expert is chosen by rounding: one expert that differs would be most of
# their error. In longer ones such choices average out.
SHORT = 32


def choices(model, recorded):
    """For each layer which experts a router's logits choose, as a mask, and how clearly each row chooses."""
    for name, logits in recorded.items():
        if name.startswith("router_logits."):
            yield chosen_experts(choice_keys(model, int(name.rsplit(".", 1)[1]), logits), model.config)


def clearest(model, batch, length, candidates):
    """Of some random inputs [batch, length] the one whose closest choice of an expert is the clearest."""
    ids = random_ids(model.config.vocab_size, candidates * batch, length, length).to(model.device)
    gaps = torch.stack([gaps for _, gaps in choices(model, teacher_force(model, ids))]).amin(0)
    return ids.unflatten(0, (candidates, batch))[gaps.view(candidates, -1).amin(1).argmax()]


def fuse_attention(model):
    """Attention that does not hold the scores of a whole long prompt, where the family has it."""
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def logits_of(model, prompts):
    """The logits of each prompt, in host memory."""
    fuse_attention(model)
    reset_rope(model)
    return [model(ids, use_cache=False).logits.float().cpu() for ids in prompts]


def references(folder, lengths, device, generate=32):
    """By name: the reference of 4 sequences of 96 tokens, with hidden states and greedy tokens, and of each prompt."""
    model = load(folder, torch.float32, device_map=device)
    ids = clearest(model, 4, 96, 4)
    exact = teacher_force(model, ids)
    experts = [int(chosen.any(0).sum()) for chosen, _ in choices(model, exact)]
    print(f"experts that 384 tokens choose, by layer: {experts}", flush=True)
    generated = greedy(model, ids, generate)[0]
    prompts = [
        clearest(model, 1, n, 512) if n < SHORT else random_ids(model.config.vocab_size, 1, n, n).to(device)
        for n in lengths
    ]
    wanted = logits_of(model, prompts)
    del model
    model = load(folder, torch.bfloat16, device_map=device)
    noise = bf16_noise(teacher_force(model, ids), exact)
    whole = exact | {"generated": generated, "input_ids": ids, "bf16_noise": torch.tensor([noise])}
    found = {"4 x 96 tokens": {name: tensor.cpu().contiguous() for name, tensor in whole.items()}}
    for n, ids, want, got in zip(lengths, prompts, wanted, logits_of(model, prompts)):
        noise = bf16_noise({"logits": got.to(device)}, {"logits": want.to(device)})
        found[f"prompt of {n}"] = {"logits": want, "input_ids": ids.cpu(), "bf16_noise": torch.tensor([noise])}
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


@dataclass(frozen=True)
class Run:
    """One run of BINARY."""

    name: str
    dtype: str
    flags: list
    reference: Path
    # transformers' own error in bf16.
    noise: float


def passes(run, at, folder, args):
    """Runs BINARY against a reference. Returns what there is to print, and whether it passed."""
    out = folder / f"result-{at}.json"
    out.unlink(missing_ok=True)
    command = [args.binary, "parity", "--model", folder, "--reference", run.reference, "--device", args.device]
    done = subprocess.run([*command, "--dtype", run.dtype, f"--json={out}", *run.flags], capture_output=True, text=True)
    result = json.loads(out.read_text()) if out.exists() else {}
    keys = ["relative_error", "argmax_agreement", "generated_match", "router_topk_agreement", "passed"]
    shown = {key: result[key] for key in keys if key in result}
    share = f"{result['relative_error'] / run.noise:.2f} of " if "relative_error" in result else ""
    text = f"{run.name} {run.dtype} {' '.join(run.flags)} {shown} {share}transformers' error in bf16, {run.noise:.2e}"
    return (text if done.returncode == 0 else f"{text}\n{done.stderr[-600:]}"), done.returncode == 0


def check(name, row, folder, args):
    """Makes and checks one model. Returns for every run whether it passed."""
    make_checkpoint(folder, row, args.device)
    ours, meant = quantise(folder, args.scheme) if args.scheme else (folder, folder)
    forms = [flags.split() for flags in args.flags or [""]]
    if args.scheme == "fp8-block":
        forms = [[*flags, "--fp8-activations", "off"] for flags in forms]
    gigabytes = sum(f.stat().st_size for f in ours.glob("model*.safetensors")) / 1e9
    print(f"== {name}: a model of {gigabytes:.1f} GB", flush=True)
    whole = [(dtype, [*variant, *flags]) for dtype in ("f32", "bf16") for variant in row.variants for flags in forms]
    runs = []
    for at, (what, tensors) in enumerate(references(meant, args.prompts, args.device).items()):
        path = ours / f"reference-{at}.safetensors"
        save_file(tensors, path)
        chosen = whole if "generated" in tensors else [("bf16", flags) for flags in forms]
        runs += [Run(what, dtype, flags, path, tensors["bf16_noise"].item()) for dtype, flags in chosen]
    verdicts = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for text, passed in pool.map(lambda at: passes(runs[at], at, ours, args), range(len(runs))):
            print(text, flush=True)
            verdicts.append(passed)
    path.replace(ours / "reference.safetensors")
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    parser.add_argument("binary")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/midsize"))
    parser.add_argument("--prompts", type=numbers, default=[1, 17, 1023, 4097, 20000])
    parser.add_argument("--model", default="qwen3", help=", ".join(MODELS))
    parser.add_argument("--scheme", choices=SCHEMES)
    parser.add_argument("--flags", action="append")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs of BINARY at a time")
    args = parser.parse_args()
    names = args.model.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"--model: expected one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    passed = []
    for name in names:
        folder = args.dir if len(names) == 1 else args.dir / name
        passed += check(name, MODELS[name], folder, args)
        if len(names) > 1:
            shutil.rmtree(folder)
    print(f"midsize: {sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
