"""Checks the expert kernels against float64 on fresh random inputs, then times them.

  python tests/cuda/experts.py LIBRARY [--out experts.json] [--no-bench] [--only CHECK] [--tokens 1,8,..] [--skews 0,0.5,1]
  python tests/cuda/experts.py LIBRARY --products [--out experts.json]

TINY=1: few and small shapes, for compute-sanitizer.
"""
import argparse
import itertools
import json
import os

import torch

from library import Library, ids_back, poison, sized
from library import BF16, F32
from expert_cases import SHAPES, Case, cases, counters_for, expect_close, expect_counts_cleared, list_slots, with_padding
import bench_experts
import bench_products
import check_wide

CHECKS = [*check_wide.CHECKS]


def check(function):
    CHECKS.append(function)
    return function


def flags_for(lib, slots, local):
    return torch.zeros(lib.raw("moe_experts_stream_flags", slots, local), dtype=torch.int32, device="cuda")


def run_stream(lib, case, plan=None, flags=None):
    """Slot rows and token rows, the latter in both dtypes: a launch each, because only without `out` are slot rows a result."""
    flags = flags_for(lib, case.tokens * case.top_k, case.local) if flags is None else flags
    act, rows, out = case.buffers()
    exact = poison(*out.shape, dtype=torch.float32)
    for slot_rows, result in ((torch.empty_like(rows), out), (torch.empty_like(rows), exact), (rows, None)):
        args = (case.x, case.w13, case.w2, case.ids, case.weights, case.map, act, slot_rows, result, flags, flags.numel())
        if plan is None:
            lib.launch("moe_experts_stream", *args, *case.sizes(), F32 if result is exact else BF16)
        else:
            lib.launch("moe_experts_stream_planned", *args, *case.sizes(), F32 if result is exact else BF16, *plan)
    assert torch.equal(exact.to(torch.bfloat16), out), "stream: f32 token rows, rounded, are not the bf16 ones"
    return rows, out


def run_align(lib, case, tile_rows):
    slots = case.tokens * case.top_k
    offsets = poison(case.local + 1, dtype=torch.int32)
    in_order = poison(max(slots, 1), dtype=torch.int32)
    tiles = poison(lib.raw("moe_max_tiles", slots, case.local, tile_rows) + 1, 2, dtype=torch.int32)
    count = poison(1, dtype=torch.int32)
    lib.launch("moe_align_tokens", case.ids, case.map, slots, case.experts, case.local, tile_rows, offsets, in_order, tiles, count)
    return offsets, in_order, tiles, count


def run_grouped(lib, case):
    act, rows, out = case.buffers()
    offsets, in_order, tiles, count = run_align(lib, case, 128)
    tokens, top_k, experts, local, hidden, inter = case.sizes()
    meta = (offsets, in_order, tiles, count)
    args = case.x, case.w13, case.w2, *meta, act, rows, tokens * top_k, top_k, local, hidden, inter
    lib.launch("moe_experts_grouped_gate_up", *args)
    lib.launch("moe_experts_grouped_down", *args)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, F32, BF16)
    exact = poison(*out.shape, dtype=torch.float32)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, exact, tokens, top_k, experts, local, hidden, F32, F32)
    assert torch.equal(exact.to(torch.bfloat16), out), "combine: f32 token rows, rounded, are not the bf16 ones"
    return rows, out


def run_tensor(lib, case, buckets=False):
    """The one launch on warpgroup products, over listed slots or with each expert's slots in a bucket, shuffled."""
    act, rows, out = case.buffers()
    tokens, top_k, experts, local, hidden, inter = case.sizes()
    counters = counters_for(lib, local)
    for _ in range(3):  # with both sets of counters, and the first one again
        rows.fill_(float("nan"))
        listed, counts, places = list_slots(lib, case, counters, buckets)
        lib.launch("moe_experts_tensor", case.x, case.w13, case.w2, listed, counts, places, act, rows, counters, tokens, top_k, experts, local, hidden, inter)
        expect_counts_cleared(lib, counters, local)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, F32, BF16)
    return rows, out


