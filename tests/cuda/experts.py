"""Checks the expert kernels against float64 on fresh random inputs, then times them.

  python tests/cuda/experts.py LIBRARY [--out experts.json] [--no-bench] [--only CHECK] [--tokens 1,8,..] [--skews 0,0.5,1]

TINY=1: few and small shapes, for compute-sanitizer.
"""
import argparse
import itertools
import json
import os

import torch

from library import Library, ids_back, ids_tensor, poison, rel_error, sized
from library import BF16, F32, NO_EXPERT
import bench_experts

# E, K, H, I: the Qwen3-30B-A3B shape, then small and uneven ones.
FULL = [(128, 8, 2048, 768), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344), (40, 3, 128, 2560), (12, 4, 4096, 1536)]
SHAPES = sized(FULL, [(8, 2, 64, 64), (5, 1, 320, 192)])
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Case:
    """Random weights, rows and routing of one shape, and the float64 answer."""

    def __init__(self, tokens, shape, ids=None, expert_map=None, local=None):
        self.tokens, (self.experts, self.top_k, self.hidden, self.inter) = tokens, shape
        self.local = self.experts if local is None else local
        self.map = expert_map
        bf16 = dict(device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(tokens, self.hidden, **bf16)
        self.w13 = torch.randn(self.local, 2 * self.inter, self.hidden, **bf16) / self.hidden**0.5
        self.w2 = torch.randn(self.local, self.hidden, self.inter, **bf16) / self.inter**0.5
        if ids is None:
            ids = torch.rand(tokens, self.experts, device="cuda").topk(self.top_k, -1).indices
        self.ids = ids_tensor(ids)
        self.weights = torch.softmax(torch.randn(tokens, self.top_k, device="cuda"), -1)

    def local_ids(self):
        """Local expert of each slot, -1 for none."""
        ids = ids_back(self.ids).flatten()
        table = torch.arange(self.experts, device="cuda") if self.map is None else self.map.to(torch.int64)
        return torch.where(ids < self.experts, table[ids.clamp(max=self.experts - 1)], -1)

    def reference(self):
        """Slot rows (f64, NaN where no expert) and token rows; activations rounded to bf16 as the kernels do."""
        local = self.local_ids()
        rows = torch.full((local.numel(), self.hidden), float("nan"), dtype=torch.float64, device="cuda")
        for e in local.unique().tolist():
            if e < 0:
                continue
            slots = (local == e).nonzero().flatten()
            both = self.x[slots // self.top_k].double() @ self.w13[e].double().T
            gate, up = both.split(self.inter, -1)
            act = (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)
            rows[slots] = act.double() @ self.w2[e].double().T
        weighted = rows.nan_to_num(0.0).view(self.tokens, self.top_k, self.hidden) * self.weights.double()[..., None]
        return rows, weighted.sum(1)

    def buffers(self):
        slots = self.tokens * self.top_k
        act = poison(slots, self.inter, dtype=torch.bfloat16)
        return act, poison(slots, self.hidden, dtype=torch.float32), poison(self.tokens, self.hidden, dtype=torch.bfloat16)

    def sizes(self):
        return self.tokens, self.top_k, self.experts, self.local, self.hidden, self.inter


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
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, BF16)
    exact = poison(*out.shape, dtype=torch.float32)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, exact, tokens, top_k, experts, local, hidden, F32)
    assert torch.equal(exact.to(torch.bfloat16), out), "combine: f32 token rows, rounded, are not the bf16 ones"
    return rows, out


def counters_for(lib, local):
    return torch.zeros(lib.raw("moe_experts_tensor_counters", local), dtype=torch.int32, device="cuda")


def run_tensor(lib, case, buckets=False):
    """The one launch on warpgroup products, over listed slots or with each expert's slots in a bucket, shuffled."""
    act, rows, out = case.buffers()
    tokens, top_k, experts, local, hidden, inter = case.sizes()
    slots, counters = tokens * top_k, counters_for(lib, local)
    if buckets:
        listed, counts = poison(local, tokens, dtype=torch.int32), counters[lib.raw("moe_experts_tensor_counts") :]
        places = tokens
        of_slot = case.local_ids()
        for e in of_slot.unique().tolist():
            mine = (of_slot == e).nonzero().flatten()
            if e >= 0:
                listed[e, : mine.numel()] = mine[torch.randperm(mine.numel(), device="cuda")].to(torch.int32)
                counts[e] = mine.numel()
    else:
        counts, listed, places = poison(local, dtype=torch.int32), poison(local, slots, dtype=torch.int32), slots
        lib.launch("moe_any_list_slots", case.ids, case.map, slots, experts, local, counts, listed)
    lib.launch("moe_experts_tensor", case.x, case.w13, case.w2, listed, counts, places, act, rows, counters, tokens, top_k, experts, local, hidden, inter)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, BF16)
    assert (counters == 0).all(), "tensor: counters are not left zero"
    return rows, out


