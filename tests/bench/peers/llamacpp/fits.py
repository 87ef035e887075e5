#!/usr/bin/env python3
"""fits.py OUT.json --program P --lbench L [--full FOLDER] [--cut FOLDER --gguf FILE] [--gib 24] [--rounds 3] [--isa
NAME]: runs a quantised model on a machine whose memory it nearly fills.

--full: runs this project's program alone, in a control group with a limit of --gib (`limited.py`), and reports its peak
memory and its rates. --cut and --gguf: compares this program and llama.cpp on the same shape with fewer layers, in turn
and in such groups; llama.cpp runs both with its file mapped and with huge pages. A table of medians comes last.
README.md here says how the files are made.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

LIMITED = Path(__file__).resolve().parents[2] / "limited.py"
SETTINGS = {"mmap": ("1", {}), "huge": ("0", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})}
RATES = ("prefill512", "decode1", "decode8")


def limited(args, command, env=None):
    """Runs a command in a group; its standard output, and what `limited.py` says of its memory."""
    full = [sys.executable, str(LIMITED), str(args.gib), *command]
    done = subprocess.run(full, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode} {done.stderr[-500:]}")
    *stdout, memory = done.stdout.strip().splitlines()
    return "\n".join(stdout), json.loads(memory)


def ours(args, folder):
    out = args.out.with_suffix(".ours.json")
    flags = "--batches 1,8 --prompt 32 --output 33 --lengths 512 --log warn".split()
    isa = ["--cpu-isa", args.isa] if args.isa else []
    command = [str(args.program), "bench", "--model", str(folder), *flags, *isa, "--json", str(out)]
    _, memory = limited(args, command)
    result = json.loads(out.read_text())
    decode = result["decode"]
    rates = (result["prefill"]["512"], decode["1"]["tok_s"], decode["8"]["tok_s"])
    return {"who": f"ours {folder.name}", **dict(zip(RATES, rates)), "memory": memory, "commit": result["commit"]}


def theirs(args, setting):
    mmap, env = SETTINGS[setting]
    command = [str(args.lbench), str(args.gguf), "--mmap", mmap, "--repeat", "1", "--steps", "32"]
    stdout, memory = limited(args, command, env)
    result = json.loads(stdout)
    return {"who": f"llama.cpp {args.gguf.stem} {setting}", **{r: result[r] for r in RATES}, "memory": memory}


def table(rows):
    print(f"{'':56} runs prefill    B=1    B=8  anon+file GB")
    for who in dict.fromkeys(row["who"] for row in rows):
        runs = [row for row in rows if row["who"] == who]
        prefill, one, eight = (statistics.median(run[rate] for run in runs) for rate in RATES)
        peak = max(run["memory"]["anon"] + run["memory"]["file"] for run in runs) / 1e9
        print(f"{who:56} {len(runs):4d} {prefill:7.1f} {one:6.2f} {eight:6.2f}  {peak:6.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=lambda path: Path(path).resolve())
    for name in ("program", "lbench", "full", "cut", "gguf"):
        parser.add_argument(f"--{name}", type=lambda path: Path(path).resolve(), required=name == "program")
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", help="as --cpu-isa names it; the fastest if absent")
    args = parser.parse_args()
    if args.gguf and not args.lbench:
        parser.error("--gguf: expected --lbench, the program that runs it")
    rows = [ours(args, args.full)] if args.full else []
    for _ in range(args.rounds):
        if args.cut:
            rows.append(ours(args, args.cut))
        if args.gguf:
            rows += [theirs(args, setting) for setting in SETTINGS]
    args.out.write_text(json.dumps({"cpus": os.cpu_count(), "gib": args.gib, "rows": rows}, indent=1))
    table(rows)


if __name__ == "__main__":
    main()
