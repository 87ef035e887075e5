"""Checks of the kernels over peer memory with all ranks on one GPU, a stream each: what needs no second GPU.

  MOE_KERNELS_SO=libmoe_kernels.so python peers.py [NAME ..]

Every rank's blocks must be resident at once, with the blocks of the next launch that a rank begins early. So sizes are
small, and calls of several launches are left to tests/gpu/nccl.sh, which needs several GPUs.
"""
import ctypes
import random
import sys
import time

from peer_group import MAX_RANKS, Group, Needs, PeerArray, PeerTokens, scatter, sum_of  # before torch

import torch
from kernels import LIB, rel, randn
from library import BF16, F32, NO_EXPERT, filled, sized

NORM_BOUND = 4e-3


def shares_of(rows, hidden, ranks):
    """The rank that keeps each row."""
    most = (16 << 20) // 16 // (2 * (ranks - 1) * (hidden // 8)) * ranks
    launches = -(-rows // most)
    each = -(-rows // launches)
    owners = []
    for begin in range(0, rows, each):
        count = min(each, rows - begin)
        share = -(-count // ranks)
        owners += [row // share for row in range(count)]
    return torch.tensor(owners, device="cuda")


def share(group, rows, hidden, weight, residuals, whole):
    """One sub-layer's end on every rank; `whole` [rows, hidden] is the residual stream that all keep together."""
    ranks = group.ranks
    partial = [randn(rows, hidden, dtype=torch.float32) for _ in range(ranks)]
    outs = [torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
    torch.cuda.synchronize()
    for rank in random.sample(range(ranks), ranks):
        group.launch(rank, "moe_peer_share_add_rms_norm", partial[rank], residuals[rank], weight, 1e-6, outs[rank], rows, hidden)
    owners = shares_of(rows, hidden, ranks)
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        total += torch.where((owners == rank)[:, None], partial[rank], partial[rank].bfloat16().float())
    whole += total
    return owners, outs


def sums_and_norms_are_shared():
    cases = [(2, 1, 8), (2, 2, 2048), (2, 3, 2048), (2, 5, 264), (2, 64, 1000), (2, 257, 2048), (2, 264, 4096), (2, 260, 16384),
             (3, 2, 512), (3, 100, 2056), (4, 3, 2048), (4, 130, 2048), (8, 5, 264), (8, 200, 5120)]
    for ranks, rows, hidden in sized(cases, [(2, 1, 8), (2, 5, 264), (2, 65, 128), (3, 4, 512)]):
        group, weight = Group(ranks), randn(hidden)
        whole = randn(rows, hidden, scale=3.0, dtype=torch.float32)
        residuals = [whole.clone() for _ in range(ranks)]
        before = whole.clone()
        for _ in range(3):  # both halves of the buffers, and one again
            owners, outs = share(group, rows, hidden, weight, residuals, whole)
            group.finish()
            x = whole.double()
            want = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()
            for rank in range(ranks):
                assert rel(outs[rank], want) < NORM_BOUND, (ranks, rows, hidden, rank, rel(outs[rank], want))
                assert torch.equal(outs[rank], outs[0]), (ranks, rows, hidden, rank)
                own = owners == rank
                assert torch.equal(residuals[rank][own], whole[own]), (ranks, rows, hidden, rank)
                assert torch.equal(residuals[rank][~own], before[~own]), "another rank's rows were written"


def words_that_look_empty_arrive():
    """All ones mark an empty slot; sums of that pattern are NaNs and come out as such."""
    group, weight, rows, hidden = Group(2), torch.ones(256, dtype=torch.bfloat16, device="cuda"), 4, 256
    partial = [torch.ones(rows, hidden, device="cuda") for _ in range(2)]
    for p in partial:
        p.view(torch.int32)[1:3, ::3] = -1
    residuals = [torch.zeros(rows, hidden, device="cuda") for _ in range(2)]
    outs = [torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for rank in range(2):
        group.launch(rank, "moe_peer_share_add_rms_norm", partial[rank], residuals[rank], weight, 1e-6, outs[rank], rows, hidden)
    group.finish()
    for out in outs:
        assert bool(torch.isnan(out[1:3]).all()) and bool((out[[0, 3]] == 1).all())


def sums_reach_all_ranks():
    """Sums in one shot and in two, for all numbers of ranks: alone, and with residual stream and norm."""
    cases = [(2, 1, 2048), (2, 64, 2048), (3, 5, 264), (3, 200, 1024), (4, 8, 2048), (4, 64, 2048), (5, 3, 512), (8, 2, 2048), (8, 16, 2048)]
    for ranks, rows, hidden in sized(cases, [(2, 1, 64), (3, 4, 264), (8, 16, 2048)]):
        group, weight = Group(ranks), randn(hidden)
        residuals = [r.clone() for r in [randn(rows, hidden, scale=3.0, dtype=torch.float32)] * ranks]
        for call in range(3):  # both halves of the buffers, and one again
            dtype = (torch.float32, torch.bfloat16)[call % 2]
            partial = [randn(rows, hidden, dtype=torch.float32) for _ in range(ranks)]
            # The address is not aligned, and the size is no whole number of slots.
            alone = [randn(rows * hidden + 8, dtype=dtype)[call:call + rows * hidden - 3] for _ in range(ranks)]
            sums = [torch.empty(rows * hidden - 3, dtype=dtype, device="cuda") for _ in range(ranks)]
            outs = [torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
            want = residuals[0] + sum_of(partial)
            torch.cuda.synchronize()
            for r in random.sample(range(ranks), ranks):
                group.launch(r, "moe_peer_all_reduce_add_rms_norm", partial[r], residuals[r], weight, 1e-6, outs[r], rows, hidden)
            group.finish()
            for r in random.sample(range(ranks), ranks):
                code, count = F32 if dtype == torch.float32 else BF16, ctypes.c_size_t(sums[r].numel())
                group.launch(r, "moe_peer_all_reduce", alone[r], sums[r], code, count)
            group.finish()
            norm = want.double() / torch.sqrt((want.double() ** 2).mean(-1, keepdim=True) + 1e-6) * weight.double()
            for r in range(ranks):
                assert torch.equal(residuals[r], want) and torch.equal(sums[r], sum_of(alone).to(dtype)), (ranks, rows, hidden, r, dtype)
                assert rel(outs[r], norm) < NORM_BOUND and torch.equal(outs[r], outs[0]), (ranks, rows, hidden, r, "norm")


def gather_and_scatter(group, counts, hidden, top_k, seed):
    """Each rank's rows, ids and weights to all, and sums back."""
    torch.manual_seed(seed)
    ranks, total = group.ranks, sum(counts)
    special = torch.tensor([NO_EXPERT, NO_EXPERT - 1, 0x7FFF7FFF, 0xFFFF, 0xFFFF0000, 3, 77, 0], device="cuda")
    rows = [randn(n, hidden) for n in counts]
    ids = [special[torch.randint(0, 8, (n, top_k), device="cuda")].to(torch.int32) for n in counts]
    weights = [randn(n, top_k, dtype=torch.float32) for n in counts]
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    sums = [randn(total, hidden, dtype=dtype) for _ in range(ranks)]
    kinds = (hidden, torch.bfloat16), (top_k, torch.int32), (top_k, torch.float32)
    outs = [[torch.full((total, w), 7, dtype=t, device="cuda") for w, t in kinds] for _ in range(ranks)]
    owns = [torch.full((n, hidden), float("nan"), device="cuda") for n in counts]
    torch.cuda.synchronize()
    per_row = hidden // 8, top_k // 2, top_k // 4
    for rank in random.sample(range(ranks), ranks):
        arrays = (PeerArray * 3)()
        for array, part, out, slots in zip(arrays, (rows, ids, weights), outs[rank], per_row):
            every = [n * slots for n in counts] + [0] * (MAX_RANKS - ranks)
            array.input, array.out = part[rank].data_ptr(), out.data_ptr()
            array.slots, array.exact = (ctypes.c_uint32 * MAX_RANKS)(*every), int(out.dtype == torch.int32)
        group.launch(rank, "moe_peer_all_gather", arrays, 3, None)
    group.finish()
    for rank in random.sample(range(ranks), ranks):
        scatter(group, rank, sums[rank], owns[rank], counts, None)
    group.finish()
    expected = [torch.cat(parts) for parts in (rows, ids, weights)]
    added = sum_of(sums)
    for rank in range(ranks):
        for want, got in zip(expected, outs[rank]):
            assert torch.equal(want, got), (counts, hidden, rank, want.dtype)
        first = sum(counts[:rank])
        assert torch.equal(owns[rank], added[first:first + counts[rank]]), (counts, hidden, rank)


def gathers_and_scatters_take_uneven_counts():
    cases = [([1, 1], 64), ([0, 0], 64), ([3, 0], 2048), ([0, 1], 8), ([17, 100], 264), ([300, 299], 2048), ([1000, 40], 2048),
             ([0, 1000], 2048), ([1900, 1899], 1024), ([2, 0, 5], 1024), ([0, 7, 0, 1], 2048), ([1, 2, 0, 4, 5, 0, 7, 8], 512)]
    for counts, hidden in sized(cases, [([0, 0], 64), ([3, 0], 264), ([17, 40], 64), ([2, 0, 5], 128)]):
        group = Group(len(counts))
        for seed in range(3):
            gather_and_scatter(group, counts, hidden, 8, seed)


def only_needed_rows_travel():
    """Rows to the owners of their experts, and the sums of these back; some rows have no expert, some ranks no row."""
    experts, top_k = 12, 3
    cases = [([1, 1], 64), ([40, 0], 264), ([300, 200], 2048), ([1900, 1899], 1024), ([5, 0, 9], 512), ([9, 8, 7, 6], 64)]
    for counts, hidden in sized(cases, [([1, 1], 64), ([40, 0], 264), ([5, 0, 9], 128)]):
        group, ranks, total = Group(len(counts)), len(counts), sum(counts)
        owners = torch.randint(0, ranks, (experts,), device="cuda")
        ids = torch.randint(0, experts, (total, top_k), device="cuda")
        ids[torch.rand(total, top_k, device="cuda") < 0.4] = NO_EXPERT
        valid = ids != NO_EXPERT
        needed = torch.stack([((owners[ids.clamp_max(experts - 1)] == r) & valid).any(1) for r in range(ranks)])
        words, owner_words = ids.to(torch.int32), owners.to(torch.int32)
        rows = [randn(n, hidden) for n in counts]
        # A rank's sum for a row that it does not need is zero.
        sums = [randn(total, hidden, dtype=torch.float32) * needed[r][:, None] for r in range(ranks)]
        narrow = [part.bfloat16() for part in sums]
        outs = [torch.full((total, hidden), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
        backs = [torch.full((n, hidden), float("nan"), device="cuda") for n in counts]
        narrow_backs = [torch.full((n, hidden), float("nan"), device="cuda") for n in counts]
        torch.cuda.synchronize()
        for _ in range(3):
            for r in random.sample(range(ranks), ranks):
                array, needs = (PeerArray * 1)(), Needs(words.data_ptr(), owner_words.data_ptr(), top_k, experts, hidden // 8)
                array[0].input, array[0].out = rows[r].data_ptr(), outs[r].data_ptr()
                array[0].slots = (ctypes.c_uint32 * MAX_RANKS)(*[n * hidden // 8 for n in counts])
                group.launch(r, "moe_peer_all_gather", array, 1, ctypes.byref(needs))
            group.finish()
            for parts, to in ((sums, backs), (narrow, narrow_backs)):
                for r in random.sample(range(ranks), ranks):
                    row_slots = hidden * parts[r].element_size() // 16
                    needs = Needs(words.data_ptr(), owner_words.data_ptr(), top_k, experts, row_slots)
                    scatter(group, r, parts[r], to[r], counts, ctypes.byref(needs))
                group.finish()
        everything, added, narrow_added = torch.cat(rows), sum_of(sums), sum_of(narrow)
        for r in range(ranks):
            assert torch.equal(outs[r][needed[r]], everything[needed[r]]), (counts, hidden, r)
            away = ~needed[r]
            own = torch.arange(sum(counts[:r]), sum(counts[:r + 1]), device="cuda")
            away[own] = False
            away[[sum(counts[:p]) for p in range(ranks) if counts[p]]] = False  # first slots are always sent
            if hidden == 2048:
                assert bool((outs[r][away] == 7).all()), f"rows that nobody needs have come: {counts}"
            assert torch.equal(backs[r], added[own]), (counts, hidden, r)
            assert torch.equal(narrow_backs[r], narrow_added[own]), (counts, hidden, r)


def rows_are_dispatched(group, counts, hidden, top_k, chosen):
    """One dispatch on every rank. `chosen` are the experts that tokens choose; of 12 experts, some ranks own none."""
    experts, ranks, total = 12, group.ranks, sum(counts)
    owners = torch.randint(0, ranks, (experts,), device="cuda")
    ids = torch.randint(0, max(len(chosen), 1), (total, top_k), device="cuda")
    ids = torch.tensor(chosen or [NO_EXPERT], device="cuda")[ids]
    ids[torch.rand(total, top_k, device="cuda") < 0.4] = NO_EXPERT
    valid = ids != NO_EXPERT
    needed = torch.stack([((owners[ids.clamp_max(experts - 1)] == r) & valid).any(1) for r in range(ranks)])
    words, owner_words, weights = ids.to(torch.int32), owners.to(torch.int32), torch.rand(total, top_k, device="cuda")
    rows = randn(total, hidden)
    ends = [sum(counts[:r + 1]) for r in range(ranks)]
    own = [slice(end - n, end) for end, n in zip(ends, counts)]
    outs = [torch.full((total, hidden), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
    all_ids = [torch.zeros(total, top_k, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    all_weights = [torch.full((total, top_k), float("nan"), device="cuda") for _ in range(ranks)]
    keep = [(rows[s].clone(), words[s].clone(), weights[s].clone()) for s in own]
    torch.cuda.synchronize()
    for r in random.sample(range(ranks), ranks):
        tokens = PeerTokens(keep[r][0].data_ptr(), outs[r].data_ptr(), keep[r][1].data_ptr(), all_ids[r].data_ptr(), keep[r][2].data_ptr(),
                            all_weights[r].data_ptr(), owner_words.data_ptr(), (ctypes.c_uint32 * MAX_RANKS)(*counts), hidden // 8,
                            top_k, experts)
        group.launch(r, "moe_peer_dispatch", ctypes.byref(tokens))
    group.finish()
    for r in range(ranks):
        what = (counts, hidden, top_k, chosen, r)
        assert torch.equal(all_ids[r], words) and torch.equal(all_weights[r], weights), what
        there = needed[r].clone()
        there[own[r]] = True
        assert torch.equal(outs[r][there], rows[there]), what
        assert bool((outs[r][~there] == 7.0).all()), ("rows that nobody needs were written", what)


def rows_reach_the_ranks_that_need_them():
    cases = [([1, 1], 64, 8), ([0, 0], 64, 2), ([1, 0], 8, 1), ([0, 3], 264, 3), ([40, 17], 2048, 8), ([100, 90], 7168, 8),
             ([5, 0, 9], 512, 32), ([9, 8, 7, 6], 2048, 2), ([1, 2, 0, 4, 5, 0, 7, 8], 512, 5)]
    for counts, hidden, top_k in sized(cases, [([1, 1], 64, 8), ([0, 3], 264, 3), ([5, 0, 9], 128, 1)]):
        group = Group(len(counts))
        for chosen in (list(range(12)), [3], [], list(range(12))):  # all experts, one for all tokens, none
            rows_are_dispatched(group, counts, hidden, top_k, chosen)


def slots_of(group, counts, hidden, top_k, experts):
    """What each rank's experts leave for the rows of all: slot rows, ids, weights, and which experts are where."""
    ranks, total = group.ranks, sum(counts)
    owners = torch.randint(0, ranks, (experts,), device="cuda")
    ids = torch.randint(0, experts, (total, top_k), device="cuda")
    ids[torch.rand(total, top_k, device="cuda") < 0.2] = NO_EXPERT
    weights = torch.rand(total, top_k, device="cuda")
    maps = [torch.where(owners == r, torch.cumsum(owners == r, 0) - 1, -1).to(torch.int32) for r in range(ranks)]
    here = [((owners[ids.clamp_max(experts - 1)] == r) & (ids != NO_EXPERT)) for r in range(ranks)]
    # Rows of slots on other ranks may contain anything.
    rows = [torch.where(h[..., None], torch.randn(total, top_k, hidden, device="cuda"), float("nan")) for h in here]
    return rows, ids.to(torch.int32), weights, maps, here, owners.to(torch.int32)


def slots_become_sums_of_ranks_and_norms():
    """The bits of sum, scatter, and addition with norm; some ranks without a row, slots without an expert."""
    cases = [([1, 1], 64, 8), ([3, 0], 2048, 8), ([0, 1], 8, 2), ([17, 40], 264, 3), ([100, 90], 2048, 8), ([5, 0, 9], 1000, 1),
             ([9, 8, 7, 6], 4096, 8), ([1, 2, 0, 4, 3, 0, 2, 1], 2304, 32), ([30, 20], 2048, 0)]
    for counts, hidden, top_k in sized(cases, [([1, 1], 64, 8), ([3, 0], 264, 2), ([5, 0, 9], 128, 0)]):
        group, experts, eps = Group(len(counts)), 12, 1e-6
        ranks, total, weight = group.ranks, sum(counts), randn(hidden)
        words = (ctypes.c_uint32 * MAX_RANKS)(*counts)
        for again in range(3):  # both halves of the buffers, and one again
            rows, ids, weights, maps, here, owners = slots_of(group, counts, hidden, max(top_k, 1), experts)
            if top_k == 0:
                sums = [torch.randn(total, hidden, device="cuda") for _ in range(ranks)]
            else:
                sums = [torch.full((total, hidden), float("nan"), device="cuda") for _ in range(ranks)]
                for r in range(ranks):
                    LIB.launch("moe_combine", rows[r], ids, weights, maps[r], sums[r], total, top_k, experts, experts, hidden, F32, F32)
            first = [sum(counts[:r]) for r in range(ranks)]
            deltas = [sum_of(sums)[first[r]:first[r] + counts[r]].contiguous() for r in range(ranks)]
            before = [torch.randn(n, hidden, device="cuda") for n in counts]
            want = [b.clone() for b in before]
            normed = [torch.empty(n, hidden, dtype=torch.bfloat16, device="cuda") for n in counts]
            for r in range(ranks):
                LIB.launch("moe_add_rms_norm", deltas[r], want[r], weight, eps, normed[r], counts[r], hidden)
            outs = [torch.full((n, hidden), float("nan"), dtype=torch.bfloat16, device="cuda") for n in counts]
            torch.cuda.synchronize()
            for r in random.sample(range(ranks), ranks):
                routed = (sums[r], None, None, None) if top_k == 0 else (rows[r], ids, weights, maps[r])
                args = filled("moe_combine", *routed, None, total, max(top_k, 1), experts, experts, hidden, F32, F32)
                needs = None
                if top_k > 0 and again == 1:  # what is left out is zero, so the bits are the same
                    needs = ctypes.byref(Needs(ids.data_ptr(), owners.data_ptr(), top_k, experts, 0))
                group.launch(r, "moe_peer_combine_add_rms_norm", ctypes.byref(args), words, needs, before[r], weight, eps, outs[r])
            group.finish()
            for r in range(ranks):
                assert torch.equal(before[r], want[r]), (counts, hidden, top_k, r, "residual")
                assert torch.equal(outs[r], normed[r]), (counts, hidden, top_k, r, "norm")
            if top_k > 0:
                added = sum(torch.where(h[..., None], x.double(), 0.0).mul(weights.double()[..., None]).sum(1) for x, h in zip(rows, here))
                for r in range(ranks):
                    assert counts[r] == 0 or rel(deltas[r], added[first[r]:first[r] + counts[r]]) < 1e-5


def calls_follow_each_other_without_a_wait():
    """Ranks run at different speeds: thousands of calls of every kind and size, whose results add up."""
    group, hidden = Group(2), 512
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    sizes = [1, 130, 7, 260]
    partial = [[torch.full((n, hidden), float(rank + 1), device="cuda") for n in sizes] for rank in range(2)]
    residuals = [[torch.zeros(n, hidden, device="cuda") for n in sizes] for _ in range(2)]
    out = [torch.empty(260, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    small = [torch.ones(2048, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    calls = sized(2000, 40)
    for call in range(calls):
        size = call % len(sizes)
        for rank in range(2):
            group.launch(rank, "moe_peer_share_add_rms_norm", partial[rank][size], residuals[rank][size], weight, 1e-6, out[rank],
                         sizes[size], hidden)
            if call % 3 == 0:
                count = ctypes.c_size_t(2048)
                group.launch(rank, "moe_peer_all_reduce", small[rank], out[rank], 0, count)
    group.finish()
    for size, rows in enumerate(sizes):
        owners = shares_of(rows, hidden, 2)
        for rank in range(2):
            kept = residuals[rank][size]
            total = 3.0 * (calls // len(sizes))
            assert bool((kept[owners == rank] == total).all()) and bool((kept[owners != rank] == 0).all()), (rows, rank)


def a_rank_that_stays_away_ends_the_wait():
    for name in ("share", "gather", "scatter", "slots", "dispatch"):
        group = Group(2, seconds=0.3)
        x, out = torch.zeros(300, 256, device="cuda"), torch.zeros(300, 256, dtype=torch.bfloat16, device="cuda")
        start = time.time()
        if name == "share":
            group.launch(0, "moe_peer_share_add_rms_norm", x, x, out[0], 1e-6, out, 300, 256)
        elif name == "gather":
            arrays = (PeerArray * 1)()
            arrays[0] = PeerArray(x.data_ptr(), x.data_ptr(), (ctypes.c_uint32 * MAX_RANKS)(64, 64), 0)
            group.launch(0, "moe_peer_all_gather", arrays, 1, None)
        elif name == "dispatch":
            words, weights = torch.zeros(100, 2, dtype=torch.int32, device="cuda"), torch.zeros(100, 2, device="cuda")
            tokens = PeerTokens(x.data_ptr(), x.data_ptr(), words.data_ptr(), words.data_ptr(), weights.data_ptr(), weights.data_ptr(),
                                words.data_ptr(), (ctypes.c_uint32 * MAX_RANKS)(50, 50), 32, 2, 1)
            group.launch(0, "moe_peer_dispatch", ctypes.byref(tokens))
        elif name == "slots":
            args = filled("moe_combine", x, None, None, None, None, 100, 1, 1, 1, 256, F32, F32)
            group.launch(0, "moe_peer_combine_add_rms_norm", ctypes.byref(args), (ctypes.c_uint32 * MAX_RANKS)(50, 50), None, x, out[0], 1e-6, out)
        else:
            group.launch(0, "moe_peer_reduce_scatter", x, 0, x, (ctypes.c_uint32 * MAX_RANKS)(64, 64), None)
        torch.cuda.synchronize()
        assert 0.2 < time.time() - start < 5, time.time() - start
        assert group.status[0, 0] == 2, f"{name}: {group.status[0, 0]}"


def sizes_that_cannot_be_are_refused():
    group, x = Group(2), torch.zeros(8, 16, device="cuda")
    out = torch.zeros(8, 16, dtype=torch.bfloat16, device="cuda")
    for rows, hidden in ((-1, 16), (1, 12), (1, 0)):
        code = LIB.raw("moe_peer_share_add_rms_norm", ctypes.byref(group.peers[0]), x, x, out, 1e-6, out, rows, hidden, None)
        assert code == 1, (rows, hidden, code)
    # Refused: a wrong number of rows, more slots than a warp has lanes, slots in bf16, rows beyond the buffers.
    for tokens, counts, top_k, rows, hidden in ((3, (1, 1), 1, F32, 16), (2, (1, 1), 33, F32, 16), (2, (1, 1), 1, BF16, 16),
                                               (2, (1, 1), 1, F32, 12), (1 << 20, (1 << 20, 0), 1, F32, 16)):
        args = filled("moe_combine", x, x, x, None, None, tokens, top_k, 1, 1, hidden, rows, F32)
        code = LIB.raw("moe_peer_combine_add_rms_norm", ctypes.byref(group.peers[0]), ctypes.byref(args),
                       (ctypes.c_uint32 * MAX_RANKS)(*counts), None, x, out, 1e-6, out, None)
        assert code == 1, (tokens, counts, top_k, hidden, code)


CHECKS = [sums_and_norms_are_shared, sums_reach_all_ranks, words_that_look_empty_arrive, gathers_and_scatters_take_uneven_counts, only_needed_rows_travel,
          rows_reach_the_ranks_that_need_them,
          slots_become_sums_of_ranks_and_norms, calls_follow_each_other_without_a_wait, a_rank_that_stays_away_ends_the_wait, sizes_that_cannot_be_are_refused]

if __name__ == "__main__":
    failed = 0
    for check in CHECKS:
        if sys.argv[1:] and check.__name__ not in sys.argv[1:]:
            continue
        begin = time.time()
        try:
            check()
            print(f"ok      {check.__name__} ({time.time() - begin:.1f} s)", flush=True)
        except Exception as e:
            print(f"FAILED  {check.__name__}: {e!r}"[:400], flush=True)
            failed = 1
    sys.exit(failed)
