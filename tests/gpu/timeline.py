"""What a profile of decode steps says: python timeline.py PROFILE BATCH.

Of the longest run of replayed graphs of that batch: the host's work, the device's time and the gap between steps.
"""

import json
import statistics
import sys

DEVICE_ROW = 1000
WORK, WAIT = ("schedule", "step", "collect"), "wait"


def longest_run(device, batch):
    """The most device steps of `batch` rows that follow each other and each replay a graph."""
    graphs = [e["ts"] for e in device if e["name"] == "graph"]
    run, longest = [], []
    for step in sorted((e for e in device if e["name"] == "step"), key=lambda e: e["ts"]):
        end = step["ts"] + step["dur"]
        replayed = step["args"]["index"] == batch and any(step["ts"] <= ts <= end for ts in graphs)
        run = run + [step] if replayed else []
        longest = max(longest, run, key=len)
    return longest


def main():
    path, batch = sys.argv[1], int(sys.argv[2])
    with open(path) as file:
        events = [e for e in json.load(file) if e["ph"] == "X"]
    device = [e for e in events if e["tid"] == DEVICE_ROW]
    steps = longest_run(device, batch)
    if len(steps) < 16:
        sys.exit(f"B={batch}: {len(steps)} replayed steps in {path}, expected 16 at least")
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    host = [e for e in events if e["tid"] != DEVICE_ROW and begin <= e["ts"] and e["ts"] + e["dur"] <= end]
    total = lambda names: sum(e["dur"] for e in host if e["name"] in names)
    launched = sum(e["name"] == "step" for e in host)
    if launched == 0:
        sys.exit(f"B={batch}: no step of the host in {path}")
    work = (total(WORK) - total((WAIT,))) / launched
    gaps = [b["ts"] - a["ts"] - a["dur"] for a, b in zip(steps, steps[1:])]
    print(
        f"B={batch}: host work {work:.1f} us, device {statistics.median(e['dur'] for e in steps):.1f} us, gap between"
        f" steps {statistics.median(gaps):.1f} us (largest {max(gaps):.1f}), {len(steps)} steps;"
        f" host waits {total((WAIT,)) / launched:.1f} us a step"
    )


main()
