"""Checks attention of prompts and of decoding rows beside each other; run by decode.py."""

import torch
from check_attention import Paged, angles
from kernels import Out, attention_workspace, call, randn, rel, sized, u32
from library import BF16, F32


def decode_runs_beside_prompts():
    """Head norm and cache write of prompts, their attention on some SMs, and decoding rows beside it: the bits of one after the other."""
    heads, kv, d, decoding = 32, 4, 128, sized(200, 6)
    contexts = torch.randint(0, sized(1500, 100), (decoding,)).tolist()
    prompts = sized([(0, 700), (300, 250), (0, 5)], [(0, 40), (30, 20), (0, 5)])
    paged = Paged([p + 1 for p in contexts] + [s + n for s, n in prompts], kv, d, 16)
    rows = decoding + sum(n for _, n in prompts)
    qkv, gains, (cos, sin) = randn(rows, (heads + 2 * kv) * d, dtype=torch.float32), (randn(d), randn(d)), angles(rows, d)
    slots = [paged.slot(s, p) for s, p in enumerate(contexts)]
    positions, starts = list(contexts), [decoding]
    for i, (start, n) in enumerate(prompts):
        positions += range(start, start + n)
        slots += [paged.slot(decoding + i, p) for p in range(start, start + n)]
        starts.append(starts[-1] + n)
    slots, positions, starts, tables = u32(slots), u32(positions), u32(starts), paged.table[decoding:].contiguous()
    counters, q = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.empty(rows, heads, d, dtype=torch.bfloat16, device="cuda")
    before, results = (paged.k.clone(), paged.v.clone()), []
    for blocks, shares in sized(((0, 660), (66, 660), (40, 1320), (1, 132), (131, 2000)), ((0, 40), (8, 40))):
        work = balanced_workspace(d, shares)
        for repeat in range(3 if blocks else 1):
            paged.k.copy_(before[0]), paged.v.copy_(before[1])
            out = Out((rows, heads * d), torch.bfloat16)
            q.fill_(float("nan"))
            tail = slice(decoding, rows)
            call("moe_qk_norm_rope_cache", qkv[tail], *gains, 1e-6, cos[tail], sin[tail], None, slots[tail], q[tail], paged.k, paged.v,
                 BF16, F32, BF16, rows - decoding, heads, kv, d, 16, paged.num_blocks * 16)
            call("moe_attention_prefill_wgmma_beside", q, paged.k, paged.v, starts, positions, tables, out.t, BF16, BF16, rows, len(prompts),
                 paged.max_blocks, heads, kv, d, d, d, paged.num_blocks, 16, d**-0.5, 0, 0, counters, None, 1, blocks)
            call("moe_attention_decode_balanced", qkv, *gains, 1e-6, cos, sin, None, slots, positions, paged.table, paged.max_blocks,
                 paged.k, paged.v, out.t, work, decoding, heads, kv, d, 16, d**-0.5, 0, shares, int(blocks > 0))
            torch.cuda.synchronize()
            out.check_guard()
            results.append((blocks, shares, out.t, paged.k.clone(), paged.v.clone()))
    _, shares, want, k, v = results[0]
    for blocks, count, got, keys, values in results:
        assert torch.equal(keys, k) and torch.equal(values, v), f"{blocks} blocks: the caches differ"
        assert torch.equal(got[decoding:], want[decoding:]), f"{blocks} blocks: prompts differ"
        assert rel(got, want) < 4e-3, f"{blocks} blocks, {count} shares: {rel(got, want)}"
        assert count != shares or torch.equal(got, want), f"{blocks} blocks: decoding rows differ"


def decode_runs_beside_prompts():
    """Head norm and cache write of prompts, their attention on some SMs, and decoding rows beside it: the bits of one after the other."""
    heads, kv, d, decoding = 32, 4, 128, sized(200, 6)
    contexts = torch.randint(0, sized(1500, 100), (decoding,)).tolist()
    prompts = sized([(0, 700), (300, 250), (0, 5)], [(0, 40), (30, 20), (0, 5)])
    paged = Paged([p + 1 for p in contexts] + [s + n for s, n in prompts], kv, d, 16)
    rows = decoding + sum(n for _, n in prompts)
    qkv, gains, (cos, sin) = randn(rows, (heads + 2 * kv) * d, dtype=torch.float32), (randn(d), randn(d)), angles(rows, d)
    slots = [paged.slot(s, p) for s, p in enumerate(contexts)]
    positions, starts = list(contexts), [decoding]
    for i, (start, n) in enumerate(prompts):
        positions += range(start, start + n)
        slots += [paged.slot(decoding + i, p) for p in range(start, start + n)]
        starts.append(starts[-1] + n)
    slots, positions, starts, tables = u32(slots), u32(positions), u32(starts), paged.table[decoding:].contiguous()
    counters, q = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.empty(rows, heads, d, dtype=torch.bfloat16, device="cuda")
    before, results = (paged.k.clone(), paged.v.clone()), []
    for blocks, splits in sized(((0, 1), (66, 1), (1, 1), (0, 2), (40, 2), (131, 2), (0, 8), (66, 8), (0, 16), (66, 16)), ((0, 1), (8, 1), (0, 16), (8, 16))):
        work = attention_workspace(decoding, heads, kv, d, splits)
        for repeat in range(3 if blocks else 1):
            paged.k.copy_(before[0]), paged.v.copy_(before[1])
            out = Out((rows, heads * d), torch.bfloat16)
            q.fill_(float("nan"))
            tail = slice(decoding, rows)
            call("moe_qk_norm_rope_cache", qkv[tail], *gains, 1e-6, cos[tail], sin[tail], None, slots[tail], q[tail], paged.k, paged.v,
                 BF16, F32, BF16, rows - decoding, heads, kv, d, 16, paged.num_blocks * 16)
            call("moe_attention_prefill_wgmma_beside", q, paged.k, paged.v, starts, positions, tables, out.t, BF16, BF16, rows, len(prompts),
                 paged.max_blocks, heads, kv, d, d, d, paged.num_blocks, 16, d**-0.5, 0, 0, counters, None, 1, blocks)
            call("moe_attention_decode_beside", qkv, *gains, 1e-6, cos, sin, None, slots, positions, paged.table, paged.max_blocks,
                 paged.k, paged.v, out.t, work, decoding, heads, kv, d, 16, d**-0.5, 0, splits, int(blocks > 0))
            torch.cuda.synchronize()
            out.check_guard()
            results.append((blocks, splits, out.t, paged.k.clone(), paged.v.clone()))
    apart = {splits: (out, k, v) for blocks, splits, out, k, v in results if blocks == 0}
    for blocks, splits, *got in results:
        assert all(torch.equal(a, b) for a, b in zip(got, apart[splits])), f"prompts on {blocks} SMs, {splits} splits: other bits"
        assert rel(got[0], apart[1][0]) < 4e-3, f"{splits} splits: {rel(got[0], apart[1][0])}"


CHECKS = [decode_runs_beside_prompts]
