#!/usr/bin/env python3
"""Does a long batch keep its speed and its memory?

Sends many short requests through `batch` on the bundled checkpoint and prints, as JSON, the new
tokens per second of each tenth of the run and the resident memory over time. Tokens count when they
are drawn (from `--profile`), not when their request is answered: the last answers are the ends of
what was begun before. It passes if the first and the last tenth are within 10 % of each other and
memory has stopped growing after 2,000 requests.

    cargo build --release -p model-qwen3moe
    tests/bench/batch_10k.py target/release/model-qwen3moe
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUP = 1000
# The prefix cache touches one KV block after the other until it has used them all; this many are
# used up within the warm-up, so that whatever grows later is a leak.
KV_CACHE = "32MiB"
# What remains is the table of custom_ids, 25 to 50 bytes a request, and the allocator's noise.
MAX_GROWTH = 1.04
WORDS = "the king queen love death night day sword crown heart eyes father daughter speak come go what who".split()


def write_requests(path, count):
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(4, 24)))
            body = {"prompt": prompt, "max_tokens": rng.randint(8, 24), "ignore_eos": True}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def resident_mib(pid):
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except FileNotFoundError:
        pass
    return None


def watch(process, output, every):
    """Number of answers, and memory by that number."""
    answers, memory = 0, []
    with output.open("rb") as file:
        while True:
            ended = process.poll() is not None
            answers += file.read().count(b"\n")
            mib = resident_mib(process.pid)
            if mib is not None:
                memory.append((answers, mib))
            if ended:
                return answers, memory
            time.sleep(every)


def rates(profile, parts=10):
    """Tokens per second of each tenth of the tokens, from the first step to the last draw."""
    events = sorted(json.loads(profile.read_text()), key=lambda e: e.get("ts", 0))
    start = next(e["ts"] for e in events if e["name"] == "step")
    draws = [(e["ts"] + e["dur"], e["args"]["rows"]) for e in events if e["name"] == "sample"]
    total, done, edges = sum(rows for _, rows in draws), 0, [(start, 0)]
    for end, rows in draws:
        done += rows
        if done * parts >= total * len(edges):
            edges.append((end, done))
    return [1e6 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(edges, edges[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("flags", nargs="*", help="further flags of batch, after --")
    args = parser.parse_args()
    if args.requests < 3 * GROUP:
        parser.error(f"--requests: expected at least {3 * GROUP}")
    with tempfile.TemporaryDirectory() as folder:
        source, output, profile = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "profile.json"))
        write_requests(source, args.requests)
        output.touch()
        command = [args.binary, "batch", "--input", source, "--output", output, "--log", "warn"]
        command += ["--kv-cache-memory", KV_CACHE, "--profile", profile, *args.flags]
        load = os.getloadavg()
        process = subprocess.Popen(command)
        answers, memory = watch(process, output, every=0.05)
        if process.returncode != 0 or answers != args.requests:
            sys.exit(f"batch ended with {process.returncode} after {answers} of {args.requests} answers")
        speeds = rates(profile)
    at = lambda count: max(mib for done, mib in memory if done <= count)
    warm, peak = at(2 * GROUP), max(mib for _, mib in memory)
    ratio = speeds[-1] / speeds[0]
    result = {
        "requests": args.requests,
        "load_average": load,
        "tok_s_by_tenth": [round(speed, 1) for speed in speeds],
        "last_to_first": round(ratio, 4),
        "rss_mib_by_thousand": [round(at(count), 1) for count in range(GROUP, args.requests + 1, GROUP)],
        "rss_growth_after_warm_up": round(peak / warm - 1, 4),
        "passed": abs(ratio - 1) <= 0.1 and peak <= warm * MAX_GROWTH,
    }
    print(json.dumps(result, indent=2))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
