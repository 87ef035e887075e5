"""Checks the router kernel (gate product, scoring, top-k in one launch) against float64, then times it.

  python tests/cuda/router.py LIBRARY [--no-bench] [--only CHECK]

TINY=1: few and small shapes, for compute-sanitizer.
"""
import argparse
import ctypes

import torch

from library import Copies, Library, NO_EXPERT, Routing, UNCOPIED, UNWATCHED, copy_of_row, graph_us, ids_back, ids_tensor, poison, rel_error, sized

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
# T, H, E, K
FULL = [(1, 2048, 128, 8), (3, 64, 5, 2), (70, 320, 60, 6), (9, 1024, 200, 4), (130, 7168, 256, 8), (33, 512, 384, 8),
        (12, 128, 1000, 32), (1, 64, 1, 1), (1024, 2048, 128, 8), (513, 320, 60, 6), (700, 1024, 200, 4), (1030, 512, 384, 8), (600, 128, 1000, 32)]
SHAPES = sized(FULL, [(3, 64, 5, 2), (19, 320, 60, 6), (5, 128, 1000, 32), (1, 64, 1, 1)])


def score(logits, scoring):
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def run(lib, x, gate, top_k, scoring="softmax", bias=None, gate_bias=None, raw=False, renormalize=True, scale=1.0, cap=0.0, valid=None, shared=0, routing=UNWATCHED, copies=UNCOPIED, slots_of=None):
    tokens, experts = x.shape[0], gate.shape[0]
    logits = poison(tokens, experts, dtype=torch.float32)
    slots, all_experts = top_k + shared, experts + shared if slots_of is None else slots_of.numel()
    ids, weights = poison(tokens, slots, dtype=torch.int32), poison(tokens, slots, dtype=torch.float32)
    lib.launch("moe_gate_route", x, gate, gate_bias, bias, valid, logits, ids, weights, tokens, x.shape[1],
               experts, top_k, SCORINGS.index(scoring), int(raw), int(renormalize), scale, cap, counts := torch.zeros(all_experts, dtype=torch.int32, device="cuda"),
               buckets := poison(all_experts, tokens, dtype=torch.int32), slots_of, 0, shared, 0.75, routing, copies)
    chosen = ids_back(ids)
    check_buckets(chosen if slots_of is None else locals_of(chosen, slots_of), counts, buckets)
    return logits, ids_back(ids), weights


def locals_of(ids, slots_of):
    """Local experts by an expert map, NO_EXPERT elsewhere."""
    local = slots_of.long()[ids.clamp(max=slots_of.numel() - 1)]
    return torch.where((ids == NO_EXPERT) | (local < 0), NO_EXPERT, local)


def check_buckets(ids, counts, buckets):
    """Each expert's slots, in any order, and nothing behind them."""
    chosen = ids.flatten()
    assert torch.equal(counts.long(), torch.bincount(chosen[chosen != NO_EXPERT], minlength=counts.numel())), "counts of the buckets"
    filled = torch.arange(buckets.shape[1], device="cuda") < counts[:, None]
    assert (buckets[~filled] == 0x5A5A5A5A).all(), "wrote behind a bucket"
    expert = torch.arange(counts.numel(), device="cuda")[:, None].expand_as(buckets)[filled]
    assert torch.equal(chosen[buckets[filled].long()], expert) and buckets[filled].unique().numel() == filled.sum(), "slots of the buckets"


def expected(logits, top_k, scoring, bias, raw, renormalize, scale, cap):
    """Ids and weights of f64 logits, by stable sorting: ties go to the lower id."""
    logits = cap * torch.tanh(logits / cap) if cap else logits
    values = logits if raw else score(logits, scoring)
    keys = values if bias is None else values + bias.double()
    ids = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = values.gather(1, ids)
    if raw:
        weights = score(weights, scoring)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scale, keys


def expect_same_choice(name, logits, got_ids, got_weights, top_k, **how):
    ids, weights, keys = expected(logits.double(), top_k, **how)
    # A choice may differ only where the keys are as good as equal.
    gap = (keys.gather(1, ids) - keys.gather(1, got_ids)).abs()
    assert gap.max() < 2e-6 * keys.abs().max(), f"{name}: chose {got_ids[gap.max(1).values.argmax()].tolist()}"
    assert (got_ids.sort(-1).values.diff(dim=-1) > 0).all(), f"{name}: an id occurs twice"
    same = (ids == got_ids).all(-1)
    assert same.float().mean() > 0.9, f"{name}: only {same.float().mean():.3f} of the rows agree"
    error = rel_error(got_weights[same], weights[same])
    assert error < 1e-5, f"{name}: weights are off by {error}"


