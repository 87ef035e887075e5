"""Fills a GPU with KV cache: long prompts with log-probabilities, together with texts that follow a regular expression.

  python full_card.py BINARY [--device cuda] [--layers 2] [--prompt 16000] [--texts 100] [--gpu-memory 9GB]
  [--flags="--tp 2"]
      [--dir /tmp/full-card]

The script writes a random checkpoint with the sizes of Qwen3-30B-A3B but few layers. It keeps the whole vocabulary, so
that a step of 8,192 rows would have 5 GB of logits. It needs torch and safetensors. Then it runs a batch of both kinds
of requests with --gpu-memory. No request may fail, and every answer must contain what its request asked for. The memory
in use on every GPU of the machine must stay within the limit, so nothing else may run there. The script then repeats
the batch in small steps. With --batch-invariant the log-probabilities and texts must be the same to the last digit.
FLAGS, such as a number of ranks, exclude --batch-invariant; the results may then differ by rounding. The script prints
a row per check, and exits with 1 if one fails.
"""
import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "bench/configs/qwen3-30b-a3b.json"
TOKENIZER = ROOT / "fixtures/text"
PATTERN = "[a-z]{24}"


def write_checkpoint(folder, layers, device):
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers}
    hidden, heads, kv_heads, dim = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    width, experts, vocabulary = (config[k] for k in ("moe_intermediate_size", "num_experts", "vocab_size"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    torch.manual_seed(0)

    def matrix(*dims):
        return torch.randn(dims, device=device, dtype=torch.bfloat16).mul_(dims[-1] ** -0.5).cpu()

    def norm(size):
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "lm_head.weight": matrix(vocabulary, hidden), "model.norm.weight": norm(hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        attention = {"q_proj": (heads * dim, hidden), "k_proj": (kv_heads * dim, hidden), "v_proj": (kv_heads * dim, hidden), "o_proj": (hidden, heads * dim)}
        tensors |= {f"{at}.self_attn.{name}.weight": matrix(*dims) for name, dims in attention.items()}
        tensors |= {f"{at}.self_attn.{name}.weight": norm(dim) for name in ("q_norm", "k_norm")}
        tensors |= {f"{at}.{name}.weight": norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors[f"{at}.mlp.gate.weight"] = matrix(experts, hidden)
        for expert in range(experts):
            parts = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
            tensors |= {f"{at}.mlp.experts.{expert}.{name}.weight": matrix(*dims) for name, dims in parts.items()}
    save_file(tensors, folder / "model.safetensors")


def write_requests(file, length, long, texts):
    """`long` prompts of `length` tokens with log-probabilities, then `texts` requests of a regular expression; the
    prompts."""
    rng = random.Random(1)
    bodies = [{"prompt": [rng.randrange(50) for _ in range(length)], "max_tokens": 4, "temperature": 0, "prompt_logprobs": 3} for _ in range(long)]
    bodies += [{"prompt": [rng.randrange(50) for _ in range(rng.randrange(1, 200))], "max_tokens": 40, "temperature": 1, "seed": i,
                "structured_outputs": {"regex": PATTERN}} for i in range(texts)]
    lines = ({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [body["prompt"] for body in bodies]


def most_memory(stop, most):
    """Puts the most memory in use on any card, in MiB, into `most` until `stop` is set."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while not stop.wait(0.1):
        most += map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def run(args, name, *flags):
    """The answers by their custom_id, the most memory of the card meanwhile, and the seconds of the whole run."""
    answers, errors = args.dir / f"{name}.jsonl", args.dir / f"{name}.errors.jsonl"
    for file in (answers, errors):
        file.unlink(missing_ok=True)
    command = [args.binary, "batch", "--input", str(args.dir / "requests.jsonl"), "--output", str(answers), "--model", str(args.dir), "--device", args.device,
               "--dtype", "bf16", "--log", "error", *flags]
    stop, most = threading.Event(), [0]
    if args.device != "cpu":
        threading.Thread(target=most_memory, args=(stop, most), daemon=True).start()
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - start
    stop.set()
    if done.returncode != 0:
        print(done.stderr[-800:])
    return {line["custom_id"]: line for line in answered_lines(answers)}, max(most), seconds


def answered_lines(file):
    """The answers of a batch; none without the file. Only a line end splits them: str.splitlines splits at U+2028,
    too."""
    if not file.exists():
        return []
    with file.open() as lines:
        return [json.loads(line) for line in lines]


def choice(answer):
    return (answer["response"]["body"] or {}).get("choices", [{}])[0]


def differences(prompt, large, small):
    """The differences between two answers' log-probabilities of the prompt's tokens."""
    own = ([entry[str(token)]["logprob"] for entry in pair] for token, *pair in zip(prompt, large, small) if all(pair))
    return [abs(a - b) for a, b in own]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--gpu-memory", default="9GB")
    parser.add_argument("--flags", type=str.split, default=[])
    parser.add_argument("--dir", type=Path, default=Path("/tmp/full-card"))
    args = parser.parse_args()
    long, texts, failed = 3, args.texts, False
    write_checkpoint(args.dir, args.layers, args.device)
    prompts = write_requests(args.dir / "requests.jsonl", args.prompt, long, texts)

    def check(passed, text):
        nonlocal failed
        failed |= not passed
        print("ok     " if passed else "FAILED ", text, flush=True)

    limit = ["--gpu-memory", args.gpu_memory] if args.device != "cpu" else []
    answers, most, seconds = run(args, "full", "--max-num-batched-tokens", "8192", *limit, *args.flags)
    good = sum(answer["response"]["status_code"] == 200 for answer in answers.values())
    check(good == long + texts, f"{good} of {long + texts} requests answered in {seconds:.1f} s")
    fitting = sum(bool(re.fullmatch(PATTERN, choice(answer).get("text", ""))) for i, answer in answers.items() if int(i) >= long)
    check(fitting == texts, f"{fitting} of {texts} texts fit the regular expression")
    exact = args.flags or ["--batch-invariant"]
    # The texts are compared too, because rows of both kinds have the same bits, whatever else is in their step.
    of_rows = [run(args, f"steps-{rows}", "--max-num-batched-tokens", rows, *limit, *exact)[0] for rows in ("8192", "512")]
    for i in range(long):
        found = (choice(answered[str(i)]).get("prompt_logprobs") or [] if str(i) in answered else [] for answered in of_rows)
        different = differences(prompts[i], *found)
        mean, largest = sum(different) / max(len(different), 1), max(different, default=0)
        passed = len(different) == args.prompt - 1 and (mean < 0.05 if args.flags else largest == 0)
        check(passed, f"prompt {i}: {len(different)} log-probabilities; in small steps they differ by {mean:.4f}, at most {largest:.3f}")
    if not args.flags:
        large, small = ({i: choice(answer)["text"] for i, answer in answered.items()} for answered in of_rows)
        equal = sum(text == small.get(i) for i, text in large.items())
        check(equal == long + texts, f"{equal} of {long + texts} texts are the same in small steps")
    if limit:
        allowed = float(args.gpu_memory.removesuffix("GB")) * 1e9 / 2**20
        check(0 < most <= allowed, f"{most} MiB of the card in use at most, of {allowed:.0f}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
