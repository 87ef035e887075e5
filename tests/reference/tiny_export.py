"""Turns trained weights into a checkpoint directory, and judges what was exported.

The directory is hub style (per-expert tensors, bf16). It is not done until transformers, loading it
from disk, gives the logits of the training forward pass: the model that was measured is the model
that ships.
"""

import copy
import json

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM

from tiny_checkpoints import hub_config, hub_state, write_json
from tiny_corpus import END

MAX_BYTES = 10_000_000
# f32 against f32: only summation order differs.
MAX_LOGIT_ERROR = 1e-4
GENERATION = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}


def rounded(model):
    """A copy with weights rounded to bf16 and held in f32: what the checkpoint can represent."""
    copied = copy.deepcopy(model).eval()
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


def export(model, tokenizer, directory):
    """Writes config, weights, tokenizer and generation settings; returns the weight file's size."""
    directory.mkdir(parents=True, exist_ok=True)
    packed = {name: t.bfloat16().cpu() for name, t in model.state_dict().items()}
    weights = directory / "model.safetensors"
    save_file(hub_state(packed, tied=True), weights, {"format": "pt"})
    end = tokenizer.token_to_id(END)
    values = model.config.hub_values() | {"bos_token_id": end, "eos_token_id": end}
    write_json(directory / "config.json", hub_config(values, torch.bfloat16, drop=()))
    write_json(directory / "generation_config.json", {"eos_token_id": end} | GENERATION)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END,
        "pad_token": END, "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
    }  # fmt: skip
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    size = weights.stat().st_size
    if size > MAX_BYTES:
        raise RuntimeError(f"{weights} has {size} bytes, more than {MAX_BYTES}")
    return size


@torch.no_grad()
def verify(directory, model, ids):
    """Relative logit error of the exported directory in transformers against `model`.

    The median over sequences: two f32 runs may, once in many thousand tokens, choose another expert
    where two scores are equal up to rounding, and that changes the rest of one sequence.
    """
    loaded = Qwen3MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    want = model(ids)[0]
    got = loaded.to(ids.device).eval()(ids, use_cache=False).logits
    error = ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).median().item()
    if error > MAX_LOGIT_ERROR:
        raise RuntimeError(f"{directory}: transformers differs from the training forward by {error}")
    return error


@torch.no_grad()
def held_out(model, corpus):
    """(nats per token, bits per byte, expert load [L, E]) on the held-out text.

    Windows overlap by half and only the second half is scored, so that every token after the
    very first window has at least half a context before it.
    """
    length = min(model.config.max_position_embeddings, len(corpus.held_out) - 1)
    half = length // 2
    tokens = corpus.held_out
    starts = list(range(0, len(tokens) - length, half))
    # The last window ends with the text; what it shares with the one before is scored once.
    starts.append(len(tokens) - 1 - length)
    windows = torch.stack([tokens[s : s + length + 1] for s in starts])
    total, scored_to, loads = 0.0, 0, []
    for chunk in range(0, len(windows), 16):
        rows = windows[chunk : chunk + 16]
        logits, _, load = model(rows[:, :-1])
        loads.append(load * len(rows))
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        ).view(rows.shape[0], length)
        for start, row in zip(starts[chunk : chunk + 16], losses):
            total += row[max(scored_to - start, 0) :].double().sum().item()
            scored_to = start + length
    nats = total / (len(tokens) - 1)
    bits = total / torch.log(torch.tensor(2.0)).item() / corpus.held_out_bytes
    return nats, bits, torch.stack(loads).sum(0) / len(windows)


def load_statistics(load, k):
    """Per layer: share of assignments of the least and most used expert, and effective experts."""
    share = load / k
    entropy = -(share * share.clamp_min(1e-9).log()).sum(-1)
    return [
        {"min_share": round(s.min().item(), 4), "max_share": round(s.max().item(), 4),
         "effective_experts": round(e.exp().item(), 2)}
        for s, e in zip(share, entropy)
    ]  # fmt: skip


@torch.no_grad()
def sample(model, tokenizer, prompt, count, temperature, seed=0):
    """Continuation of `prompt` by `count` tokens, recomputing the context at each step."""
    device = model.cos.device
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    start, generator = ids.shape[1], torch.Generator(device=device).manual_seed(seed)
    for _ in range(count):
        logits = model(ids[:, -model.config.max_position_embeddings :])[0][:, -1].float()
        if temperature == 0:
            next_id = logits.argmax(-1, keepdim=True)
        else:
            next_id = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat((ids, next_id), 1)
    return ids[0, start:].tolist()


def repetition(ids, n=8):
    """Share of n-grams that occurred before: 0 for text without repeats, towards 1 in a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def judge(model, tokenizer, count, prompt="First Citizen:"):
    """Samples at temperature 0 and 0.8 and how much the greedy one repeats itself."""
    greedy = sample(model, tokenizer, prompt, count, 0)
    warm = [sample(model, tokenizer, prompt, count, 0.8, seed) for seed in range(2)]
    return {
        "greedy_repetition": round(repetition(greedy), 4),
        "sampled_repetition": round(max(repetition(ids) for ids in warm), 4),
        "greedy": prompt + tokenizer.decode(greedy),
        "temperature_0.8": [prompt + tokenizer.decode(ids) for ids in warm],
    }


def finish(model, corpus, directory, record, sample_tokens):
    """Exports `model` to `directory` with training.json, verified; returns the full record."""
    model = rounded(model)
    size = export(model, corpus.tokenizer, directory)
    length = model.config.max_position_embeddings
    error = verify(directory, model, corpus.held_out[: 8 * length].view(8, length))
    nats, bits, load = held_out(model, corpus)
    record = record | {
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(bits, 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": size,
        "logit_error_against_transformers": error,
        "expert_load": load_statistics(load, model.config.num_experts_per_tok),
        "samples": judge(model, corpus.tokenizer, sample_tokens),
    }
    (directory / "training.json").write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return record