def check_shapes(lib):
    for tokens, hidden, experts, top_k in SHAPES:
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        gate = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
        bias = torch.randn(experts, device="cuda") * 0.1
        gate_bias = torch.randn(experts, device="cuda", dtype=torch.bfloat16)
        for scoring in SCORINGS:
            for raw, use_bias, cap in ((False, False, 0.0), (False, True, 0.0), (True, False, 0.0), (False, False, 1.5)):
                how = dict(scoring=scoring, bias=bias if use_bias else None, raw=raw, renormalize=not use_bias, scale=2.5 if use_bias else 1.0, cap=cap)
                logits, ids, weights = run(lib, x, gate, top_k, gate_bias=gate_bias if cap else None, **how)
                ref = x.double() @ gate.double().T + (gate_bias.double() if cap else 0)
                name = f"T={tokens} H={hidden} E={experts} K={top_k} {scoring} raw={raw} bias={use_bias}"
                assert rel_error(logits, ref) < 2e-6, f"{name}: logits are off by {rel_error(logits, ref)}"
                expect_same_choice(name, logits, ids, weights, top_k, **how)


def check_ties_and_padding(lib, tokens=20):
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16).expand(96, 256).contiguous()
    valid = torch.tensor([13], dtype=torch.int32, device="cuda")
    _, ids, weights = run(lib, x, gate, 6, valid=valid)
    assert (ids[:13] == torch.arange(6, device="cuda")).all(), "equal keys do not go to the lower ids"
    assert torch.allclose(weights[:13], torch.full_like(weights[:13], 1 / 6)), "equal experts differ in weight"
    assert (ids[13:] == NO_EXPERT).all() and (weights[13:] == 0).all(), "padding rows have experts"


def check_ties_and_padding_of_a_prompt(lib):
    check_ties_and_padding(lib, 600)


def check_shared_experts(lib):
    """They are every live token's last slots, and nothing else changes."""
    for tokens, hidden, experts, top_k in ((1, 64, 5, 2), (19, 320, 60, 6), (600, 128, 64, 6)):
        x, gate = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (tokens, experts))
        valid = torch.tensor([max(tokens - 3, 1)], dtype=torch.int32, device="cuda")
        live = slice(0, valid.item())
        for how in (dict(), dict(renormalize=False, scale=2.5), dict(scoring="sigmoid")):
            _, want_ids, want = run(lib, x, gate, top_k, valid=valid, **how)
            _, ids, weights = run(lib, x, gate, top_k, valid=valid, shared=2, **how)
            assert torch.equal(ids[:, :top_k], want_ids) and torch.equal(weights[:, :top_k], want), f"T={tokens}: the chosen experts changed"
            assert (ids[live, top_k:] == torch.arange(experts, experts + 2, device="cuda")).all() and (weights[live, top_k:] == 0.75).all()
            assert (ids[valid.item() :] == NO_EXPERT).all() and (weights[valid.item() :] == 0).all(), "padding rows have experts"


def check_watched(lib):
    """A step that is watched: choices and their counts are left, padding's are not, and nothing else changes."""
    for tokens, hidden, experts, top_k in SHAPES:
        x, gate = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (tokens, experts))
        live, layers, layer = max(tokens - 2, 1), 3, 1
        valid = torch.tensor([live], dtype=torch.int32, device="cuda")
        for how in (dict(), dict(renormalize=False, scale=2.5), dict(scoring="sigmoid")):
            logits, ids, weights = run(lib, x, gate, top_k, valid=valid, **how)
            heat = torch.full((experts,), -3, dtype=torch.int32, device="cuda")  # the next three wrap around
            routed = poison(tokens, layers, top_k, dtype=torch.int32)
            watch = Routing(heat, routed.data_ptr() + 4 * layer * top_k, None, layers * top_k)
            again = run(lib, x, gate, top_k, valid=valid, routing=watch, **how)
            assert all(map(torch.equal, (logits, ids, weights), again)), "watching changes the routing"
            assert torch.equal(ids_back(routed[:live, layer]), ids[:live]), "choices that were left"
            assert (routed[live:] == 0x5A5A5A5A).all() and (routed[:, [0, 2]] == 0x5A5A5A5A).all(), "wrote beside the layer's rows"
            counts = torch.bincount(ids[:live].flatten(), minlength=experts)
            assert torch.equal((heat.long() + 3) & NO_EXPERT, counts), "counts"


