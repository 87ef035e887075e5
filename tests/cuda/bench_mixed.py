"""The launches of a mixed step, 256 decoding rows beside some prompt rows, whose lengths are those of tests/bench/mixed_workload.py:
attention alone and together."""

import math
import random

import torch
from bench_decode import BLOCK, D, H, HKV, HQ, QKV, report
from kernels import attention_splits, attention_workspace, balanced_workspace, call, graph_us, randn, u32
from library import BF16, F32

LAYERS = 4  # of caches: 1.7 GB
PROMPTS = [(0, 620), (0, 300)]  # (start, rows)


def contexts(count):
    """Positions of running requests: the prompt and a part of the answer."""
    rng = random.Random(1)
    length = lambda median, sigma, least, most: min(most, max(least, round(median * math.exp(sigma * rng.gauss(0, 1)))))
    return [length(512, 0.8, 128, 2048) + rng.randrange(length(256, 0.5, 128, 512)) for _ in range(count)]


class Step:
    """Decoding rows at `positions`, then the rows of `prompts`, over pages in random order."""

    def __init__(self, positions, prompts, layers=LAYERS):
        self.decoding, self.prompts = len(positions), len(prompts)
        ends = [p + 1 for p in positions] + [s + n for s, n in prompts]
        per = [-(-n // BLOCK) for n in ends]
        self.blocks, self.max_blocks = sum(per), max(per)
        order, table = torch.randperm(self.blocks).tolist(), torch.zeros(len(ends), self.max_blocks, dtype=torch.int64)
        for s, n in enumerate(per):
            table[s, :n] = torch.tensor([order.pop() for _ in range(n)])
        slot = lambda s, p: int(table[s, p // BLOCK]) * BLOCK + p % BLOCK
        at, slots, starts = list(positions), [slot(s, p) for s, p in enumerate(positions)], [self.decoding]
        for i, (start, n) in enumerate(prompts):
            at += range(start, start + n)
            slots += [slot(self.decoding + i, p) for p in range(start, start + n)]
            starts.append(starts[-1] + n)
        self.rows = len(at)
        self.positions, self.slots, self.starts = u32(at), u32(slots), u32(starts)
        self.table = table.to(torch.int32).cuda()
        self.tables = self.table[self.decoding :].contiguous()
        kv = lambda: torch.empty(self.blocks, HKV, BLOCK, D, dtype=torch.bfloat16, device="cuda").normal_()
        self.kv = [(kv(), kv()) for _ in range(layers)]
        angle = torch.rand(self.rows, D // 2, device="cuda") * 6
        self.angles, self.gains = (torch.cos(angle), torch.sin(angle)), (randn(D), randn(D))
        self.qkv, self.q = randn(self.rows, QKV, dtype=torch.float32), randn(self.rows, HQ, D)
        self.out = torch.empty(self.rows, HQ * D, dtype=torch.bfloat16, device="cuda")
        self.counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.bytes = sum(positions) * HKV * D * 4 + self.decoding * QKV * 4
        self.flops = 4 * D * HQ * sum(n * s + n * (n + 1) // 2 for s, n in prompts)

    def decode(self, layer, splits, work, name="moe_attention_decode", more=()):
        call(name, self.qkv, *self.gains, 1e-6, *self.angles, None, self.slots, self.positions, self.table, self.max_blocks, *self.kv[layer],
             self.out, work, self.decoding, HQ, HKV, D, BLOCK, D**-0.5, 0, splits, *more)

    def rope(self, layer):
        tail = slice(self.decoding, self.rows)
        call("moe_qk_norm_rope_cache", self.qkv[tail], *self.gains, 1e-6, *(t[tail] for t in self.angles), None, self.slots[tail], self.q[tail],
             *self.kv[layer], BF16, F32, BF16, self.rows - self.decoding, HQ, HKV, D, BLOCK, self.blocks * BLOCK)

    def prompt(self, layer, blocks=0):
        call("moe_attention_prefill_wgmma_beside", self.q, *self.kv[layer], self.starts, self.positions, self.tables, self.out, BF16, BF16,
             self.rows, self.prompts, self.max_blocks, HQ, HKV, D, D, D, self.blocks, BLOCK, D**-0.5, 0, 0, self.counters, None, 1, blocks)


def us_of(run, layers=LAYERS):
    return graph_us([lambda i=i: run(i % layers) for i in range(2 * layers)])


def decode_uneven(rows):
    """Decoding rows of uneven lengths: splits of each sequence, and shares of all."""
    for count in (64, 128, 256):
        step = Step(contexts(count), [])
        for splits in (1, 2, 4):
            work = attention_workspace(count, HQ, HKV, D, splits)
            report(rows, f"decode {count} uneven splits={splits}", us_of(lambda i: step.decode(i, splits, work)), step.bytes)
        for shares in (528, 660, 1056, 1320, 2112):
            work = balanced_workspace(D, shares)
            us = us_of(lambda i: step.decode(i, shares, work, "moe_attention_decode_balanced", (0,)))
            report(rows, f"decode {count} uneven shares={shares}", us, step.bytes)
        del step


def prompts_beside(rows):
    """Head norm and attention of prompt rows and attention of decoding rows, one after the other and beside each other."""
    step = Step(contexts(256), PROMPTS)
    splits = attention_splits(256, HQ, HKV)
    old, new = attention_workspace(256, HQ, HKV, D, splits), {n: balanced_workspace(D, n) for n in (528, 1056, 1584, 2112)}
    parts = {"head norm": step.rope, "prompts": step.prompt, "decode": lambda i: step.decode(i, splits, old)}
    for name, run in parts.items():
        report(rows, f"mixed {name} alone", us_of(run), 0.0, step.flops if name == "prompts" else 0.0)

    def apart(i):
        step.decode(i, splits, old), step.rope(i), step.prompt(i)

    def beside(i, blocks, shares):
        step.rope(i), step.prompt(i, blocks), step.decode(i, shares, new[shares], "moe_attention_decode_balanced", (int(blocks > 0),))

    report(rows, "mixed one after the other", us_of(apart), step.bytes)
    for blocks, shares in ((0, 528), (33, 1056), (44, 1056), (66, 1056), (66, 2112), (88, 1056), (100, 1056), (66, 1584)):
        report(rows, f"mixed prompts on {blocks} SMs, shares={shares}", us_of(lambda i: beside(i, blocks, shares)), step.bytes)


BENCHES = [decode_uneven, prompts_beside]
