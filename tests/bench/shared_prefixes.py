#!/usr/bin/env python3
"""What does `batch` gain where requests share the beginnings of their prompts, and does it lose where they share none?

Sends 1,000 requests, by default 50 for each of 20 prefixes of 2,000 tokens, shuffled, through `batch` on the bundled
checkpoint (with its context made longer, so its texts mean nothing). They run once in groups, as `batch` does by
default, and once as they come (`--scheduling-policy fcfs`); `--other` is another program, such as one of an earlier
commit, that runs in turn with the first. Prints a JSON object for each run; on a loaded machine its processor time
counts. `--own` gives every request a prefix of its own. `--model` is another checkpoint, `--device cuda` runs on a GPU,
where answers may depend on the batch: how many are equal is printed.

    cargo build --release -p model-moe
    tests/bench/shared_prefixes.py target/release/moe
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHECKPOINT = Path(__file__).parents[2] / "models/families/checkpoint"
FIRST_ID, IDS = 5, 2000


def write_requests(path, args):
    rng = random.Random(0)
    prefixes = [rng.choices(range(FIRST_ID, IDS), k=args.prefix_tokens) for _ in range(args.prefixes)]
    bodies = []
    for i in range(args.requests):
        own = args.prefix_tokens if args.own else 0
        prefix = rng.choices(range(FIRST_ID, IDS), k=own) if args.own else prefixes[i % args.prefixes]
        prompt = prefix + rng.choices(range(FIRST_ID, IDS), k=rng.randint(10, 50))
        tokens = rng.randint(1, 2 * args.tokens - 1) if args.lengths == "mixed" else args.tokens
        bodies.append({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
    rng.shuffle(bodies)
    with path.open("w") as file:
        for i, body in enumerate(bodies):
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run(program, folder, policy, args):
    output = folder / "out.jsonl"
    command = [program, "batch", "--model", folder / "model", "--input", folder / "in.jsonl", "--output", output]
    command += ["--kv-cache-memory", args.kv_cache_memory, "--overwrite", "--stats", "--num-threads", str(args.threads)]
    command += ["--scheduling-policy", policy, "--block-size", "16", "--device", args.device]
    start = time.monotonic()
    before = os.times().children_user
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    seconds = time.monotonic() - start
    stats = [line for line in said.splitlines() if "prompt tokens (" in line or "KV cache at most" in line]
    answers = sorted(
        (record["custom_id"], record["response"]["body"]["choices"][0]["text"])
        for record in map(json.loads, output.read_text().splitlines())
    )
    cpu = round(os.times().children_user - before, 1)
    seconds = round(seconds, 1)
    result = {"program": str(program), "policy": policy, "seconds": seconds, "cpu_seconds": cpu, "stats": stats}
    print(json.dumps(result), flush=True)
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--lengths", choices=["equal", "mixed"], default="equal")
    parser.add_argument("--kv-cache-memory", default="8MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policies", default="longest-first,fcfs")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(args.model, folder / "model")
        config = json.loads((folder / "model/config.json").read_text())
        config["max_position_embeddings"] = 4096
        (folder / "model/config.json").write_text(json.dumps(config))
        write_requests(folder / "in.jsonl", args)
        programs = [args.program] + ([args.other] if args.other else [])
        answers = None
        for _ in range(args.repeat):
            for program in programs:
                for policy in args.policies.split(","):
                    got = run(program.resolve(), folder, policy, args)
                    answers = answers or got
                    equal = sum(a == b for a, b in zip(answers, got, strict=True))
                    assert equal == len(got) or args.device != "cpu", "answers depend on the order"
                    print(f"{equal} of {len(got)} answers are those of the first run", flush=True)


if __name__ == "__main__":
    main()
