"""Runs a Qwen3-MoE or DeepSeek-V2 checkpoint through transformers and writes its `reference.safetensors`.

The file holds what the parity check compares: teacher-forced logits, per-layer hidden states and
router logits, and a greedy continuation, all computed in f32 with the plain (eager) attention and
expert loop, plus the error that transformers itself makes when it runs the checkpoint in bf16.
It works on any directory of these families:

    python make_reference.py --model DIR --out reference.safetensors
        [--batch B --length T --generate N --seed S] [--no-hidden-states]

Semantics worth knowing when an implementation is compared with it:

* Teacher forcing is one forward pass over all T positions; `generated` is one prefill of the same
  T positions followed by single-token steps with a KV cache.
* Dynamic RoPE recomputes its frequencies from the longest position of the *current call*, and
  cached keys keep the rotation they were written with. So all T teacher-forced positions share the
  frequencies of length T, and the token generated at position p is rotated with the frequencies of
  length p + 1. The rotary module remembers the longest sequence it has seen, so it is replaced by a fresh
  one before each of the two runs.
* `hidden_states.{L}` is the output of the final norm, as in transformers.
"""

import argparse
import gc
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache

from families import FAMILIES


def load(model_dir, dtype, **options):
    """Loads a checkpoint with the implementations that define the reference."""
    model_type = AutoConfig.from_pretrained(model_dir).model_type
    model = FAMILIES[model_type].model.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **options
    )
    return model.eval()


def family(model):
    """The family of a model."""
    return FAMILIES[model.config.model_type]


def reset_rope(model):
    """Forgets the longest sequence seen (dynamic RoPE) and restores f32 frequencies after a cast."""
    model.model.rotary_emb = family(model).rotary(model.config)


def gate(model, layer):
    """The router of a sparse layer."""
    return getattr(model.model.layers[layer].mlp, family(model).gate)


@torch.no_grad()
def teacher_force(model, input_ids):
    """Logits, hidden states and router logits of one pass over `input_ids`, as f32 tensors."""
    reset_rope(model)
    tensors = {}

    def record(name):
        return lambda _module, _inputs, output: tensors.update({name: output[0].float()})

    # Not every family returns its router logits, so they are taken from the gates. The file names
    # them by decoder index.
    hooks = [
        gate(model, i).register_forward_hook(record(f"router_logits.{i}"))
        for i in family(model).moe_layers(model)
    ]
    out = model(input_ids, use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    tensors["logits"] = out.logits.float()
    for i, hidden in enumerate(out.hidden_states):
        tensors[f"hidden_states.{i}"] = hidden.float()
    return tensors


@torch.no_grad()
def greedy(model, input_ids, count):
    """Exactly `count` greedy tokens per row, end of sequence ignored; also the logits of each step.

    A plain loop rather than `generate`, so that no generation setting of the checkpoint (penalties,
    eos, sampling) can take part.
    """
    reset_rope(model)
    cache = DynamicCache(config=model.config)
    step_input, tokens, steps = input_ids, [], []
    for _ in range(count):
        logits = model(step_input, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        step_input = logits.argmax(-1, keepdim=True)
        tokens.append(step_input)
        steps.append(logits.float())
    return torch.cat(tokens, 1), torch.stack(steps, 1)


def relative_error(got, want):
    """||got - want||2 / ||want||2 over a whole tensor, in f64."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item()


def bf16_noise(bf16, f32):
    """Worst relative error of the bf16 run over logits and hidden states.

    Router logits are left out: they are no output, and their effect shows in the hidden states.
    Routing in the bf16 run is free, so the figure includes experts that flip through rounding.
    """
    names = [name for name in f32 if name == "logits" or name.startswith("hidden_states.")]
    return max(relative_error(bf16[name], f32[name]) for name in names)


def random_ids(vocab_size, batch, length, seed):
    """Uniform token ids [batch, length] from a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def make_reference(model_dir, input_ids, generate, hidden_states=True):
    """All tensors of the reference file for one checkpoint directory."""
    model = load(model_dir, torch.float32)
    tensors = teacher_force(model, input_ids)
    if generate:
        tensors["generated"] = greedy(model, input_ids, generate)[0]
    del model
    gc.collect()
    model = load(model_dir, torch.bfloat16)
    noise = bf16_noise(teacher_force(model, input_ids), tensors)
    tensors["bf16_noise"] = torch.tensor([noise], dtype=torch.float32)
    tensors["input_ids"] = input_ids
    if not hidden_states:
        tensors = {name: t for name, t in tensors.items() if not name.startswith("hidden_states.")}
    return {name: t.contiguous() for name, t in tensors.items()}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--generate", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-hidden-states", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vocab_size = AutoConfig.from_pretrained(args.model).vocab_size
    input_ids = random_ids(vocab_size, args.batch, args.length, args.seed)
    tensors = make_reference(args.model, input_ids, args.generate, not args.no_hidden_states)
    save_file(tensors, args.out)
    print(f"{args.out}: {len(tensors)} tensors, bf16_noise {tensors['bf16_noise'].item():.3e}")


if __name__ == "__main__":
    main()
