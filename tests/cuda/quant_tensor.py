"""Times the kernels on warpgroup products with quantised weights and with bf16.

  python tests/cuda/quant_tensor.py LIBRARY [--out quant_tensor.json] [--tokens 8,16,..] [--schemes NAME,..]
      [--time linears,experts] [--splits N]
"""
import argparse
import json
import os

import torch

import bench_quant_tensor
from library import Library


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "quant_tensor.json"))
    ap.add_argument("--tokens", default="8,16,32,64,128,256,512,2048,8192")
    ap.add_argument("--schemes", help="time these only, by name, with commas")
    ap.add_argument("--time", default="linears,experts", help="what to time: linears, experts, dequantise, fp8 (experts), fp8_linears, order")
    ap.add_argument("--splits", type=int, default=0, help="of K in dense products")
    args = ap.parse_args()
    lib = Library(args.so)
    rows = bench_quant_tensor.run(lib, [int(t) for t in args.tokens.split(",")], args.schemes and args.schemes.split(","), args.time, args.splits)
    with open(args.out, "w") as f:
        json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
