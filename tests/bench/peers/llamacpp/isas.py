#!/usr/bin/env python3
"""isas.py WORK PROGRAM CONFIG OUT.json [--cores 2,4:6,8:10,12:14,16:18,20] [--rounds N] [--limit SECONDS] [--only
int4-g32 ..] [--isas avx2 ..]: both programs on several instruction sets of one machine, each set on two cores of its
own, at the same time.

WORK holds lbench-{avx2,avx2-vnni,avx512,amx} and readbw (build.sh --isas), gguf/ and
ours/{int8-g32,int4-g32,int4-g128}. A set that the machine lacks is left out. Memory may be twice as fast in one minute
as in the next, so the programs take turns run by run: ours, llama.cpp with huge pages, ours, llama.cpp with its file
mapped, .. and ours at the end. A ratio compares a run of llama.cpp with the mean of ours before and after it. What two
threads read is measured before each run. A table of medians comes last, against the setting of llama.cpp that does
better. Runs that OUT.json holds are kept: a long measurement may be made in several calls. OUT.json is written after
each run, so that a call that is cut off loses no more than one. No round begins after the limit.
"""
import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from pathlib import Path

# The name of a path in this project, llama.cpp's build, and the flag of /proc/cpuinfo that both need.
ISAS = [
    ("avx2", "avx2", "avx2"),
    ("avx2-vnni", "avx2-vnni", "avx_vnni"),
    ("avx512-bf16", "avx512", "avx512_bf16"),
    ("avx512-dot", "avx512", "avx512_bf16"),
    ("amx-bf16", "amx", "amx_bf16"),
]
# The formats that are compared: llama.cpp's and this project's. With a name that ends in .gguf both run the same file.
FORMATS = [
    ("BF16", ["bf16", "BF16.gguf"]),
    ("Q8_0", ["int8-g32", "Q8_0.gguf"]),
    ("Q4_0", ["int4-g32", "int4-g128", "Q4_0.gguf"]),
    ("Q4_K_M", ["Q4_K_M.gguf"]),
    ("IQ4_XS", ["IQ4_XS.gguf"]),
    ("MXFP4", ["MXFP4.gguf"]),
]
CPU = Path("/proc/cpuinfo").read_text()
WRITING = threading.Lock()
SETTINGS = {"huge": ("0", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}), "mmap": ("1", {})}
RATES = ("prefill512", "decode1", "decode8")


def run(command, cores, env=None):
    start = time.time()
    done = subprocess.run(
        ["taskset", "-c", cores, *command], env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode} {done.stderr[-300:]}")
    return done.stdout, round(time.time() - start, 1)


def read_gb_s(args, cores):
    """What two threads read: the median of ten passes."""
    stdout, _ = run([str(args.work / "readbw"), "2"], cores)
    return float(stdout.split("median")[1].split()[0])


def theirs(args, build, kind, setting, cores):
    mmap, env = SETTINGS[setting]
    gguf = args.work / "gguf" / f"{args.config.stem}-{kind}.gguf"
    flags = ["--mmap", mmap, "--repeat", str(args.repeat), "--steps", str(args.steps)]
    stdout, wall = run([str(args.work / f"lbench-{build}"), str(gguf), *flags], cores, env)
    result = json.loads(stdout)
    return {"who": f"llama.cpp {kind} {setting}", **{rate: result[rate] for rate in RATES}, "wall_s": wall}


def ours(args, isa, name, cores):
    out = args.out.with_name(f"{isa}-{name}.json")
    if name == "bf16":
        weights = ["--config", str(args.config), "--dummy-weights"]
    elif name.endswith(".gguf"):
        weights = ["--model", str(args.work / "gguf" / f"{args.config.stem}-{name}")]
    else:
        weights = ["--model", str(args.work / "ours" / name)]
    flags = f"--batches 1,8 --prompt 32 --output {args.steps + 1} --lengths 512 --repeat {args.repeat}".split()
    command = [str(args.program), "bench", *weights, *flags, "--log", "warn", "--num-threads", "2"]
    _, wall = run([*command, "--cpu-isa", isa, "--json", str(out)], cores)
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


