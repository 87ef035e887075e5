"""Merges the measurements of the parts of rivals.sh and prints a table of them: python rivals.py FOLDER RIVALS_JSON"""

import json
import sys
from pathlib import Path

PARTS = ["ours", "ceilings", "transformers", "decode", "experts"]


def read(folder):
    """Returns the results of the parts that ran, by name."""
    found = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
    lines = (folder / "router.log").read_text().splitlines() if (folder / "router.log").exists() else []
    pairs = [line.split() for line in lines if line[:1].isdigit()]
    if pairs:
        found["router"] = {tokens: float(us) for tokens, us in pairs}
    return found


def compared(ours, rival):
    """Formats our figure, the rival's figure and their ratio. Our figure is null if noise hid it."""
    if ours is None:
        return f"{'noise':>10}" + (f" {rival:14.0f}" if rival else f" {'-':>14}") + f" {'-':>8}"
    return f"{ours:10.0f}" + (f" {rival:14.0f} {ours / rival:8.2f}" if rival else f" {'-':>14} {'-':>8}")


def rates(found):
    ours, rival = found["ours"], found.get("transformers", {})
    print(f"{'tok/s':16} {'ours':>9} {'transformers':>14} {'ratio':>8}")
    for kind in ("decode", "prefill"):
        value = lambda row: row["tok_s"] if isinstance(row, dict) else row
        for size, row in ours.get(kind, {}).items():
            other = rival.get(kind, {}).get(size)
            print(f"{kind + ' ' + size:16}{compared(value(row), value(other) if other else None)}")
    if "decode_long" in ours:
        print(f"{'decode 1 at ' + str(ours['decode_long']['context']):16}{compared(ours['decode_long']['tok_s'], None)}")
    print(f"start {ours['start_s']:.1f} s, commit {ours['commit']}")


def products(rows):
    """Compares our fastest kernel with torch.mm, which calls cuBLASLt, for each product and number of rows."""
    best = {}
    for row in rows:
        name, _, kind = row["name"].partition(" M=")
        if kind and "norm" not in kind:
            rows_of, _, form = kind.partition(" ")
            side = "cublas" if form.startswith("cublas") else "ours"
            entry = best.setdefault((name, int(rows_of)), {})
            entry[side] = min(entry.get(side, float("inf")), row["us"])
    print(f"\n{'product':10} {'M':>4} {'ours us':>9} {'cuBLASLt us':>12} {'ratio':>7}")
    for (name, m), us in best.items():
        if len(us) == 2:
            print(f"{name:10} {m:4} {us['ours']:9.2f} {us['cublas']:12.2f} {us['cublas'] / us['ours']:7.2f}")


def kernels(rows, decode, read):
    """Each kernel's part of the step that `bench` measured, and what no kernel explains."""
    for batch in sorted({row["batch"] for row in rows}):
        mine = [row for row in rows if row["batch"] == batch]
        total = sum(row["step_us"] for row in mine)
        step = decode.get(str(batch), {}).get("step_ms", 0) * 1e3 or total
        print(f"\n{'B = ' + str(batch):40} {'us':>8} {'x':>3} {'us a step':>10} {'share':>7} {'GB/s':>6} {'of read':>8}")
        for row in mine:
            row["share"] = row["step_us"] / step
            print(f"  {row['kernel']:38} {row['us']:8.2f} {row['launches']:3} {row['step_us']:10.0f} {100 * row['share']:5.1f} %"
                  f" {row['gb_s']:6.0f} {100 * row['gb_s'] / read:6.1f} %")
        print(f"  {'step of the engine':38} {'':12} {step:10.0f}; the kernels one by one {total:.0f}")


def layers(rows):
    print(f"\n{'a layer':60} {'us':>8} {'byte floor':>11}")
    for row in rows:
        print(f"{row['name'].removeprefix('layer '):60} {row['us']:8.2f} {row['floor_us']:11.1f}")


def experts(part, read):
    print(f"\n{'experts':10} {'T':>5} {'skew':>5} {'us':>8} {'TB/s':>6} {'of read':>8}")
    for row in part["rows"]:
        print(f"{row['kernel']:10} {row['tokens']:5} {row['skew']:5} {row['us']:8.1f} {row['tb_s']:6.2f} {100e3 * row['tb_s'] / read:6.1f} %")


def main():
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = read(folder)
    ceilings = found.get("ceilings", {})
    # A kernel of this project has read faster than PyTorch's reductions do.
    read_gb_s = max(ceilings.get("read_gb_s", 0), 4590 if "H200" in ceilings.get("device", "") else 0) or 4590
    if ceilings:
        print(f"{ceilings['device']}, torch {ceilings['torch']}: bf16 product {ceilings['matmul_tflop_s']:.0f} TFLOP/s, read"
              f" {ceilings['read_gb_s']:.0f} GB/s; shares below are of {read_gb_s:.0f}")
    if "ours" in found:
        rates(found)
    if "decode" in found:
        rows = found["decode"]["rows"]
        products([row for row in rows if "kernel" not in row])
        kernels([row for row in rows if "kernel" in row], found.get("ours", {}).get("decode", {}), read_gb_s)
        layers([row for row in rows if row["name"].startswith("layer ")])
    if "experts" in found:
        experts(found["experts"], read_gb_s)
    if "router" in found:
        print("\nrouter, us by tokens: " + ", ".join(f"{tokens}: {us:.2f}" for tokens, us in found["router"].items()))
    out.write_text(json.dumps(found, indent=1) + "\n")
    missing = [name for name in [*PARTS, "router"] if name not in found]
    print(f"missing: {', '.join(missing)}" if missing else "all parts are here")
    return len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
