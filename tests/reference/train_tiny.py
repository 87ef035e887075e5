"""Trains the small Qwen3-MoE that ships inside the binary, on one text file.

    python train_tiny.py --text corpus.txt --out DIR [--steps N --hidden H ...]

The last tenth of the text is held out. What is exported is the exponential moving average of the
weights at the evaluation with the lowest held-out loss, as DIR: model.safetensors (bf16, one tensor
per expert), config.json, tokenizer files, generation_config.json and training.json with held-out
loss, hyperparameters, expert load and samples. `--last DIR2` also exports the final average.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from tiny_corpus import Corpus
from tiny_export import finish, held_out
from tiny_model import TinyConfig, TinyQwen3Moe


def arguments():
    """Command line; every hyperparameter ends up in training.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--last", type=Path, help="also export the final average here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    model = parser.add_argument_group("architecture")
    model.add_argument("--vocab", type=int, default=2048)
    model.add_argument("--hidden", type=int, default=192)
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--experts", type=int, default=16)
    model.add_argument("--topk", type=int, default=4)
    model.add_argument("--moe-intermediate", type=int, default=112)
    model.add_argument("--heads", type=int, default=6)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--head-dim", type=int, default=32)
    model.add_argument("--context", type=int, default=512)
    train = parser.add_argument_group("training")
    train.add_argument("--batch", type=int, default=32)
    train.add_argument("--steps", type=int, default=3000)
    train.add_argument("--max-seconds", type=float, default=1e9, help="stop and export by then")
    train.add_argument("--lr", type=float, default=2e-3)
    train.add_argument("--warmup", type=int, default=100)
    train.add_argument("--weight-decay", type=float, default=0.1)
    train.add_argument("--dropout", type=float, default=0.2)
    train.add_argument("--token-dropout", type=float, default=0.0, help="inputs replaced at random")
    train.add_argument("--bpe-dropout", type=float, default=0.1)
    train.add_argument("--bpe-variants", type=int, default=24)
    train.add_argument("--plain-share", type=float, default=0.5, help="rows without BPE dropout")
    train.add_argument("--balance", type=float, default=0.01, help="load-balancing coefficient")
    train.add_argument("--ema", type=float, default=0.995)
    train.add_argument("--eval-every", type=int, default=100)
    train.add_argument("--sample-tokens", type=int, default=200)
    return parser.parse_args()


def optimizer(model, args):
    """AdamW; norms and the embedding are not decayed."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and "embed_tokens" not in name
        (decayed if is_matrix else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = args.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=fused)


def learning_rate(step, args, elapsed):
    """Linear warm-up, then a cosine down to a tenth of a percent.

    The cosine follows whichever ends first, the steps or the time: a run on a slow or shared device
    still ends annealed.
    """
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    progress = min(1.0, max(progress, elapsed / args.max_seconds))
    return args.lr * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * progress)))


class Average:
    """Exponential moving average of the weights, with a short memory at the start."""

    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model, step):
        """Moves towards the current weights."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), weight)


def train_step(model, corpus, args, optim, rate):
    """One update; returns the training loss as a device tensor, so nothing waits for it."""
    inputs, targets = corpus.batch(args.batch, args.context, args.plain_share)
    if args.token_dropout:
        noise = torch.randint_like(inputs, args.vocab)
        replaced = torch.rand(inputs.shape, device=inputs.device) < args.token_dropout
        inputs = torch.where(replaced, noise, inputs)
    for group in optim.param_groups:
        group["lr"] = rate
    device_type = args.device.split(":")[0]
    with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"):
        logits, balance, _ = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    (loss + args.balance * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)
    return loss.detach()


def train(model, corpus, args):
    """The whole run; returns (best average, final average, record)."""
    optim, average = optimizer(model, args), Average(model, args.ema)
    run = torch.compile(model) if args.compile else model
    best, best_loss, history, began = None, float("inf"), [], time.time()
    for step in range(1, args.steps + 1):
        rate = learning_rate(step - 1, args, time.time() - began)
        loss = train_step(run, corpus, args, optim, rate)
        average.update(model, step)
        out_of_time = time.time() - began > args.max_seconds
        if step % args.eval_every and step != args.steps and not out_of_time:
            continue
        nats, bits, _ = held_out(average.model, corpus)
        history.append({"step": step, "train": round(loss.item(), 4), "held_out": round(nats, 4),
                        "bits_per_byte": round(bits, 4)})  # fmt: skip
        print(json.dumps(history[-1] | {"seconds": round(time.time() - began, 1)}), flush=True)
        if nats < best_loss:
            best, best_loss, best_step = copy.deepcopy(average.model), nats, step
        if out_of_time:
            break
    record = {
        "steps": step, "best_step": best_step, "seconds": round(time.time() - began, 1),
        "train_tokens_per_epoch": corpus.train_tokens,
        "epochs": round(step * args.batch * args.context / corpus.train_tokens, 1),
        "history": history,
    }  # fmt: skip
    return best, average.model, record


def main():
    """Trains, exports and prints."""
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    text = args.text.read_text(encoding="utf-8")
    corpus = Corpus(text, args.vocab, args.bpe_dropout, args.bpe_variants, args.device)
    config = TinyConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
        num_experts=args.experts, num_experts_per_tok=args.topk,
        moe_intermediate_size=args.moe_intermediate, max_position_embeddings=args.context,
    )  # fmt: skip
    model = TinyQwen3Moe(config, args.dropout).to(args.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {corpus.train_tokens} training tokens", flush=True)
    best, final, record = train(model, corpus, args)
    # File names say nothing about the model.
    skip = {"text", "out", "last", "device", "threads"}
    record["hyperparameters"] = {k: v for k, v in vars(args).items() if k not in skip}
    record = {"torch": torch.__version__, "transformers": transformers.__version__} | record
    exports = [(best, args.out)] + ([(final, args.last)] if args.last else [])
    for weights, directory in exports:
        done = finish(weights, corpus, directory, record, args.sample_tokens)
        print(f"== {directory.name}: {done['held_out_nats_per_token']} nats/token, "
              f"{done['held_out_bits_per_byte']} bits/byte, {done['weight_bytes']} bytes, "
              f"greedy repetition {done['samples']['greedy_repetition']}")  # fmt: skip
        print(done["samples"]["greedy"], *done["samples"]["temperature_0.8"], sep="\n--\n", flush=True)


if __name__ == "__main__":
    main()