def expect_close(name, case, got):
    rows, out = got
    ref_rows, ref_out = case.reference()
    present = case.local_ids() >= 0
    assert rows[~present].isnan().all(), f"{name}: rows of absent slots were written"
    if present.any():
        error = rel_error(rows[present], ref_rows[present])
        assert error < 5e-4, f"{name}: slot rows are off by {error}"
    error = rel_error(out, ref_out) if present.any() else out.float().abs().max().nan_to_num(1.0).item()
    assert error < 4e-3, f"{name}: token rows are off by {error}"
    return error


def with_padding(case):
    """The last rows are padding, and some slots of the others are absent."""
    ids = ids_back(case.ids)
    ids[-max(1, case.tokens // 4) :] = NO_EXPERT
    ids[torch.rand(ids.shape, device="cuda") < 0.2] = NO_EXPERT
    case.ids = ids_tensor(ids)
    return case


def half_map(experts):
    """Every other expert lives here, in reversed order; the rest is elsewhere."""
    table = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
    here = torch.arange(0, experts, 2, device="cuda").flip(0)
    table[here] = torch.arange(here.numel(), dtype=torch.int32, device="cuda")
    return table, here.numel()


def cases(token_counts):
    """(name, case) over shapes and the situations that break kernels."""
    for shape in SHAPES:
        for tokens in token_counts:
            yield f"{shape} T={tokens}", Case(tokens, shape)
        tokens = token_counts[-1]
        yield f"{shape} T={tokens} padding", with_padding(Case(tokens, shape))
        yield f"{shape} all padding", Case(3, shape, ids=torch.full((3, shape[1]), NO_EXPERT))
        table, local = half_map(shape[0])
        yield f"{shape} T={tokens} expert_map", Case(tokens, shape, expert_map=table, local=local)
        ids = torch.rand(tokens, shape[0]).topk(shape[1], -1).indices
        ids[ids == shape[0] - 1] = 0
        ids[:, 0] = shape[0] - 1
        yield f"{shape} T={tokens} overloaded", Case(tokens, shape, ids=ids)
        ids[:, -1] = shape[0] + 7
        yield f"{shape} T={tokens} ids out of range", Case(tokens, shape, ids=ids)


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
    for tokens, shape in itertools.product(sized((1, 5, 77), (1, 9)), [*SHAPES, (24, 12, 128, 64)]):
        case = with_padding(Case(tokens, shape)) if tokens > 1 else Case(tokens, shape)
        rows, _ = run_grouped(lib, case)
        top_k, experts, local, hidden = shape[1], shape[0], case.local, shape[2]
        residual, gain = torch.randn(tokens, hidden, device="cuda"), torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
        sums, want, got = residual.clone(), torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16), residual.clone()
        delta, out = poison(tokens, hidden, dtype=torch.float32), poison(tokens, hidden, dtype=torch.bfloat16)
        lib.launch("moe_combine", rows, case.ids, case.weights, None, delta, tokens, top_k, experts, local, hidden, F32)
        lib.launch("moe_add_rms_norm", delta, sums, gain, 1e-6, want, tokens, hidden)
        lib.launch("moe_combine_add_rms_norm", rows, case.ids, case.weights, None, out, tokens, top_k, experts, local, hidden, BF16, got, gain, 1e-6)
        assert torch.equal(got, sums) and torch.equal(out, want), f"{shape} T={tokens}: combine with norm differs"


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
    ap.add_argument("library")
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "experts.json"))
    ap.add_argument("--no-bench", action="store_true")
    ap.add_argument("--only", choices=[function.__name__ for function in CHECKS], help="run this check alone")
    ap.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024")
    ap.add_argument("--skews", default="0,0.5,1")
    ap.add_argument("--kernels", help="time these only, by name, with commas")
    ap.add_argument("--no-checks", action="store_true")
    args = ap.parse_args()
    lib = Library(args.library)
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
