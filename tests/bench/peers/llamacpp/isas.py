#!/usr/bin/env python3
"""isas.py WORK PROGRAM CONFIG OUT.json [--cores 2,4:6,8:10,12:14,16:18,20] [--rounds N] [--limit SECONDS] [--only Q4_0 ..] [--isas avx2 ..]: both
programs on several instruction sets of one machine, each set on two cores of its own, at the same time.

WORK holds lbench-{avx2,avx2-vnni,avx512,amx} (build.sh --isas), gguf/ and ours/{int8-g32,int4-g32,int4-g128}. A set that the
machine lacks is left out. Within a set the runs are in turn and rounds interleave, so that what the machine does besides
meets both programs; a table of medians comes last. No round begins after the limit.
"""
import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from pathlib import Path

# Our name of a path, llama.cpp's build, and the flag of /proc/cpuinfo that both need.
ISAS = [
    ("avx2", "avx2", "avx2"),
    ("avx2-vnni", "avx2-vnni", "avx_vnni"),
    ("avx512-bf16", "avx512", "avx512_bf16"),
    ("avx512-dot", "avx512", "avx512_bf16"),
    ("amx-bf16", "amx", "amx_bf16"),
]
# What is compared: llama.cpp's format and ours.
FORMATS = [("BF16", ["bf16"]), ("Q8_0", ["int8-g32"]), ("Q4_0", ["int4-g32", "int4-g128"])]
SETTINGS = {"mmap": ("1", {}), "huge": ("0", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})}
RATES = ("prefill512", "decode1", "decode8")


def run(command, cores, env):
    start = time.time()
    done = subprocess.run(
        ["taskset", "-c", cores, *command], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode} {done.stderr[-300:]}")
    return done.stdout, round(time.time() - start, 1)


def theirs(args, build, kind, setting, cores):
    mmap, env = SETTINGS[setting]
    gguf = args.work / "gguf" / f"{args.config.stem}-{kind}.gguf"
    flags = ["--mmap", mmap, "--repeat", "1", "--steps", str(args.steps)]
    stdout, wall = run([str(args.work / f"lbench-{build}"), str(gguf), *flags], cores, env)
    result = json.loads(stdout)
    return {"who": f"llama.cpp {kind} {setting}", **{rate: result[rate] for rate in RATES}, "wall_s": wall}


def ours(args, isa, name, cores):
    out = args.out.with_name(f"{isa}-{name}.json")
    folder = args.work / "ours" / name
    weights = ["--config", str(args.config), "--dummy-weights"] if name == "bf16" else ["--model", str(folder)]
    flags = f"--batches 1,8 --prompt 32 --output {args.steps + 1} --lengths 512 --log warn --num-threads 2".split()
    command = [str(args.program), "bench", *weights, *flags, "--cpu-isa", isa, "--json", str(out)]
    _, wall = run(command, cores, {})
    result = json.loads(out.read_text())
    roof, decode = result["roofline"], result["decode"]
    return {
        "who": f"ours {name}",
        "prefill512": result["prefill"]["512"],
        "decode1": decode["1"]["tok_s"],
        "decode8": decode["8"]["tok_s"],
        "read_gb_s": roof["read_gb_s"],
        "share_of_read": {b: roof["decode"][b]["fraction"] for b in ("1", "8")},
        "experts8": result["distinct_experts"]["8"]["mean"],
        "wall_s": wall,
        "commit": result["commit"],
    }


def measure(args, isa, build, cores, rows):
    begin = time.time()
    for number in range(args.rounds):
        if time.time() - begin > args.limit:
            break
        for kind, names in FORMATS:
            if args.only and kind not in args.only:
                continue
            calls = [lambda n=n: ours(args, isa, n, cores) for n in names]
            calls += [lambda s=s, k=kind: theirs(args, build, k, s, cores) for s in SETTINGS]
            for call in calls:
                try:
                    rows.append({"isa": isa, "cores": cores, "round": number, **call()})
                except (RuntimeError, OSError, KeyError, ValueError) as error:
                    rows.append({"isa": isa, "round": number, "error": str(error)[:400]})


def table(rows):
    groups = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault((row["isa"], row["who"]), []).append(row)
    print(f"{'':40} runs prefill    B=1    B=8   of read at 1")
    for (isa, who), runs in sorted(groups.items()):
        median = [statistics.median(run[rate] for run in runs) for rate in RATES]
        share = [run["share_of_read"]["1"] for run in runs if "share_of_read" in run]
        text = f"{statistics.median(share):.0%} of {runs[0]['read_gb_s']:.0f} GB/s" if share else ""
        print(f"{isa + ' ' + who:40} {len(runs):4d} {median[0]:7.1f} {median[1]:6.1f} {median[2]:6.1f}   {text}")
    for error in {row["error"] for row in rows if "error" in row}:
        print("error:", error[:150])


def main():
    parser = argparse.ArgumentParser()
    for name in ("work", "program", "config", "out"):
        parser.add_argument(name, type=lambda path: Path(path).resolve())
    parser.add_argument("--cores", default="2,4:6,8:10,12:14,16:18,20")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--isas", nargs="*", help="these alone, as --cpu-isa names them")
    args = parser.parse_args()
    cpu = Path("/proc/cpuinfo").read_text()
    isas = [(isa, build) for isa, build, flag in ISAS if f" {flag} " in cpu and isa in (args.isas or [isa])]
    rows, threads = [], []
    for (isa, build), cores in zip(isas, args.cores.split(":")):
        thread = threading.Thread(target=measure, args=(args, isa, build, cores, rows))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    machine = next((line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")), "?")
    result = {"machine": machine, "cpus": os.cpu_count(), "steps": args.steps, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1))
    table(rows)
    raise SystemExit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