def keep(args, rows, row):
    """Adds a run to OUT.json. The file is replaced whole: a run that is stopped meanwhile leaves the one before."""
    with WRITING:
        rows.append(row)
        machine = next((line.split(":")[1].strip() for line in CPU.splitlines() if line.startswith("model name")), "?")
        result = {"machine": machine, "cpus": os.cpu_count(), "steps": args.steps, "repeat": args.repeat, "rows": rows}
        new = args.out.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1))
        new.replace(args.out)


def measure(args, isa, build, cores, rows):
    """The runs of one instruction set, format by format. A run that fails ends the runs of its format."""
    begin = time.time()
    for kind, name in ((kind, name) for kind, names in FORMATS for name in names):
        if args.only and name not in args.only:
            continue
        calls = [lambda: ours(args, isa, name, cores)]
        for setting in SETTINGS:
            calls += [lambda s=setting: theirs(args, build, kind, s, cores), calls[0]]
        # Only runs of the same call are compared with each other.
        series = f"{isa} {name} {int(time.time())}"
        try:
            for number in range(args.rounds):
                if time.time() - begin > args.limit:
                    break
                for call in calls if number == 0 else calls[1:]:
                    read = read_gb_s(args, cores)
                    row = {"isa": isa, "row": name, "series": series, "cores": cores, "two_threads_gb_s": read, **call()}
                    keep(args, rows, row)
        except (RuntimeError, OSError, KeyError, ValueError, IndexError) as error:
            keep(args, rows, {"isa": isa, "row": name, "error": str(error)[:400]})


def ratios(rows, rate):
    """Ours over llama.cpp's by setting: for each of its runs, the mean of ours before and after."""
    found = {setting: [] for setting in SETTINGS}
    for before, run, after in zip(rows, rows[1:], rows[2:]):
        if run["who"].startswith("llama") and before["series"] == after["series"]:
            mean = (before[rate] + after[rate]) / 2
            found[run["who"].split()[-1]].append(mean / run[rate])
    return found


def table(rows):
    print(f"{'':24} {'':8} {'ours':>7} {'llama':>7} {'ratio':>6} (least .. most)   runs, GB/s between, of read at B=1")
    good = [row for row in rows if "error" not in row]
    for isa, name in dict.fromkeys((row["isa"], row["row"]) for row in good):
        runs = [row for row in good if (row["isa"], row["row"]) == (isa, name)]
        ours_runs = [run for run in runs if run["who"].startswith("ours")]
        reads = sorted(run["two_threads_gb_s"] for run in runs)
        share = statistics.median(run["share_of_read"]["1"] for run in ours_runs)
        for rate in RATES:
            found = {setting: all_ for setting, all_ in ratios(runs, rate).items() if all_}
            if not found:
                continue
            setting, all_ = min(found.items(), key=lambda item: statistics.median(item[1]))
            theirs_runs = [run[rate] for run in runs if run["who"].endswith(setting)]
            medians = [statistics.median(values) for values in ([run[rate] for run in ours_runs], theirs_runs)]
            text = f"{len(all_)} {setting}, {reads[0]:.0f} to {reads[-1]:.0f}, {share:.0%}"
            spread = f"({min(all_):.2f} .. {max(all_):.2f})"
            print(f"{isa + ' ' + name:24} {rate.replace('decode', 'B='):8.8} {medians[0]:7.1f} {medians[1]:7.1f} "
                  f"{statistics.median(all_):6.2f} {spread:17} {text}")
    for error in {row["error"] for row in rows if "error" in row}:
        print("error:", error[:150])


def main():
    parser = argparse.ArgumentParser()
    for name in ("work", "program", "config", "out"):
        parser.add_argument(name, type=lambda path: Path(path).resolve())
    parser.add_argument("--cores", default="2,4:6,8:10,12:14,16:18,20")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="of each measurement within a run, which gives their median")
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--only", nargs="*", help="these formats of ours alone: bf16 int8-g32 int4-g32 int4-g128")
    parser.add_argument("--isas", nargs="*", help="these alone, as --cpu-isa names them")
    args = parser.parse_args()
    isas = [(isa, build) for isa, build, flag in ISAS if f" {flag} " in CPU and isa in (args.isas or [isa])]
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    threads = []
    for (isa, build), cores in zip(isas, args.cores.split(":")):
        thread = threading.Thread(target=measure, args=(args, isa, build, cores, rows))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    table(rows)
    raise SystemExit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