def check_copies(lib):
    """Chosen experts become slots of their copies, in ids and lists; weights, and what is left of choices, stay."""
    for tokens, hidden, experts, top_k in SHAPES:
        shared = 1 if top_k < 32 else 0
        x, gate = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (tokens, experts))
        bias = torch.randn(experts, device="cuda") * 0.1
        valid = torch.tensor([max(tokens - 2, 1)], dtype=torch.int32, device="cuda")
        forced = ids_tensor(forced_rows(tokens, experts, top_k))
        for width, hashed, first in ((1, 0, 0), (3, 0, 7), (9, 1, 0), (17, 1, 0xFFFFFFFF)):
            counts = torch.randint(1, width + 1, (experts + shared,), device="cuda")
            has = torch.arange(width, device="cuda") < counts[:, None]
            table = torch.where(has, torch.randperm(has.numel(), device="cuda").view(has.shape), -1)
            # A third of the slots is here.
            slots = has.numel()
            slots_of = torch.full((slots,), -1, dtype=torch.int32, device="cuda")
            here = torch.randperm(slots, device="cuda")[: slots // 3 + 1]
            slots_of[here] = torch.arange(here.numel(), dtype=torch.int32, device="cuda")
            copies = Copies(table.to(torch.int32).contiguous(), hashed, first)
            for how in (dict(), dict(scoring="sigmoid", bias=bias), dict(routing=Routing(None, None, forced, top_k))):
                _, chosen, weights = run(lib, x, gate, top_k, valid=valid, shared=shared, **how)
                heat = torch.zeros(experts, dtype=torch.int32, device="cuda")
                left = poison(tokens, top_k, dtype=torch.int32)
                watch = how.pop("routing", UNWATCHED)
                watch = Routing(heat, left, watch.forced, top_k)
                _, ids, again = run(lib, x, gate, top_k, valid=valid, shared=shared, copies=copies, slots_of=slots_of, routing=watch, **how)
                name = f"T={tokens} E={experts} width={width} hashed={hashed} first={first}"
                rows = (torch.arange(tokens, device="cuda") + first & NO_EXPERT)[:, None]
                known = chosen.clamp(max=experts + shared - 1)
                want = table[known, copy_of_row(rows, known, counts[known], hashed)]
                want = torch.where(chosen == NO_EXPERT, NO_EXPERT, want)
                assert torch.equal(ids, want), f"{name}: slots"
                assert torch.equal(again, weights), f"{name}: weights"
                live = chosen[: valid.item(), :top_k]
                assert torch.equal(ids_back(left[: valid.item()]), live), f"{name}: choices that are left"
                assert torch.equal(heat.long(), torch.bincount(live[live != NO_EXPERT], minlength=experts)), f"{name}: counts"


def forced_rows(tokens, experts, top_k):
    """Random choices for every row but each third, which is free; in one row the middle slot is absent."""
    forced = torch.rand(tokens, experts, device="cuda").topk(top_k, -1).indices
    forced[::3] = NO_EXPERT
    if tokens > 1:
        forced[1, top_k // 2] = NO_EXPERT
    return forced


def compacted(forced):
    """Absent ids behind the others."""
    order = (forced == NO_EXPERT).to(torch.int32).sort(dim=-1, stable=True).indices
    return forced.gather(-1, order)


def check_forced(lib):
    """Forced rows get the forced experts, with these experts' weights or the free choice's; the other rows choose freely."""
    for tokens, hidden, experts, top_k in SHAPES:
        x, gate = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.25 for n in (tokens, experts))
        bias = torch.randn(experts, device="cuda") * 0.1
        for how in (dict(), dict(renormalize=False, scale=2.5), dict(scoring="sigmoid", bias=bias), dict(raw=True), dict(cap=1.5)):
            logits, free_ids, free_weights = run(lib, x, gate, top_k, **how)
            forced = forced_rows(tokens, experts, top_k)
            routed = poison(tokens, top_k, dtype=torch.int32)
            arrays = ids_tensor(forced)
            _, ids, weights = run(lib, x, gate, top_k, routing=Routing(None, routed, arrays, top_k), **how)
            is_free = (forced == NO_EXPERT).all(-1)
            want = torch.where(is_free[:, None], free_ids, compacted(forced))
            assert torch.equal(ids, want) and torch.equal(ids_back(routed), want), f"T={tokens} E={experts} {how}: forced ids"
            assert torch.equal(weights[is_free], free_weights[is_free]), "a free row changed"
            values = logits.double()
            values = 1.5 * torch.tanh(values / 1.5) if "cap" in how else values
            values = values if how.get("raw") else score(values, how.get("scoring", "softmax"))
            has = want != NO_EXPERT
            own = values.gather(1, want.clamp(max=experts - 1))
            own = torch.softmax(own.masked_fill(~has, -float("inf")), -1) if how.get("raw") else own * has
            own = own / own.sum(-1, keepdim=True).clamp_min(1e-20) if how.get("renormalize", True) else own
            error = rel_error(weights, own * how.get("scale", 1.0))
            assert error < 1e-5, f"T={tokens} E={experts} {how}: weights are off by {error}"
            spread = torch.rand(tokens, experts, device="cuda").topk(top_k, -1).indices
            _, ids, weights = run(lib, x, gate, top_k, routing=Routing(None, None, ids_tensor(spread), top_k, True), **how)
            assert torch.equal(ids, spread) and torch.equal(weights, free_weights), "an even spread keeps the weights"


def check_balance(lib):
    """Distinct experts, the same for the same seed and step, others for another."""
    for rows, layers, top_k, experts in ((1, 1, 1, 1), (37, 3, 8, 128), (5, 2, 6, 7), (3, 1, 40, 300)):
        def ids(seed, step, first_row=0, first_layer=0):
            out = poison(rows, layers, top_k, dtype=torch.int32)
            step = torch.tensor([step], dtype=torch.int32, device="cuda")
            lib.launch("moe_balance_ids", step, out, seed, rows, layers, top_k, experts, first_row, first_layer)
            return out.long()
        got = ids(7, 3)
        assert got.min() >= 0 and got.max() < experts and (got.sort(-1).values.diff(dim=-1) > 0).all()
        assert torch.equal(got, ids(7, 3))
        if experts > 7:
            assert not torch.equal(got, ids(8, 3)) and not torch.equal(got, ids(7, 4))
            assert torch.equal(got[1:], ids(7, 3, first_row=1)[:-1]) and torch.equal(got[:, 1:], ids(7, 3, first_layer=1)[:, :-1])


def check_refusals(lib):
    none = [None] * 8
    for hidden, experts, top_k, scoring in ((96, 8, 2, 0), (64, 1025, 2, 0), (64, 8, 9, 0), (64, 64, 33, 0), (64, 8, 2, 3)):
        assert lib.refused("moe_gate_route", *none, 1, hidden, experts, top_k, scoring, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, UNWATCHED, UNCOPIED), (hidden, experts, top_k)
    empty = Copies(torch.zeros(8, 0, dtype=torch.int32, device="cuda"))
    empty.log2phy = torch.zeros(8, dtype=torch.int32, device="cuda")
    assert lib.refused("moe_gate_route", *none, 1, 64, 8, 2, 0, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, UNWATCHED, empty)


CHECKS = [check_shapes, check_ties_and_padding, check_ties_and_padding_of_a_prompt, check_shared_experts, check_watched, check_copies, check_forced, check_balance, check_refusals]


def bench(lib):
    gates = [torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(512)]
    spread = torch.full((128, 17), -1, dtype=torch.int32)
    spread[:, 0], spread[:16, 1] = torch.arange(128), torch.arange(128, 144)
    tables = dict(none=UNCOPIED, sole=Copies(spread[:, :1].contiguous().cuda()), shared=Copies(spread.cuda(), hashed=True))
    ids_of_copies = lambda t, ids, out: lib.launch("moe_any_physical_ids", ids, t.log2phy, ctypes.c_int64(ids.numel()), 8, 128, t.width, ctypes.c_uint32(0), t.hashed, out)
    print(f"{'router, T':<12}" + "".join(f" {name:>8}" for name in tables) + f" {'2 launches':>10} us")
    for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 8192, 32768):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        logits = torch.empty(tokens, 128, device="cuda")
        ids, weights = torch.empty(tokens, 8, device="cuda", dtype=torch.int32), torch.empty(tokens, 8, device="cuda")
        physical = torch.empty_like(ids)

        def call(g, copies=UNCOPIED, then=None):
            lib.launch("moe_gate_route", x, g, None, None, None, logits, ids, weights, tokens, 2048, 128, 8, 0, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, UNWATCHED, copies)
            if then is not None:
                ids_of_copies(then, ids, physical)

        times = [graph_us([lambda g=g: call(g, copies) for g in gates]) for copies in tables.values()]
        times.append(graph_us([lambda g=g: call(g, then=tables["shared"]) for g in gates]))
        print(f"{tokens:<12}" + "".join(f" {us:>8.2f}" for us in times))


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    ap.add_argument("--no-bench", action="store_true")
    ap.add_argument("--only", choices=[check.__name__ for check in CHECKS], help="run this check alone")
    args = ap.parse_args()
    lib = Library(args.so)
    failures = 0
    for check in [check for check in CHECKS if args.only in (None, check.__name__)]:
        try:
            check(lib)
            torch.cuda.synchronize()
            print(f"ok {check.__name__}", flush=True)
        except (AssertionError, RuntimeError) as error:
            failures += 1
            print(f"FAILED {check.__name__}: {error}", flush=True)
    if not args.no_bench:
        bench(lib)
    if failures:
        raise SystemExit(f"{failures} checks failed")


if __name__ == "__main__":
    main()
