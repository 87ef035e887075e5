#!/usr/bin/env python3
"""A recording of skewed routing, and requests to replay it on: pure functions of the seed.

The popularity of a layer's experts follows Zipf's law: the expert in place r is chosen in proportion to 1 / (r + 1) **
alpha. Each layer has its own order (--sorted: experts 0, 1, .. in every layer, so that contiguous ranges of experts are
as uneven as possible). For every row K different experts are sampled: each expert gets an exponential random time at
its rate, and the K shortest times win. With --drift the order of each layer changes by that number of random exchanges
after every --period rows. Request i of `bench` replays the rows from 61 i on. So if only a part of the requests runs at
once, rows correspond to time: --period 3904 changes the order for every 64th request, and --rows must be 61 for each
request plus the length of a sequence.

--expert-map writes the places that balance the loads of the whole recording over --ranks ranks, each expert once: the
best that places can do which never change. --json writes the peaks over mean loads.

    tests/bench/skewed_routing.py --out zipf.safetensors --requests requests.json
    moe bench --config qwen3-30b-a3b.json --dummy-weights --workload requests.json --replay-routed-experts
    zipf.safetensors ..

The recording is what `generate --routed-experts-out` writes: safetensors, routed_experts [T, L, K] u32.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy

FIRST_ID, LAST_ID = 1000, 100_000
CHUNK = 4096  # rows at once


def recording(rows, top_k, places, alpha, drift, period, rng):
    """[rows, layers, top_k] u32 from the place of each expert by popularity [layers, experts]."""
    layers, experts = places.shape
    rates = (numpy.arange(1, experts + 1) ** -alpha).astype(numpy.float32)
    ids = numpy.empty((rows, layers, top_k), dtype=numpy.uint32)
    for first in range(0, rows, period):
        for layer in range(layers) if first else ():
            for a, b in rng.integers(0, experts, (drift, 2)):
                places[layer, [a, b]] = places[layer, [b, a]]
        for start in range(first, min(rows, first + period), CHUNK):
            end = min(rows, first + period, start + CHUNK)
            times = rng.standard_exponential((end - start, layers, experts), dtype=numpy.float32) / rates[places][None]
            ids[start:end] = numpy.argpartition(times, top_k, axis=2)[:, :, :top_k]
    return ids


def write(path, ids):
    header = json.dumps({"routed_experts": {"dtype": "U32", "shape": ids.shape, "data_offsets": [0, ids.nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + ids.tobytes())


def counts_of(ids, experts):
    """Tokens by layer and expert."""
    return numpy.stack([numpy.bincount(layer.ravel(), minlength=experts) for layer in ids.swapaxes(0, 1)])


def par(counts, owners, ranks):
    """Peak over mean load of ranks, the mean of the layers; `owners` [layers, experts]."""
    loads = numpy.stack([numpy.bincount(owner, weights=layer, minlength=ranks) for owner, layer in zip(owners, counts)])
    return (loads.max(axis=1) / loads.mean(axis=1)).mean()


def balanced(loads, ranks):
    """The rank of each expert, with the same number of experts on each rank. The heaviest expert goes first, to the
    lightest rank with room. Then experts are exchanged as long as an exchange helps."""
    owners, room, sums = numpy.zeros(len(loads), int), numpy.full(ranks, len(loads) // ranks), numpy.zeros(ranks)
    for expert in numpy.argsort(-loads, kind="stable"):
        rank = numpy.where(room > 0, sums, numpy.inf).argmin()
        owners[expert], room[rank], sums[rank] = rank, room[rank] - 1, sums[rank] + loads[expert]
    while True:
        hot, cold = sums.argmax(), sums.argmin()
        a, b = numpy.flatnonzero(owners == hot), numpy.flatnonzero(owners == cold)
        moved = loads[a][:, None] - loads[b][None]
        peak = numpy.maximum(sums[hot] - moved, sums[cold] + moved)
        i, j = numpy.unravel_index(peak.argmin(), peak.shape)
        if peak[i, j] >= sums[hot]:
            return owners
        owners[a[i]], owners[b[j]] = cold, hot
        sums[hot], sums[cold] = sums[hot] - moved[i, j], sums[cold] + moved[i, j]


def balanced_layers(counts, ranks):
    return numpy.stack([balanced(layer.astype(float), ranks) for layer in counts])


def write_map(path, owners, ranks):
    """An expert map as `--expert-map` of the programs reads it."""
    def layer(number, owner):
        devices = [{"device_id": rank, "device_expert": numpy.flatnonzero(owner == rank).tolist()} for rank in range(ranks)]
        return {"layer_id": number, "device_count": ranks, "device_list": devices}

    layers = [layer(number, owner) for number, owner in enumerate(owners)]
    Path(path).write_text(json.dumps({"moe_layer_count": len(layers), "layer_list": layers}))


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
    args.add_argument("--ranks", type=int, default=2)
    args.add_argument("--expert-map", help="file of the places that balance the whole recording")
    args.add_argument("--json", help="file of the peaks over mean loads")
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
    even = numpy.tile(numpy.arange(args.experts) * args.ranks // args.experts, (args.layers, 1))
    best = balanced_layers(counts_of(ids, args.experts), args.ranks)
    periods = [counts_of(ids[first : first + args.period], args.experts) for first in range(0, args.rows, args.period)]
    pars = {
        "even runs": [par(counts, even, args.ranks) for counts in periods],
        "balanced for the whole": [par(counts, best, args.ranks) for counts in periods],
        "balanced for each period": [par(counts, balanced_layers(counts, args.ranks), args.ranks) for counts in periods],
    }
    means = {name: float(numpy.mean(values)) for name, values in pars.items()}
    shown = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    print(f"{args.out}: {args.rows} rows, mean PAR of {len(periods)} periods on {args.ranks} ranks: {shown}")
    if args.expert_map:
        write_map(args.expert_map, best, args.ranks)
    if args.json:
        Path(args.json).write_text(json.dumps(means))


if __name__ == "__main__":
    main()
