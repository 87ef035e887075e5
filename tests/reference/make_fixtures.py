"""Makes the parity fixtures: tiny checkpoints with their transformers references.

    python make_fixtures.py --out tests/fixtures [--only NAME,..]

Each fixture directory is a checkpoint as a user would download it plus `reference.safetensors`.
Before it is written, the directory is loaded back with transformers and must give the logits of the
model it came from, bit for bit: a layout that transformers does not read is no fixture. The same
seeds give the same bytes on the same machine type; `bf16_noise` may move in its last digits with
the CPU's bf16 instructions.
"""

import argparse
import copy
import hashlib
import json
import platform
import shutil
import tempfile
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from fixture_specs import SPECS, by_name
from make_reference import load, make_reference, random_ids, reset_rope, teacher_force
from mtp_definition import Head
from quant_checkpoints import write_quantised
from stability import gate_tokens, measure
from text_case import text_cases, write_tokenizer
from tiny_checkpoints import build, make_composite, write_hub, write_json, write_saved

# Greedy tokens of two correct f32 implementations agree when the gap is far above rounding.
MIN_TOKEN_GAP = 1e-3
MIN_ROUTER_GAP = 1e-4


def write_checkpoint(spec, model, directory):
    """Config and weights in the layout of the spec."""
    values = copy.deepcopy(spec.config_values())
    if spec.layout.startswith("saved"):
        write_saved(model, directory, packed=spec.layout == "saved-packed")
    else:
        packed = spec.layout == "hub-packed"
        write_hub(model, directory, values, spec.dtype, spec.shards, spec.drop, packed)
    if spec.config.get("eos_token_id") is not None:
        generation = {"eos_token_id": values["eos_token_id"], "do_sample": False}
        write_json(directory / "generation_config.json", generation)
    if spec.text:
        write_tokenizer(directory, values["vocab_size"])


def add_head(spec, head, directory):
    """Adds the tensors of a head to a written checkpoint."""
    path = directory / "model.safetensors"
    state = load_file(path) | head.state(spec.layout == "hub-packed")
    save_file(state, path, {"format": "pt"})


def head_logits(spec, head, directory, input_ids):
    """What the head predicts from the hidden states of the model in `directory`."""
    logits, gap = head.logits(directory, input_ids)
    if gap < MIN_ROUTER_GAP:
        raise RuntimeError(f"{spec.name}: choose another seed, the head's router gap is {gap}")
    return logits


def set_model_type(path, model_type):
    """Gives a written config.json the type that it is published under."""
    write_json(path, json.loads(path.read_text()) | {"model_type": model_type})


def check_round_trip(spec, model, directory, input_ids):
    """The directory must load back to the model from which it was written; with sdpa, if the model has that, it must
    nearly do so."""
    model = copy.deepcopy(model).float()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    want = teacher_force(model, input_ids)["logits"]
    loaded = load(directory, torch.float32)
    if not torch.equal(teacher_force(loaded, input_ids)["logits"], want):
        raise RuntimeError(f"{spec.name}: the written directory gives other logits")
    if not loaded._supports_sdpa:
        return
    loaded.set_attn_implementation("sdpa")
    worst = (teacher_force(loaded, input_ids)["logits"] - want).abs().max().item()
    if worst > 1e-3:
        raise RuntimeError(f"{spec.name}: sdpa differs from eager attention by {worst}")


def check_generate(spec, directory, input_ids, generated):
    """The plain greedy loop must agree with transformers' own `generate`."""
    model = load(directory, torch.float32)
    reset_rope(model)
    # All settings given here: what generation_config.json says must not take part.
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=spec.generate, eos_token_id=None, pad_token_id=0
    )
    model.generation_config = config
    tokens = model.generate(input_ids, attention_mask=torch.ones_like(input_ids))
    if not torch.equal(tokens[:, input_ids.shape[1] :], generated):
        raise RuntimeError(f"{spec.name}: generate() differs from the greedy loop")


def check_composite(spec, directory, tensors):
    """The whole model, with a vision part of random weights, must give the logits of its text part."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    text = model.eval().model.language_model
    text.rotary_emb = type(text.rotary_emb)(text.config)
    with torch.no_grad():
        logits = model(tensors["input_ids"], use_cache=False).logits
    if not torch.equal(logits, tensors["logits"]):
        raise RuntimeError(f"{spec.name}: the whole model gives other logits")


def check_gates(spec, model, input_ids, generated):
    """In bf16 the gates' digits must decide: the tokens equal the ones in f32 with them, not without them."""
    kept, rounded = gate_tokens(model, input_ids, spec.generate)
    if not torch.equal(kept, generated) or torch.equal(rounded, generated):
        raise RuntimeError(f"{spec.name}: choose another seed, rounded gates give {rounded.tolist()}")


