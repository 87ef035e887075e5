#!/usr/bin/env python3
"""limited.py GIB COMMAND ..: runs a command in a control group of GIB gibibytes, and prints as JSON how much memory it
used.
The control group (which needs root; cgroup 2, or the memory controller of cgroup 1) behaves like a machine with that
much memory. Anonymous memory cannot exceed the limit. Pages of files that the command maps or reads count too, but the
system reclaims them when memory is short. Without control groups the command runs unlimited, and `limit` is null.
All figures are in bytes. `peak_rss` is the largest size of the process's own pages (VmHWM: anonymous memory and mapped
files together). Memory is sampled every 20 ms; `anon` and `file` are the parts at the sample with the largest sum.
`peak_group` also counts the page cache.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
IS_V2 = (ROOT / "cgroup.controllers").exists()
LIMIT, PEAK = ("memory.max", "memory.peak") if IS_V2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")


def group(limit):
    """A control group with a limit, or None where there are none."""
    path = (ROOT if IS_V2 else ROOT / "memory") / f"limited-{os.getpid()}"
    try:
        if IS_V2:
            (ROOT / "cgroup.subtree_control").write_text("+memory")
        path.mkdir()
        with (path / LIMIT).open("r+") as file:
            file.write(str(limit))
    except OSError as error:
        print(f"no control group: {error}", file=sys.stderr)
        return None
    return path


def memory(pid):
    """VmHWM, RssAnon and RssFile of a process, in bytes; nothing once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile") if name in fields}


def main():
    limit = int(float(sys.argv[1]) * 2**30)
    path = group(limit)

    def enter():
        if path:
            (path / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.Popen(sys.argv[2:], preexec_fn=enter)
    peak, most = 0, (0, 0)
    while child.poll() is None:
        now = memory(child.pid)
        peak = max(peak, now.get("VmHWM", 0))
        most = max(most, (now.get("RssAnon", 0), now.get("RssFile", 0)), key=sum)
        time.sleep(0.02)
    result = {"limit": limit if path else None, "peak_rss": peak, "anon": most[0], "file": most[1]}
    if path:
        result["peak_group"] = int((path / PEAK).read_text())
        path.rmdir()
    result["exit"] = child.returncode
    print(json.dumps(result))
    sys.exit(child.returncode)


if __name__ == "__main__":
    main()
