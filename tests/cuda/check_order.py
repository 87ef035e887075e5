"""Checks rows in the order of a pack's columns (moe_order_rows), alone and ahead of the experts' products; run by quant_tensor.py."""
import torch

from check_quant_tensor import packs_of, quantised
from check_wide import BOUNDS, same
from expert_cases import Case, cases, counters_for, expect_close, expect_counts_cleared, list_slots
from library import BF16, F32, poison, sized
from quant_pack import INT4_128, INT4_32Z, INT8_128

CHECKS = []
GUARD = 4096


def check(function):
    CHECKS.append(function)
    return function


def orders(experts, columns):
    """[E, K]: which column of x stands at each place."""
    return torch.rand(experts, columns, device="cuda").argsort(-1).to(torch.int32)


def order_slots(lib, case, listed, counts, places, perm):
    """Rows of the slots, with a guard behind them."""
    tokens, top_k, _, local, hidden, _ = case.sizes()
    out = poison(tokens * top_k * hidden + GUARD, dtype=torch.bfloat16)
    lib.launch("moe_order_rows", case.x, perm, listed, counts, places, out, tokens, top_k, hidden, local)
    assert out[tokens * top_k * hidden :].isnan().all(), "wrote behind the rows"
    return out[: tokens * top_k * hidden].view(tokens * top_k, hidden)


@check
def rows_come_in_the_order_of_the_columns(lib):
    """Every row by one order: odd numbers of rows, one block's columns and more than a block has threads for, columns that x does not have."""
    for rows in sized((0, 1, 2, 7, 64, 1001), (0, 1, 5)):
        for columns in sized((8, 64, 200, 2048, 4096, 8192, 18432), (8, 200, 2048)):
            x, perm = torch.randn(rows, columns, device="cuda").to(torch.bfloat16), orders(1, columns)[0]
            lost = torch.rand(columns, device="cuda") < 0.1
            perm[lost] = -1 if columns % 64 else columns
            out = poison(rows * columns + GUARD, dtype=torch.bfloat16)
            lib.launch("moe_order_rows", x, perm, None, None, 0, out, rows, 1, columns, 1)
            want = torch.where(lost, torch.zeros_like(x), x[:, perm.clamp(0, columns - 1).long()])
            got = out[: rows * columns].view(rows, columns)
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), f"{rows} x {columns}"
            assert out[rows * columns :].isnan().all(), f"{rows} x {columns}: wrote behind the rows"


@check
def slots_come_in_the_order_of_their_expert(lib):
    """Padding, ids out of range, an expert map, an overloaded expert, none; slots that stand in no list keep what they had."""
    for name, case in cases(sized([1, 17, 300, 3000], [1, 9])):  # lists of few rows and, of the last, of more than 128
        tokens, top_k, _, local, hidden, _ = case.sizes()
        perm, counters = orders(local, hidden), counters_for(lib, local)
        of = case.local_ids()
        want = case.x.repeat_interleave(top_k, 0).gather(1, perm[of.clamp(min=0)].long())
        for buckets in (False, True):
            counters.zero_()
            got = order_slots(lib, case, *list_slots(lib, case, counters, buckets), perm)
            assert torch.equal(got[of >= 0], want[of >= 0]), f"{name} buckets={buckets}"
            assert got[of < 0].isnan().all(), f"{name} buckets={buckets}: rows of absent slots were written"


def run_ordered(lib, case, perm, wide, buckets):
    """Both products over slots that are tokens, and the sum."""
    tokens, top_k, experts, local, hidden, _ = case.sizes()
    act, rows, out = case.buffers(rows=torch.bfloat16 if wide else torch.float32)
    counters = counters_for(lib, local)
    listed, counts, places = list_slots(lib, case, counters, buckets)
    x = order_slots(lib, case, listed, counts, places, perm)
    name = "moe_quant_experts_wide" if wide else "moe_quant_experts_tensor"
    lib.launch(name, x, *case.packs, listed, counts, places, act, rows, counters, tokens * top_k, 1, experts, 0)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, BF16 if wide else F32, BF16)
    expect_counts_cleared(lib, counters, local)
    return rows, out


class InOrderOfX:
    """Matrices whose columns stand where `perm` says."""

    def __init__(self, w, perm):
        self.w, self.perm = w, perm.long()

    def __getitem__(self, e):
        w = self.w[e]
        return torch.empty_like(w).index_copy_(1, self.perm[e], w)


@check
def ordered_slots_match_float64(lib):
    """Experts each with an order of its own, by the products for few rows and for many."""
    shapes = sized([(128, 8, 2048, 768), (16, 4, 320, 192), (8, 2, 64, 64)], [(8, 2, 64, 64), (5, 1, 320, 192)])
    for scheme in (INT4_128, INT4_32Z, INT8_128):
        for shape in shapes:
            for tokens, wide in sized(((1, False), (8, False), (300, False), (1500, True)), ((1, False), (40, False), (60, True))):
                case = quantised(Case(tokens, shape), packs_of(shape[0], shape, scheme), wide)
                perm = orders(shape[0], shape[2])
                case.w13 = InOrderOfX(case.w13, perm)
                what = f"{scheme.name} {shape} T={tokens} wide={wide}"
                got = run_ordered(lib, case, perm, wide, False)
                assert same(run_ordered(lib, case, perm, wide, True), got), f"{what}: shuffled buckets differ from listed slots"
                expect_close(what, case, got, **(BOUNDS if wide else dict(bound=3e-3)))


@check
def orders_refuse_what_does_not_fit(lib):
    refused = lambda *args: lib.refused("moe_order_rows", None, None, *args)
    assert refused(None, None, 0, None, 4, 1, 100, 1), "columns that are no multiple of 8"
    assert refused(None, None, 0, None, 4, 2, 64, 1) and refused(None, None, 0, None, 4, 1, 64, 2), "slots without lists"
    assert refused(None, None, 0, None, -1, 1, 64, 1) and refused(None, None, -1, None, 4, 1, 64, 1)
    assert refused(None, None, 0, None, 4, 1, 1 << 17, 1), "rows beyond a block's shared memory"
    assert lib.raw("moe_order_rows", None, None, None, None, 0, None, 0, 1, 64, 1, None) == 0, "no rows is no error"
