#!/usr/bin/env python3
"""measure.py WORK PROGRAM CONFIG OUT.jsonl FORMAT,.. [SETTING,.. [FOLDER]]: llama.cpp and ours in turn.

For each format of llama.cpp (its settings one after the other), then ours. Each run waits until the machine is idle and
notes the CPU time that others took meanwhile: above 3 s a run is not to be used. Settings: mmap, nommap, huge (huge
pages through glibc's malloc), norepack, fa0. WORK is what build.sh made. FOLDER is a checkpoint of the config for ours,
as `cargo xtask random-checkpoint` writes one; without it ours has random weights in the config's dtype.
"""
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = {
    "mmap": (["--mmap", "1"], {}),
    "nommap": (["--mmap", "0"], {}),
    "huge": (["--mmap", "0"], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "norepack": (["--mmap", "1", "--repack", "0"], {}),
    "fa0": (["--mmap", "1", "--fa", "0"], {}),
}


def cpu_seconds():
    """Busy and total CPU seconds of the machine so far."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    rate = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / rate, sum(ticks) / rate


def wait_until_idle():
    while True:
        (busy, total), _ = cpu_seconds(), time.sleep(3)
        busy_after, total_after = cpu_seconds()
        share = (busy_after - busy) / (total_after - total)
        if share < 0.02:
            return
        print(f"waiting: {share:.0%} busy", flush=True)


def run(command, env):
    wait_until_idle()
    own, (busy, _), start = resource.getrusage(resource.RUSAGE_CHILDREN), cpu_seconds(), time.time()
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    own_after, (busy_after, _) = resource.getrusage(resource.RUSAGE_CHILDREN), cpu_seconds()
    used = own_after.ru_utime + own_after.ru_stime - own.ru_utime - own.ru_stime
    meta = {
        "command": " ".join(command),
        "env": env,
        "at": time.strftime("%H:%M:%S"),
        "wall_s": round(time.time() - start, 1),
        "other_cpu_s": round(busy_after - busy - used, 2),
    }
    if done.returncode != 0:
        sys.exit(f"{meta['command']}: {done.stderr[-500:]}")
    return done.stdout, meta


def theirs(work, stem, kind, setting):
    args, env = SETTINGS[setting]
    stdout, meta = run([str(work / "lbench"), str(work / "gguf" / f"{stem}-{kind}.gguf"), *args], env)
    result = json.loads(stdout)
    rates = {name: result[name] for name in ("prefill512", "decode1", "decode8")}
    return {"who": f"llama.cpp {kind}", "set": setting, **rates, "meta": meta}


def ours(work, program, config, folder):
    out = work / "ours.json"
    weights = ["--model", str(folder)] if folder else ["--config", str(config), "--dummy-weights"]
    flags = "--batches 1,8 --prompt 32 --output 33 --lengths 512 --log warn".split()
    _, meta = run([program, "bench", *weights, *flags, "--json", str(out)], {})
    result = json.loads(out.read_text())
    roofline = result["roofline"]
    return {
        "who": f"ours {folder.name if folder else result['dtype']} {result['cpu_isa']}",
        "prefill512": result["prefill"]["512"],
        "decode1": result["decode"]["1"]["tok_s"],
        "decode8": result["decode"]["8"]["tok_s"],
        "read_gb_s": roofline["read_gb_s"],
        "share_of_read": {b: roofline["decode"][b]["fraction"] for b in ("1", "8")},
        "meta": meta,
    }


def main():
    work, program, config, out = (Path(arg).resolve() for arg in sys.argv[1:5])
    kinds = sys.argv[5].split(",")
    settings = sys.argv[6].split(",") if len(sys.argv) > 6 else ["mmap", "huge"]
    folder = Path(sys.argv[7]) if len(sys.argv) > 7 else None
    for kind in kinds:
        rows = [lambda s=s: theirs(work, config.stem, kind, s) for s in settings]
        for row in [*rows, lambda: ours(work, str(program), config, folder)]:
            result = row()
            print({name: value for name, value in result.items() if name != "meta"}, flush=True)
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