@check
def align_is_a_stable_sort(lib):
    for tokens in sized((0, 1, 5, 257, 1024), (0, 1, 40)):
        for name, case in cases([tokens] if tokens else [1]):
            if tokens == 0:
                case.tokens = 0
            offsets, in_order, tiles, count = run_align(lib, case, 16)
            local = case.local_ids()[: case.tokens * case.top_k]
            order = torch.sort(torch.where(local < 0, case.local, local), stable=True).indices[: (local >= 0).sum()]
            counts = torch.bincount(local[local >= 0], minlength=case.local)
            want = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            assert torch.equal(offsets.long(), want), f"align {name}: offsets"
            assert torch.equal(in_order[: order.numel()].long(), order), f"align {name}: order"
            assert (in_order[order.numel() :] == 0x5A5A5A5A).all(), f"align {name}: wrote the tail"
            ends = want.tolist()
            rows = [[e, f] for e in range(case.local) for f in range(ends[e], ends[e + 1], 16)]
            assert tiles[: len(rows)].tolist() == rows, f"align {name}: tiles"
            assert int(count) == len(rows), f"align {name}: tile count"


@check
def stream_matches_float64(lib):
    worst = 0.0
    for name, case in cases(sized([1, 2, 9, 33], [1, 9])):
        worst = max(worst, expect_close(f"stream {name}", case, run_stream(lib, case)))
    for tokens in sized((8, 64, 128, 256), (40,)):
        worst = max(worst, expect_close(f"stream T={tokens}", case := Case(tokens, SHAPES[0]), run_stream(lib, case)))
    print(f"  stream: worst error of token rows {worst:.2e}")


@check
def stream_plans_agree_bit_for_bit(lib):
    for shape in SHAPES:
        for tokens in sized((1, 4, 40), (1, 12)):
            case = with_padding(Case(tokens, shape)) if tokens > 1 else Case(tokens, shape)
            for chunk in sized((64, 256, 512), (64, 256)):
                rows, out = run_stream(lib, case, (8, chunk))
                expect_close(f"{shape} T={tokens} chunk {chunk}", case, (rows, out))
                for columns in (16, 32):
                    if too_large(case, columns, chunk):
                        continue
                    got = run_stream(lib, case, (columns, chunk))
                    same = torch.equal(got[1], out) and torch.equal(got[0].nan_to_num(7.0), rows.nan_to_num(7.0))
                    assert same, f"{shape} T={tokens}: {columns} columns, chunk {chunk} differ from 8"


def too_large(case, columns, chunk):
    """Whether this many columns do not fit into shared memory beside four stages (a bound from above)."""
    rows = max(case.hidden * 2 + 16, 2 * (case.inter * 2 + 16))
    return columns * rows + 4 * 16 * (chunk * 2 + 144) + columns * 1100 > 220_000


@check
def stream_repeats_with_shared_flags(lib):
    """Launches of all sizes in turn on one flag buffer: each finds its flags clear."""
    shape = SHAPES[0]
    flags = flags_for(lib, 2048, shape[0])
    sizes = [Case(tokens, shape) for tokens in sized((1, 24, 200, 4, 2), (1, 24, 4))]
    first = [run_stream(lib, case, flags=flags) for case in sizes]
    for _ in range(sized(15, 2)):
        for case, want in zip(sizes, first):
            rows, out = run_stream(lib, case, flags=flags)
            assert torch.equal(rows, want[0]) and torch.equal(out, want[1]), f"T={case.tokens}: runs differ"


@check
def stream_fills_its_ring_again(lib):
    """Sizes of which a block has more tiles than stages; also under compute-sanitizer, which is to see how stages change hands."""
    for tokens in (1, 6):
        expect_close(f"stream T={tokens}", case := Case(tokens, (8, 8, 2048, 768)), run_stream(lib, case))


