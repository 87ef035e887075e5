"""Checks moe_experts_wide and the sums of its bf16 rows; run by experts.py."""
import torch

from expert_cases import SHAPES, Case, cases, counters_for, expect_close, expect_counts_cleared, list_slots, with_padding
from library import BF16, F32, ids_back, poison, sized

CHECKS = []
BOUNDS = dict(bound=4e-3, each=1.2e-2)  # rows are rounded to bf16: 1.7e-3


def check(function):
    CHECKS.append(function)
    return function


def run_wide(lib, case, buckets=False, counters=None):
    """Slot rows (bf16) and token rows of the one launch, over listed slots or each expert's slots in a bucket, shuffled."""
    act, rows, out = case.buffers(rows=torch.bfloat16)
    tokens, top_k, experts, local, hidden, inter = case.sizes()
    counters = counters_for(lib, local) if counters is None else counters
    listed, counts, places = list_slots(lib, case, counters, buckets)
    lib.launch("moe_experts_wide", case.x, case.w13, case.w2, listed, counts, places, act, rows, counters, tokens, top_k, experts, local, hidden, inter)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, BF16, BF16)
    expect_counts_cleared(lib, counters, local)
    return rows, out


def same(got, want):
    """Whether rows and sums are equal, rows of absent slots, which are NaN, too."""
    return torch.equal(got[0].nan_to_num(7.0), want[0].nan_to_num(7.0)) and torch.equal(got[1], want[1])


@check
def wide_matches_float64(lib):
    worst = 0.0
    for name, case in cases(sized([1, 40, 257, 1024, 3000], [1, 40, 300])):
        got = run_wide(lib, case)
        worst = max(worst, expect_close(f"wide {name}", case, got, **BOUNDS))
        assert same(run_wide(lib, case, buckets=True), got), f"wide {name}: shuffled buckets differ from listed slots"
    print(f"  wide: worst error of token rows {worst:.2e}")


@check
def wide_repeats_on_shared_counters(lib):
    """Launches of several sizes in turn, tiles of several heights among them."""
    shape = SHAPES[0]
    counters = counters_for(lib, shape[0])
    sizes = [Case(tokens, shape) for tokens in sized((700, 3000, 33, 1500), (40, 200))]
    sizes.append(with_padding(Case(sized(2000, 90), shape)))
    first = [run_wide(lib, case, counters=counters) for case in sizes]
    for _ in range(sized(15, 2)):
        for case, want in zip(sizes, first):
            assert same(run_wide(lib, case, counters=counters), want), f"wide T={case.tokens}: runs differ"


@check
def wide_tiles_of_every_height(lib):
    """Experts of 1 to 600 rows, 7 apart, in one launch: every number of columns and every end of a tile."""
    counts = torch.arange(1, sized(600, 130), sized(7, 21))
    ids = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    ids = ids[torch.randperm(ids.numel())][:, None]
    for hidden, inter in sized(((1024, 448), (64, 768), (2048, 64)), ((64, 128),)):
        case = Case(ids.shape[0], (counts.numel(), 1, hidden, inter), ids=ids)
        expect_close(f"wide H={hidden} I={inter}", case, run_wide(lib, case), **BOUNDS)


@check
def wide_rows_do_not_depend_on_the_batch(lib):
    shape = SHAPES[0]
    case = Case(sized(5000, 200), shape)
    whole, _ = run_wide(lib, case)
    for tokens in sized((1, 40, 200, 700, 2000), (1, 40)):
        part = Case(tokens, shape, ids=ids_back(case.ids)[:tokens])
        part.x, part.w13, part.w2 = case.x[:tokens].contiguous(), case.w13, case.w2
        rows, _ = run_wide(lib, part)
        assert torch.equal(rows, whole[: rows.shape[0]]), f"wide: rows of {tokens} tokens differ from those among {case.tokens}"


@check
def sums_of_bf16_rows_are_those_of_f32_rows(lib):
    for tokens in sized((1, 5, 77, 1000), (1, 9)):
        for shape in [*SHAPES, (24, 12, 128, 64)]:
            case = with_padding(Case(tokens, shape)) if tokens > 1 else Case(tokens, shape)
            experts, top_k, hidden, _ = shape
            short = torch.randn(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
            short[case.local_ids() < 0] = float("nan")
            gain, before = torch.randn(hidden, device="cuda", dtype=torch.bfloat16), torch.randn(tokens, hidden, device="cuda")
            got = []
            for rows, code in ((short, BF16), (short.float(), F32)):
                residual = before.clone()
                exact, out = poison(tokens, hidden, dtype=torch.float32), poison(tokens, hidden, dtype=torch.bfloat16)
                normed = torch.empty_like(out)
                sizes = tokens, top_k, experts, case.local, hidden, code
                lib.launch("moe_combine", rows, case.ids, case.weights, None, exact, *sizes, F32)
                lib.launch("moe_combine", rows, case.ids, case.weights, None, out, *sizes, BF16)
                lib.launch("moe_combine_add_rms_norm", rows, case.ids, case.weights, None, normed, *sizes, BF16, residual, gain, 1e-6)
                got.append((exact, out, normed, residual))
            assert all(torch.equal(a, b) for a, b in zip(*got)), f"{shape} T={tokens}: sums of bf16 rows differ"
            assert not got[0][0].isnan().any(), f"{shape} T={tokens}: a row of an absent slot was added"


@check
def wide_sizes_that_do_not_fit_are_refused(lib):
    none = [None] * 5
    for tokens, top_k, local, hidden, inter in ((4, 2, 8, 96, 64), (4, 2, 8, 64, 100), (-1, 2, 8, 64, 64), (4, 0, 8, 64, 64), (4, 2, 0, 64, 64)):
        assert lib.refused("moe_experts_wide", *none, 4, *none[:3], tokens, top_k, 8, local, hidden, inter), (tokens, top_k, local, hidden, inter)
    assert lib.refused("moe_experts_wide", *none, 4, *none[:3], 4096, 2, 4096, 4096, 64, 64), "a table of experts that does not fit"
    assert lib.raw("moe_experts_wide", *none, 4, *none[:3], 0, 2, 8, 8, 64, 64, None) == 0, "no tokens is no error"
    sums = [None] * 5
    assert lib.refused("moe_combine", *sums, 4, 2, 8, 8, 68, BF16, BF16), "rows of bf16 that are no multiple of 16 bytes"
    assert lib.refused("moe_combine", *sums, 4, 2, 8, 8, 64, 2, BF16), "rows of another dtype"
