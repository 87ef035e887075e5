"""Checks the kernels on warpgroup products with quantised weights against float64, then times them beside bf16.

  python tests/cuda/quant_tensor.py LIBRARY [--out quant_tensor.json] [--no-bench] [--no-checks] [--only CHECK]
      [--tokens 8,16,..] [--schemes NAME,..] [--time linears,experts] [--splits N]

TINY=1: few and small shapes, for compute-sanitizer.
"""
import argparse
import json
import os
import time

import torch

import bench_quant_tensor
import check_dequantise
import check_fp8
import check_fp8_linear
import check_order
import check_quant_tensor
from library import Library

CHECKS = check_dequantise.CHECKS + check_fp8.CHECKS + check_fp8_linear.CHECKS + check_order.CHECKS + check_quant_tensor.CHECKS


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quant_tensor.json"))
    ap.add_argument("--no-bench", action="store_true")
    ap.add_argument("--no-checks", action="store_true")
    ap.add_argument("--only", choices=[function.__name__ for function in CHECKS], help="run this check alone")
    ap.add_argument("--tokens", default="8,16,32,64,128,256,512,2048,8192")
    ap.add_argument("--schemes", help="time these only, by name, with commas")
    ap.add_argument("--time", default="linears,experts", help="what to time: linears, experts, dequantise, fp8 (experts), fp8_linears, order")
    ap.add_argument("--splits", type=int, default=0, help="of K in dense products")
    args = ap.parse_args()
    lib, failures = Library(args.so), 0
    for function in [] if args.no_checks else [f for f in CHECKS if args.only in (None, f.__name__)]:
        begin = time.time()
        try:
            function(lib)
            torch.cuda.synchronize()
            print(f"ok {function.__name__} ({time.time() - begin:.1f} s)", flush=True)
        except (AssertionError, RuntimeError) as error:
            failures += 1
            print(f"FAILED {function.__name__}: {error}", flush=True)
    if not args.no_bench:
        rows = bench_quant_tensor.run(lib, [int(t) for t in args.tokens.split(",")], args.schemes and args.schemes.split(","), args.time, args.splits)
        with open(args.out, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)
    if failures:
        raise SystemExit(f"{failures} checks failed")


if __name__ == "__main__":
    main()
