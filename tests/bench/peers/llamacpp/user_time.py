#!/usr/bin/env python3
"""user_time.py WORK CONFIG OUT.json PROGRAM.. [--isas avx2 ..] [--only Q4_0 ..] [--rounds N]: compares the processor
time of a prefill of 512 tokens in this project and in llama.cpp, on a machine that also does other work.
The figure is the user seconds of one thread: the difference between runs with 5 prefills and runs with 1, divided by 4.
If there are several programs, they are versions of this project's program. All programs take turns in every round. A
table of medians comes last. WORK is the same folder as for isas.py.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
from pathlib import Path

from isas import FORMATS, ISAS

FEW, MANY = 1, 5


def user_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode} {done.stderr[-300:]}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def prefill(command):
    many, few = (user_seconds([*command, str(repeat)]) for repeat in (MANY, FEW))
    return (many - few) / (MANY - FEW)


def ours(args, program, isa, name):
    weights = ["--config", str(args.config), "--dummy-weights"] if name == "bf16" else ["--model", str(args.work / "ours" / name)]
    flags = "--batches 1 --prompt 2 --output 2 --lengths 512 --log error --num-threads 1".split()
    return [str(program), "bench", *weights, *flags, "--cpu-isa", isa, "--json", os.devnull, "--repeat"]


def theirs(args, build, kind):
    gguf = args.work / "gguf" / f"{args.config.stem}-{kind}.gguf"
    return [str(args.work / f"lbench-{build}"), str(gguf), *"--mmap 0 --steps 1 --threads 1 --repeat".split()]


def main():
    parser = argparse.ArgumentParser()
    for name in ("work", "config", "out"):
        parser.add_argument(name, type=lambda path: Path(path).resolve())
    parser.add_argument("programs", nargs="+", type=lambda path: Path(path).resolve())
    parser.add_argument("--isas", nargs="*", default=["avx2"])
    parser.add_argument("--only", nargs="*", help="these formats of llama.cpp and ours next to them")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for number in range(args.rounds):
        for isa, build, _ in ISAS:
            for kind, names in FORMATS if isa in args.isas else []:
                if args.only and kind not in args.only:
                    continue
                calls = [(f"{p.name} {n}", ours(args, p, isa, n)) for n in names for p in args.programs]
                if (args.work / f"lbench-{build}").exists():
                    calls.append((f"llama.cpp {kind}", theirs(args, build, kind)))
                for who, command in calls:
                    rows.append({"isa": isa, "who": who, "round": number, "user_s": round(prefill(command), 4)})
                    args.out.write_text(json.dumps({"threads": 1, "rows": rows}, indent=1))
    groups = {}
    for row in rows:
        groups.setdefault(f"{row['isa']} {row['who']}", []).append(row["user_s"])
    for who, seconds in groups.items():
        print(f"{who:50} {statistics.median(seconds):.3f} user s   {seconds}")


if __name__ == "__main__":
    main()
