"""What PyTorch reaches on this card: python ceilings.py --out ceilings.json

The bf16 product of 8,192 cubed (cuBLASLt) in TFLOP/s, and the fastest reduction of 16 GB in bytes read per second.
"""
import argparse
import json
import statistics

import torch


def seconds(run, repeats=10):
    times = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * n**3 / seconds(lambda: torch.mm(a, b))
    data = torch.ones(1 << 32, device="cuda", dtype=torch.float32)
    reductions = {"sum": lambda: data.sum(), "amax": lambda: data.amax(), "sum of rows": lambda: data.view(1 << 16, -1).sum(1)}
    reads = {name: data.numel() * 4 / seconds(run) for name, run in reductions.items()}
    best = max(reads, key=reads.get)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "matmul_tflop_s": matmul / 1e12,
              "read_gb_s": reads[best] / 1e9, "read_by": best}
    print(result)
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
