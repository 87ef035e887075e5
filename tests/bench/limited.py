#!/usr/bin/env python3
"""limited.py GIB COMMAND ..: runs a command in a control group of GIB gibibytes and prints what memory it took, as JSON.

The group (as root; cgroup 2, or the memory controller of cgroup 1) is what a machine of that size is: anonymous memory cannot pass it, and pages of files that
the command maps or reads count, but are given back under pressure. Without control groups the command runs unlimited,
and `limit` is null. `peak_rss` is the most that lay in the process's own pages (VmHWM: anonymous and mapped files
together), `anon` and `file` are their parts at the sample, taken every 20 ms, at which the sum was largest; `peak_group`
counts the page cache, too. All in bytes.
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