def check_margins(spec, figures):
    """A fixture whose choices hang on rounding would fail correct implementations."""
    if figures["token_gap"] < MIN_TOKEN_GAP or figures["router_gap"] < MIN_ROUTER_GAP:
        raise RuntimeError(f"{spec.name}: choose another seed, margins are {figures}")


def make(spec, out):
    """Builds, checks and writes one fixture; returns its manifest entry."""
    values = copy.deepcopy(spec.config_values())
    model = build(values, spec.dtype, spec.seed, spec.f32_gates)
    input_ids = random_ids(values["vocab_size"], spec.batch, spec.length, spec.seed)
    head = Head(values, spec.dtype, spec.seed) if spec.mtp else None
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / spec.name
        directory.mkdir()
        floats = directory
        if spec.quant:
            # transformers runs the floats that the integers mean, never the quantised checkpoint.
            write_quantised(spec, model, directory)
            floats = Path(scratch) / "floats"
            floats.mkdir()
            write_hub(model, floats, values, torch.float32, 1, spec.drop, spec.layout == "hub-packed")
        else:
            write_checkpoint(spec, model, directory)
        if head:
            add_head(spec, head, directory)
        check_round_trip(spec, model, floats, input_ids)
        tensors = make_reference(floats, input_ids, spec.generate)
        check_generate(spec, floats, input_ids, tensors["generated"])
        if head:
            tensors["mtp_logits"] = head_logits(spec, head, floats, input_ids)
        eos = spec.config.get("eos_token_id")
        if spec.name == "base" and not (tensors["generated"] == eos).any():
            raise RuntimeError(f"base: eos {eos} does not occur in {tensors['generated'].tolist()}")
        save_file(tensors, directory / "reference.safetensors")
        if spec.text:
            write_json(directory / "text_case.json", text_cases(directory, spec.generate))
        if spec.composite:
            make_composite(directory)
            check_composite(spec, directory, tensors)
        if spec.published_type:
            set_model_type(directory / "config.json", spec.published_type)
        if spec.f32_gates:
            check_gates(spec, load(directory, torch.bfloat16), input_ids, tensors["generated"])
        figures = measure(model, input_ids, spec.generate)
        check_margins(spec, figures)
        for path in directory.iterdir():
            path.chmod(0o644)  # safetensors files are created without read access for others
        target = out / spec.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(directory, target)
    return entry(spec, target, figures, tensors)


def entry(spec, directory, figures, tensors):
    """What the manifest says of a fixture."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }
    router_gap = figures["router_gap"]
    quantisation = {"quantisation": spec.quant} if spec.quant else {}
    return {
        "name": spec.name,
        "covers": spec.covers,
        "layout": spec.layout,
        **quantisation,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": spec.seed,
        "batch": spec.batch,
        "length": spec.length,
        "generate": spec.generate,
        "bf16_noise": round(tensors["bf16_noise"].item(), 5),
        "bf16_routing_flips": figures["bf16_flips"],
        # No gap where every expert is chosen.
        "min_router_gap": round(router_gap, 5) if router_gap != float("inf") else None,
        "min_token_gap": round(figures["token_gap"], 5),
        "sha256": files,
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated fixture names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    manifest_path = args.out / "MANIFEST.json"
    known = {}
    made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
    }
    if args.only and manifest_path.exists():
        # Its versions made the fixtures that stay. A fixture that another transformers makes names it.
        manifest = json.loads(manifest_path.read_text())
        known = {e["name"]: e for e in manifest["fixtures"]}
        made_with = {name: manifest[name] for name in made_with}
    for spec in by_name(args.only):
        known[spec.name] = make(spec, args.out)
        if transformers.__version__ != made_with["transformers"]:
            known[spec.name]["transformers"] = transformers.__version__
        figures = {k: v for k, v in known[spec.name].items() if k.startswith(("bf16", "min"))}
        print(spec.name, figures, flush=True)
    manifest = {
        "made_by": "tests/reference/make_fixtures.py",
        **made_with,
        "fixtures": [known[spec.name] for spec in SPECS if spec.name in known],
    }
    write_json(manifest_path, manifest)


if __name__ == "__main__":
    main()
