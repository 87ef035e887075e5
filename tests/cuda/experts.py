"""Times the expert kernels.

  python tests/cuda/experts.py LIBRARY [--out experts.json] [--tokens 1,8,..] [--skews 0,0.5,1] [--kernels NAME,..]
  python tests/cuda/experts.py LIBRARY --products [--out experts.json]
"""
import argparse
import json
import os

import torch

import bench_experts
import bench_products
from library import Library


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "experts.json"))
    ap.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024")
    ap.add_argument("--skews", default="0,0.5,1")
    ap.add_argument("--kernels", help="time these only, by name, with commas")
    ap.add_argument("--products", action="store_true", help="instead, time both products alone from 16 to 32k tokens in bursts and sustained, with skews 0, 1 and inf")
    args = ap.parse_args()
    lib = Library(args.so)
    if args.products:
        table = bench_products.run(lib, [16 << i for i in range(12)], [0.0, 1.0, float("inf")])
        with open(args.out, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), **table}, f, indent=1)
        return
    rows = bench_experts.run(lib, [int(t) for t in args.tokens.split(",")], [float(s) for s in args.skews.split(",")],
                             args.kernels and args.kernels.split(","))
    with open(args.out, "w") as f:
        json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
