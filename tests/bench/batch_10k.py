#!/usr/bin/env python3
"""Does a long batch keep its speed and its memory?
Sends many short requests through `batch` on the bundled checkpoint, several times, and prints figures for each thousand
answers as JSON. Requests start in the order of the file. By default the longest would start first; the last thousand
answers would then be short ones, and their rate would say nothing about speed. The script fails if memory after the
warm-up (2,000 answers) grows by more than 1 % in any run. It also fails if, in the median of the runs, the last
thousand answers come more than 10 % faster or slower than the first thousand.
While the first thousand answers are completed, other requests begin too. When the last thousand are counted, some of
their work has already been done. So with n sequences at once, a steady speed shows as a ratio of (1,000 + n / 2) /
(1,000 - n / 2), which is 1.07 for the default 64. The script also prints new tokens per second, which count a token
when it is sampled, and answers per second of processor time, which distinguish a loaded machine from a program that
slows down.
    cargo build --release -p model-moe
    tests/bench/batch_10k.py target/release/moe
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUP = 1000
WARM_UP = 2 * GROUP
MAX_GROWTH = 0.01
MAX_DRIFT = 0.10
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


def cpu_seconds(pid):
    """Processor time of all threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return None


def watch(process, output):
    """(time, answers, resident MiB, processor time) every few milliseconds, to the end."""
    answers, seen, mib, cpu = 0, [], 0.0, 0.0
    with output.open("rb") as file:
        while True:
            ended = process.poll() is not None
            answers += file.read().count(b"\n")
            mib, cpu = resident_mib(process.pid) or mib, cpu_seconds(process.pid) or cpu
            seen.append((time.monotonic(), answers, mib, cpu))
            if ended:
                return seen
            time.sleep(0.01)


def run(binary, source, folder, count, flags):
    output = Path(folder, "out.jsonl")
    output.write_bytes(b"")
    command = [binary, "batch", "--input", source, "--output", output, "--log", "warn", "--scheduling-policy", "fcfs", *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    seen = watch(process, output)
    if process.returncode != 0 or seen[-1][1] != count:
        sys.exit(f"{command} ended with {process.returncode} after {seen[-1][1]} of {count} answers")
    return seen


def sampled(profile, parts=10):
    """New tokens per second of each tenth of the tokens."""
    events = sorted(json.loads(profile.read_text()), key=lambda e: e.get("ts", 0))
    start = next(e["ts"] for e in events if e["name"] == "step")
    samples = [(e["ts"] + e["dur"], e["args"]["rows"]) for e in events if e["name"] == "sample"]
    total, done, edges = sum(rows for _, rows in samples), 0, [(start, 0)]
    for end, rows in samples:
        done += rows
        if done * parts >= total * len(edges):
            edges.append((end, done))
    return [round(1e6 * (b[1] - a[1]) / (b[0] - a[0])) for a, b in zip(edges, edges[1:])]


def summary(seen, count):
    # Counting starts at the first answers, because the time before them is the start of the program. Several answers
    # arrive at a time, so a thousand answers are counted between the moments at or after their ends.
    moments = [now for now, before in zip(seen[1:], seen) if now[1] > before[1]]
    speeds, by_cpu = [], []
    for first in range(0, count, GROUP):
        begin = next(m for m in moments if m[1] >= first)
        end = next(m for m in moments if m[1] >= first + GROUP)
        speeds.append((end[1] - begin[1]) / (end[0] - begin[0]))
        by_cpu.append((end[1] - begin[1]) / (end[3] - begin[3]))
    peak = lambda limit: max(mib for _, n, mib, _ in seen if n <= limit)
    return {
        "answers_s_by_thousand": [round(speed, 1) for speed in speeds],
        "last_to_first": round(speeds[-1] / speeds[0], 4),
        "answers_cpu_s_by_thousand": [round(speed, 1) for speed in by_cpu],
        "last_to_first_by_cpu_s": round(by_cpu[-1] / by_cpu[0], 4),
        "rss_mib_by_thousand": [round(peak(n), 1) for n in range(GROUP, count + 1, GROUP)],
        "rss_growth_after_warm_up": round(peak(count) / peak(WARM_UP) - 1, 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--requests", type=int, default=10 * GROUP)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.requests < 3 * GROUP or args.requests % GROUP:
        parser.error(f"--requests: expected a multiple of {GROUP} from {3 * GROUP} on")
    if args.runs < 1:
        parser.error("--runs: expected at least 1")
    with tempfile.TemporaryDirectory() as folder:
        source, profile = Path(folder, "in.jsonl"), Path(folder, "profile.json")
        write_requests(source, args.requests)
        load = os.getloadavg()
        runs = [summary(run(args.binary, source, folder, args.requests, []), args.requests) for _ in range(args.runs)]
        run(args.binary, source, folder, args.requests, ["--profile", profile])
        tokens = sampled(profile)
    drift, growth = statistics.median(r["last_to_first"] for r in runs), max(r["rss_growth_after_warm_up"] for r in runs)
    failures = []
    if growth > MAX_GROWTH:
        failures.append(f"memory grows by {100 * growth:.1f} %")
    if abs(drift - 1) > MAX_DRIFT:
        failures.append(f"the last thousand answers at {drift:.2f} of the first's speed")
    result = {
        "requests": args.requests,
        "load_average": load,
        "last_to_first": drift,
        "new_tok_s_by_tenth": tokens,
        "runs": runs,
        "failures": failures,
        "passed": not failures,
    }
    print(json.dumps(result, indent=2))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