@check
def graph_equals_eager(lib):
    case = Case(3, SHAPES[0])
    flags = flags_for(lib, 64, case.local)
    _, want = run_stream(lib, case, flags=flags)
    act, rows, out = case.buffers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib.launch("moe_experts_stream", case.x, case.w13, case.w2, case.ids, case.weights, case.map, act, rows, out, flags, flags.numel(), *case.sizes(), BF16)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want), "a replayed graph differs from the eager launch"


@check
def grouped_matches_float64(lib):
    worst = 0.0
    for name, case in cases(sized([1, 17, 300], [1, 17])):
        worst = max(worst, expect_close(f"grouped {name}", case, run_grouped(lib, case)))
    case = Case(sized(1024, 150), SHAPES[0])
    worst = max(worst, expect_close(f"grouped T={case.tokens}", case, run_grouped(lib, case)))
    again, first = run_grouped(lib, case), run_grouped(lib, case)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), "grouped: runs differ"
    print(f"  grouped: worst error of token rows {worst:.2e}")


@check
def tensor_matches_float64(lib):
    worst = 0.0
    for name, case in cases(sized([1, 17, 300], [1, 40])):
        got = run_tensor(lib, case)
        worst = max(worst, expect_close(f"tensor {name}", case, got))
        listed = run_tensor(lib, case, buckets=True)
        same = torch.equal(got[0].nan_to_num(7.0), listed[0].nan_to_num(7.0)) and torch.equal(got[1], listed[1])
        assert same, f"tensor {name}: shuffled buckets differ from listed slots"
    for tokens in sized((64, 128, 256, 512, 1024), (100, 200)):
        case = Case(tokens, SHAPES[0])
        worst = max(worst, expect_close(f"tensor T={tokens}", case, run_tensor(lib, case)))
        first = run_tensor(lib, case)
        for _ in range(sized(20, 2)):
            again = run_tensor(lib, case)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), f"tensor T={tokens}: runs differ"
    print(f"  tensor: worst error of token rows {worst:.2e}")


@check
def tensor_rows_do_not_depend_on_the_batch(lib):
    shape = SHAPES[0]
    case = Case(sized(700, 90), shape)
    whole, _ = run_tensor(lib, case)
    for tokens in sized((1, 5, 40, 200), (1, 40)):
        part = Case(tokens, shape, ids=ids_back(case.ids)[:tokens])
        part.x, part.w13, part.w2 = case.x[:tokens].contiguous(), case.w13, case.w2
        rows, _ = run_tensor(lib, part)
        assert torch.equal(rows, whole[: rows.shape[0]]), f"tensor: rows of {tokens} tokens differ from those among {case.tokens}"


@check
def combine_with_norm_is_combine_then_norm(lib):
    for tokens, shape in itertools.product(sized((1, 5, 77, 500), (1, 9)), [*SHAPES, (24, 12, 128, 64), (16, 3, 4160, 64)]):
        case = with_padding(Case(tokens, shape)) if tokens > 1 else Case(tokens, shape)
        rows, _ = run_grouped(lib, case)
        top_k, experts, local, hidden = shape[1], shape[0], case.local, shape[2]
        residual, gain = torch.randn(tokens, hidden, device="cuda"), torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
        sums, want, got = residual.clone(), torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16), residual.clone()
        delta, out = poison(tokens, hidden, dtype=torch.float32), poison(tokens, hidden, dtype=torch.bfloat16)
        lib.launch("moe_combine", rows, case.ids, case.weights, None, delta, tokens, top_k, experts, local, hidden, F32, F32)
        lib.launch("moe_add_rms_norm", delta, sums, gain, 1e-6, want, tokens, hidden)
        lib.launch("moe_combine_add_rms_norm", rows, case.ids, case.weights, None, out, tokens, top_k, experts, local, hidden, F32, BF16, got, gain, 1e-6)
        assert torch.equal(got, sums) and torch.equal(out, want), f"{shape} T={tokens}: combine with norm differs"


