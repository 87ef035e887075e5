"""Checks the router kernel (gate product, scoring, top-k in one launch) against float64, then times it.

  python tests/cuda/router.py LIBRARY [--no-bench] [--only CHECK]

TINY=1: few and small shapes, for compute-sanitizer.
"""
import argparse

import torch

from library import Library, NO_EXPERT, Routing, UNWATCHED, graph_us, ids_back, ids_tensor, poison, rel_error, sized

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


def run(lib, x, gate, top_k, scoring="softmax", bias=None, gate_bias=None, raw=False, renormalize=True, scale=1.0, cap=0.0, valid=None, shared=0, routing=UNWATCHED):
    tokens, experts = x.shape[0], gate.shape[0]
    logits = poison(tokens, experts, dtype=torch.float32)
    slots, all_experts = top_k + shared, experts + shared
    ids, weights = poison(tokens, slots, dtype=torch.int32), poison(tokens, slots, dtype=torch.float32)
    lib.launch("moe_gate_route", x, gate, gate_bias, bias, valid, logits, ids, weights, tokens, x.shape[1],
               experts, top_k, SCORINGS.index(scoring), int(raw), int(renormalize), scale, cap, counts := torch.zeros(all_experts, dtype=torch.int32, device="cuda"),
               buckets := poison(all_experts, tokens, dtype=torch.int32), None, 0, shared, 0.75, routing)
    check_buckets(ids_back(ids), counts, buckets)
    return logits, ids_back(ids), weights


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
    """Forced rows get the forced experts, with their own weights or those of the free choice; the others choose freely."""
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
        assert lib.refused("moe_gate_route", *none, 1, hidden, experts, top_k, scoring, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, UNWATCHED), (hidden, experts, top_k)


CHECKS = [check_shapes, check_ties_and_padding, check_ties_and_padding_of_a_prompt, check_shared_experts, check_watched, check_forced, check_balance, check_refusals]


def bench(lib):
    gates = [torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(512)]
    print(f"{'router, T':<12} {'us':>8}")
    for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 8192, 32768):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        logits = torch.empty(tokens, 128, device="cuda")
        ids, weights = torch.empty(tokens, 8, device="cuda", dtype=torch.int32), torch.empty(tokens, 8, device="cuda")
        call = lambda g: lib.launch("moe_gate_route", x, g, None, None, None, logits, ids, weights, tokens, 2048, 128, 8, 0, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, UNWATCHED)
        print(f"{tokens:<12} {graph_us([lambda g=g: call(g) for g in gates]):>8.2f}")


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("library")
    ap.add_argument("--no-bench", action="store_true")
    ap.add_argument("--only", choices=[check.__name__ for check in CHECKS], help="run this check alone")
    args = ap.parse_args()
    lib = Library(args.library)
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
