"""What profiles of decode steps say: python timeline.py FOLDER BATCH=PROFILE..

Of each profile the longest run of replayed graphs of that batch: the host's work a step, the device's time, and how
long the device had nothing to do between steps, which is the work that was not hidden. Prints a table; figures and the
events around the end of one step go to FOLDER/timeline.json, their picture to FOLDER/timeline.svg.
"""

import json
import statistics
import sys
from pathlib import Path

import timeline_svg

DEVICE_ROW = 1000
BEFORE, AFTER = 100.0, 300.0  # microseconds of the picture around the end of a step, at least
COLUMNS = ["period", "device", "idle", "idle_max", "work", "schedule", "build", "upload", "launch", "collect", "wait"]


def longest_run(device, batch):
    """The most device steps of `batch` rows that follow each other and each replay a graph."""
    graphs = [e["ts"] for e in device if e["name"] == "graph"]
    run, longest = [], []
    for step in sorted((e for e in device if e["name"] == "step"), key=lambda e: e["ts"]):
        replayed = step["args"]["index"] == batch and any(step["ts"] <= ts <= step["ts"] + step["dur"] for ts in graphs)
        run = run + [step] if replayed else []
        longest = max(longest, run, key=len)
    return longest


def figures(steps, host):
    """Microseconds a step. `host`: its events while the device ran `steps`."""
    if not any(e["name"] == "step" for e in host):
        sys.exit("no step of the host while the device ran")
    # The median of each name by itself: at the ends of the run a part of a step may be recorded without the whole step.
    durations = lambda name: [e["dur"] for e in host if e["name"] == name]
    mean = lambda name: statistics.mean(durations(name) or [0.0])
    idle = [b["ts"] - a["ts"] - a["dur"] for a, b in zip(steps, steps[1:])]
    found = {
        "steps": len(steps),
        "period": (steps[-1]["ts"] - steps[0]["ts"]) / (len(steps) - 1),
        "device": statistics.median(e["dur"] for e in steps),
        "idle": statistics.mean(idle),
        "idle_max": max(idle),
        "schedule": mean("schedule"),
        "build": mean("step") - mean("upload") - mean("launch"),
        "upload": mean("upload"),
        "launch": mean("launch"),
        "collect": mean("collect") - mean("wait"),
        "wait": mean("wait"),
    }
    found["work"] = sum(found[name] for name in ("schedule", "build", "upload", "launch", "collect"))
    found["hidden"] = max(0.0, 1 - found["idle"] / found["work"])
    return found


def read(path, batch):
    with open(path) as file:
        events = [e for e in json.load(file) if e["ph"] == "X"]
    device = [e for e in events if e["tid"] == DEVICE_ROW]
    steps = longest_run(device, batch)
    if len(steps) < 16:
        sys.exit(f"B={batch}: {len(steps)} replayed steps in {path}, expected 16 at least")
    within = lambda e, first, last: first["ts"] <= e["ts"] and e["ts"] + e["dur"] <= last["ts"] + last["dur"]
    host = [e for e in events if e["tid"] != DEVICE_ROW]
    found = figures(steps, [e for e in host if within(e, steps[0], steps[-1])])
    # The tokens of a step arrive at its end. Then the host processes them and prepares the step after the next.
    ended = steps[len(steps) // 2]
    origin = ended["ts"] + ended["dur"]
    after = max(AFTER, 2 * found["work"])
    shown = [e for e in host + device if e["ts"] < origin + after and e["ts"] + e["dur"] > origin - BEFORE]
    rows = ["device" if e["tid"] == DEVICE_ROW else "host" for e in shown]
    found["window"] = [-BEFORE, after]
    found["events"] = [{"row": row, "name": e["name"], "us": e["ts"] - origin, "dur": e["dur"]} for row, e in zip(rows, shown)]
    return found


def main():
    folder, found = Path(sys.argv[1]), {}
    for pair in sys.argv[2:]:
        batch, path = pair.split("=", 1)
        found[batch] = read(path, int(batch))
    print("us a step" + "".join(f"{name:>10}" for name in COLUMNS) + "    hidden")
    for batch, row in found.items():
        print(f"B={batch:<7}" + "".join(f"{row[name]:10.1f}" for name in COLUMNS) + f"{100 * row['hidden']:8.1f} %")
    (folder / "timeline.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "timeline.svg").write_text(timeline_svg.draw(found))


if __name__ == "__main__":
    main()
