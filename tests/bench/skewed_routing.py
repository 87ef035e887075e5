#!/usr/bin/env python3
"""A recording of skewed routing, and requests to replay it on: pure functions of the seed.

The experts of a layer are popular by Zipf's law: the one in place r is chosen in proportion to 1 / (r + 1) ** alpha, each layer with an
order of its own (--sorted: experts 0, 1, .. in every layer, so that even runs of experts are as uneven as can be). Of every row K different ones are drawn (Gumbel's way: the K largest of log-weight plus noise). With --drift the
order of each layer changes by so many random exchanges after every --period rows.

    tests/bench/skewed_routing.py --out zipf.safetensors --requests requests.json
    model-qwen3moe bench --config qwen3-30b-a3b.json --dummy-weights --workload requests.json --replay-routed-experts zipf.safetensors ..

The recording is what `generate --routed-experts-out` writes: safetensors, routed_experts [T, L, K] u32.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy

FIRST_ID, LAST_ID = 1000, 100_000


def recording(rows, top_k, places, alpha, drift, period, rng):
    """[rows, layers, top_k] u32 from the place of each expert by popularity [layers, experts]."""
    layers, experts = places.shape
    weights = -alpha * numpy.log(numpy.arange(1, experts + 1))
    ids = numpy.empty((rows, layers, top_k), dtype=numpy.uint32)
    for first in range(0, rows, period):
        for layer in range(layers) if first else ():
            for a, b in rng.integers(0, experts, (drift, 2)):
                places[layer, [a, b]] = places[layer, [b, a]]
        end = min(rows, first + period)
        scores = weights[places][None] + rng.gumbel(size=(end - first, layers, experts))
        ids[first:end] = numpy.argpartition(-scores, top_k, axis=2)[:, :, :top_k]
    return ids


def write(path, ids):
    header = json.dumps({"routed_experts": {"dtype": "U32", "shape": ids.shape, "data_offsets": [0, ids.nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + ids.tobytes())


def par(ids, experts, ranks):
    """Peak over mean load of ranks that hold even runs of experts, the mean of the layers."""
    counts = numpy.stack([numpy.bincount(layer.ravel(), minlength=experts) for layer in ids.swapaxes(0, 1)])
    loads = counts.reshape(len(counts), ranks, -1).sum(axis=2)
    return (loads.max(axis=1) / loads.mean(axis=1)).mean()


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", required=True)
    args.add_argument("--requests", required=True)
    args.add_argument("--rows", type=int, default=2048)
    args.add_argument("--layers", type=int, default=48)
    args.add_argument("--experts", type=int, default=128)
    args.add_argument("--top-k", type=int, default=8)
    args.add_argument("--alpha", type=float, default=1.0)
    args.add_argument("--sorted", action="store_true")
    args.add_argument("--drift", type=int, default=0)
    args.add_argument("--period", type=int, default=256)
    args.add_argument("--count", type=int, default=256, help="requests")
    args.add_argument("--prompt", type=int, default=128)
    args.add_argument("--output", type=int, default=256)
    args.add_argument("--seed", type=int, default=1)
    args = args.parse_args()
    rng = numpy.random.default_rng(args.seed)
    places = numpy.argsort(rng.random((args.layers, args.experts)), axis=1)
    if args.sorted:
        places = numpy.tile(numpy.arange(args.experts), (args.layers, 1))
    ids = recording(args.rows, args.top_k, places, args.alpha, args.drift, args.period, rng)
    write(args.out, ids)
    prompts = rng.integers(FIRST_ID, LAST_ID, (args.count, args.prompt))
    requests = [{"prompt_token_ids": prompt.tolist(), "max_tokens": args.output, "seed": i} for i, prompt in enumerate(prompts)]
    Path(args.requests).write_text(json.dumps({"requests": requests}))
    print(f"{args.out}: {args.rows} rows, PAR of 2 ranks with even runs of experts {par(ids, args.experts, 2):.3f}")


if __name__ == "__main__":
    main()
