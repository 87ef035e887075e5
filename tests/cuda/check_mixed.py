"""Checks attention of prompts and of decoding rows beside each other; run by decode.py."""

import random

import torch
from check_attention import Paged, angles
from kernels import Out, attention_workspace, call, randn, rel, sized, u32
from library import BF16, F32

BLOCK = 16


class Mixed:
    """Decoding rows at positions `contexts`, then the rows of `prompts` (first position, rows), and three rows of padding."""

    def __init__(self, contexts, prompts, heads, kv, d):
        self.heads, self.kv, self.d, self.decoding, self.prompts = heads, kv, d, len(contexts), len(prompts)
        self.paged = paged = Paged([p + 1 for p in contexts] + [s + n for s, n in prompts], kv, d, BLOCK)
        slots, at, starts = [paged.slot(s, p) for s, p in enumerate(contexts)], list(contexts), [self.decoding]
        for i, (start, n) in enumerate(prompts):
            at += range(start, start + n)
            slots += [paged.slot(self.decoding + i, p) for p in range(start, start + n)]
            starts.append(starts[-1] + n)
        self.slots, self.positions, self.starts = u32(slots + [0xFFFFFFFF] * 3), u32(at + [0] * 3), u32(starts)
        self.rows = starts[-1] + 3
        self.tables = paged.table[self.decoding :].contiguous()
        self.source, self.gains, self.angles = randn(self.rows, (heads + 2 * kv) * d, dtype=torch.float32), (randn(d), randn(d)), angles(self.rows, d)
        self.qkv, self.q = torch.empty_like(self.source), torch.empty(self.rows, heads, d, dtype=torch.bfloat16, device="cuda")
        self.counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.before, self.out = (paged.k.clone(), paged.v.clone()), Out((self.rows, heads * d), torch.bfloat16)

    def launches(self, blocks, splits, work):
        """One step as the plan has it: qkv, which arrives just before; the launches; what follows them on the stream."""
        paged, d, tail = self.paged, self.d, slice(self.decoding, self.rows)
        paged.k.copy_(self.before[0]), paged.v.copy_(self.before[1])
        self.out.t.fill_(float("nan")), self.q.fill_(float("nan")), self.qkv.fill_(float("nan"))
        self.qkv.copy_(self.source)
        call("moe_qk_norm_rope_cache", self.qkv[tail], *self.gains, 1e-6, *(t[tail] for t in self.angles), None, self.slots[tail], self.q[tail],
             paged.k, paged.v, BF16, F32, BF16, self.rows - self.decoding, self.heads, self.kv, d, BLOCK, paged.num_blocks * BLOCK)
        call("moe_attention_prefill_wgmma_beside", self.q, paged.k, paged.v, self.starts, self.positions, self.tables, self.out.t, BF16, BF16,
             self.rows, self.prompts, paged.max_blocks, self.heads, self.kv, d, d, d, paged.num_blocks, BLOCK, d**-0.5, 0, 0, self.counters, None, 1, blocks)
        call("moe_attention_decode_beside", self.qkv, *self.gains, 1e-6, *self.angles, None, self.slots, self.positions, paged.table, paged.max_blocks,
             paged.k, paged.v, self.out.t, work, self.decoding, self.heads, self.kv, d, BLOCK, d**-0.5, 0, splits,
             paged.num_blocks * BLOCK, int(blocks > 0))
        return self.out.t.clone(), paged.k.clone(), paged.v.clone()


def random_step():
    """Few to many decoding rows, empty to long, and prompts of all kinds: alone, many short ones, one of them long."""
    heads, kv, d = random.choice(((32, 4, 128), (32, 8, 64), (16, 2, 128)))
    contexts = [random.choice((0, random.randrange(70), random.randrange(sized(2500, 100)))) for _ in range(random.choice(sized((1, 30, 200, 256), (1, 6))))]
    longest = random.choice(sized((3, 40, 700), (3, 40)))
    prompts = [(random.randrange(300), random.randrange(1, longest + 1)) for _ in range(random.choice((1, 2, 5)))]
    return Mixed(contexts, prompts, heads, kv, d)


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want))


def decode_runs_beside_prompts():
    """On random steps: the bits of one after the other, with qkv that arrives just before and a reader just behind, eagerly and replayed."""
    random.seed(int(torch.randint(1 << 30, ()).item()))
    for _ in range(sized(25, 2)):
        step = random_step()
        for splits in random.sample((1, 2, 4, 8, 16), 2):
            work = attention_workspace(step.decoding, step.heads, step.kv, step.d, splits)
            want = step.launches(0, splits, work)
            whole = step.launches(0, 1, work)
            case = f"{step.decoding} + {step.rows} rows, {step.heads} heads of {step.d}, {splits} splits"
            assert rel(want[0][:-3], whole[0][:-3]) < 4e-3, f"{case}: {rel(want[0][:-3], whole[0][:-3])}"
            for blocks in (66, random.randrange(1, 132)):
                for _ in range(sized(4, 1)):
                    assert same(step.launches(blocks, splits, work), want), f"{case}, prompts on {blocks} SMs: other bits"
            step.out.check_guard()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = step.launches(66, splits, work)
        for _ in range(sized(4, 1)):
            graph.replay()
            torch.cuda.synchronize()
            assert same(got, want), f"{case}: a replayed graph has other bits"


CHECKS = [decode_runs_beside_prompts]
