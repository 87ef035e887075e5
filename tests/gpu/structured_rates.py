"""Measures the rates of texts with and without structured output, for 8 and 256 sequences at once.

  python structured_rates.py BINARY [--device cuda] [--layers 24] [--flags="--tp 2"] [--dir /dev/shm/structured-rates]

The script writes a random checkpoint with the sizes of Qwen3-30B-A3B and the given number of layers, at 1.3 GB each
(see full_card.py). It runs `batch --stats` with prompts of 128 tokens and 128 new tokens each, and ignores the end of
sequence. The texts are free, follow a regular expression, or follow a JSON schema with one long string. It prints a row
per run with the new tokens per second and the median time between tokens, and exits with 1 if a run fails.
"""
import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

from full_card import answered_lines, write_checkpoint

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "minLength": 400}, "age": {"type": "integer"}}, "required": ["name", "age"]}
KINDS = {
    "free": {},
    "regex": {"structured_outputs": {"regex": "[a-z ]{600}"}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
}


def write_requests(file, count, more):
    rng = random.Random(3)
    common = {"max_tokens": 128, "temperature": 1, "ignore_eos": True}
    bodies = [{"prompt": [rng.randrange(50) for _ in range(128)], "seed": i} | common | more for i in range(count)]
    lines = ({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rates(args, count, kind):
    """New tokens a second and milliseconds between tokens; None if the run fails or a request does."""
    requests, answers = args.dir / "requests.jsonl", args.dir / "answers.jsonl"
    write_requests(requests, count, KINDS[kind])
    answers.unlink(missing_ok=True)
    command = [args.binary, "batch", "--input", str(requests), "--output", str(answers), "--model", str(args.dir), "--device", args.device,
               "--dtype", "bf16", "--stats", "--log", "error", "--max-num-seqs", "256", *args.flags]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [re.search(pattern, done.stderr) for pattern in (r"([\d.]+) new tok/s", r"token to token: ([\d.]+) ms")]
    lines = answered_lines(answers)
    answered = sum(line["response"]["status_code"] == 200 for line in lines)
    if done.returncode != 0 or answered != count or not all(found):
        print(done.stderr[-800:])
        return None
    return [float(match[1]) for match in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--flags", type=str.split, default=[])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/structured-rates"))
    args = parser.parse_args()
    write_checkpoint(args.dir, args.layers, args.device)
    failed = False
    for count in (8, 256):
        for kind in KINDS:
            found = rates(args, count, kind)
            failed |= found is None
            print(f"{count:3} {kind:5}", f"{found[0]:.0f} new tok/s, {found[1]} ms between tokens" if found else "FAILED", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