@check
def sums_skip_absent_slots(lib):
    """Rows of slots without a local expert hold NaNs, and sums are the same as with zeros there."""
    for tokens, dtype in itertools.product(sized((1, 64, 65, 700), (3, 65)), (torch.float32, torch.bfloat16)):
        top_k, experts, local, hidden = 5, 16, 4, 320
        ids = torch.randint(0, experts, (tokens, top_k), device="cuda", dtype=torch.int32)
        owned = torch.randperm(experts, device="cuda")[:local]
        places = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        places[owned] = torch.arange(local, dtype=torch.int32, device="cuda")
        absent = places[ids.long()] < 0
        weights = torch.rand(tokens, top_k, device="cuda")
        rows = torch.randn(tokens, top_k, hidden, device="cuda").to(dtype)
        zeros = rows.masked_fill(absent[..., None], 0)
        rows[absent] = float("nan")
        got, want = poison(tokens, hidden, dtype=torch.float32), poison(tokens, hidden, dtype=torch.float32)
        code = BF16 if dtype == torch.bfloat16 else F32
        lib.launch("moe_combine", rows, ids, weights, places, got, tokens, top_k, experts, local, hidden, code, F32)
        lib.launch("moe_combine", zeros, ids, weights, None, want, tokens, top_k, experts, experts, hidden, code, F32)
        assert torch.equal(got, want), f"{dtype} T={tokens}: sums of the present slots differ"


@check
def sizes_that_do_not_fit_are_refused(lib):
    none = [None] * 10
    for tokens, top_k, hidden, inter in ((1, 2, 96, 64), (1, 2, 64, 100), (2049, 1, 64, 64), (-1, 2, 64, 64), (1, 0, 64, 64), (1, 1, 1 << 20, 64)):
        assert lib.refused("moe_experts_stream", *none, 9999, tokens, top_k, 8, 8, hidden, inter, 0), (tokens, top_k, hidden, inter)
    assert lib.refused("moe_experts_grouped_gate_up", *none[:9], 8, 2, 8, 96, 64)
    assert lib.refused("moe_experts_grouped_down", *none[:9], 8, 2, 8, 64, 100)
    assert lib.refused("moe_experts_tensor", *none[:5], 4, *none[:3], 4, 2, 8, 8, 96, 64)
    assert lib.refused("moe_experts_stream", *none, 40, 4, 8, 8, 8, 64, 64, 0), "too small a flag buffer"
    assert lib.refused("moe_experts_stream", *none, 9999, 1, 2, 8, 8, 64, 64, 2), "an unknown output"
    assert lib.raw("moe_experts_stream", *none, 9999, 0, 2, 8, 8, 64, 64, 0, None) == 0, "no tokens is no error"


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "experts.json"))
    ap.add_argument("--no-bench", action="store_true")
    ap.add_argument("--only", choices=[function.__name__ for function in CHECKS], help="run this check alone")
    ap.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024")
    ap.add_argument("--skews", default="0,0.5,1")
    ap.add_argument("--kernels", help="time these only, by name, with commas")
    ap.add_argument("--no-checks", action="store_true")
    ap.add_argument("--products", action="store_true", help="instead, time both products alone from 16 to 32k tokens in bursts and sustained, with skews 0, 1 and inf")
    args = ap.parse_args()
    lib = Library(args.so)
    if args.products:
        table = bench_products.run(lib, [16 << i for i in range(12)], [0.0, 1.0, float("inf")])
        with open(args.out, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), **table}, f, indent=1)
        return
    failures = 0
    for function in [] if args.no_checks else [f for f in CHECKS if args.only in (None, f.__name__)]:
        try:
            function(lib)
            torch.cuda.synchronize()
            print(f"ok {function.__name__}", flush=True)
        except (AssertionError, RuntimeError) as error:
            failures += 1
            print(f"FAILED {function.__name__}: {error}", flush=True)
    if not args.no_bench:
        rows = bench_experts.run(lib, [int(t) for t in args.tokens.split(",")], [float(s) for s in args.skews.split(",")],
                                 args.kernels and args.kernels.split(","))
        with open(args.out, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)
    if failures:
        raise SystemExit(f"{failures} checks failed")


if __name__ == "__main__":
    main()
