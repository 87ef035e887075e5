"""The launches of a mixed step, 256 decoding rows next to some prompt rows, with the lengths of
tests/bench/mixed_workload.py: attention alone and together."""

import math
import random

import torch
from bench_decode import BLOCK, D, H, HKV, HQ, QKV, report
from bench_prefill import Layer
from kernels import attention_workspace, call, graph_us, randn, u32
from library import BF16, F32

LAYERS = 4  # of caches: 1.7 GB


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

    def decode(self, layer, splits, work, beside=0):
        call("moe_attention_decode_overlapped", self.qkv, *self.gains, 1e-6, *self.angles, None, self.slots, self.positions, self.table, self.max_blocks, *self.kv[layer],
             self.out, work, self.decoding, HQ, HKV, D, BLOCK, D**-0.5, 0, splits, self.blocks * BLOCK, beside)

    def rope(self, layer):
        tail = slice(self.decoding, self.rows)
        call("moe_qk_norm_rope_cache", self.qkv[tail], *self.gains, 1e-6, *(t[tail] for t in self.angles), None, self.slots[tail], self.q[tail],
             *self.kv[layer], BF16, F32, BF16, self.rows - self.decoding, HQ, HKV, D, BLOCK, self.blocks * BLOCK)

    def prompt(self, layer, blocks=0):
        call("moe_attention_prefill_wgmma_on_blocks", self.q, *self.kv[layer], self.starts, self.positions, self.tables, self.out, BF16, BF16,
             self.rows, self.prompts, self.max_blocks, HQ, HKV, D, D, D, self.blocks, BLOCK, D**-0.5, 0, 0, self.counters, None, 1, blocks)


def us_of(run, layers=LAYERS):
    return graph_us([lambda i=i: run(i % layers) for i in range(2 * layers)])


def decode_uneven(rows):
    """Decoding rows of uneven lengths by splits of each sequence, in any order and the longest first."""
    for count in (64, 128, 256):
        for order, positions in (("", contexts(count)), (" longest first", sorted(contexts(count), reverse=True))):
            step = Step(positions, [])
            for splits in (1, 2, 4):
                work = attention_workspace(count, HQ, HKV, D, splits)
                report(rows, f"decode {count} uneven{order} splits={splits}", us_of(lambda i: step.decode(i, splits, work)), step.bytes)
            del step


class MixedAttention:
    """The attention launches of a layer, one after the other or at the same time."""

    def __init__(self, step):
        self.step, self.work = step, {splits: attention_workspace(step.decoding, HQ, HKV, D, splits) for splits in (1, 2, 4)}

    def apart(self, i, splits):
        self.step.decode(i, splits, self.work[splits]), self.step.rope(i), self.step.prompt(i)

    def beside(self, i, splits, blocks):
        self.step.rope(i), self.step.prompt(i, blocks), self.step.decode(i, splits, self.work[splits], 1)


def prompts_beside(rows):
    """Head norm and attention of prompt rows and attention of decoding rows, one after the other and at the same
    time."""
    for order, positions in (("", contexts(256)), (" longest first,", sorted(contexts(256), reverse=True))):
        for prompts in ([(0, 200)], [(0, 620), (0, 300)], [(0, 1500)]):
            step = Step(positions, prompts)
            attention, name = MixedAttention(step), f"mixed {sum(n for _, n in prompts)} rows,{order}"
            if not order:
                for part, run in {"head norm": step.rope, "prompts": step.prompt}.items():
                    report(rows, f"{name} {part} alone", us_of(run), 0.0, step.flops if part == "prompts" else 0.0)
            for splits in (1, 2):
                report(rows, f"{name} one after the other, splits={splits}", us_of(lambda i: attention.apart(i, splits)), step.bytes)
            for splits, blocks in ((1, 33), (1, 50), (1, 66), (1, 80), (1, 100), (2, 66)):
                report(rows, f"{name} prompts on {blocks} SMs, splits={splits}", us_of(lambda i: attention.beside(i, splits, blocks)), step.bytes)
            del step


def mixed_layer(rows, layer_of=Layer, name=""):
    """All launches of a layer of a mixed step, which find in L2 what those before them left there; decoding rows as the
    engine has them, the longest first."""
    for prompts in ([(0, 310), (0, 350)], [(0, 620), (0, 300)]):
        step = Step(sorted(contexts(256), reverse=True), prompts)
        attention, layer = MixedAttention(step), layer_of(step.rows)
        for tensor in (layer.rows, layer.delta, layer.att, layer.weights):
            tensor.normal_()

        def run(i, attend):
            layer.product_qkv(i), attend(i), layer.product_o(i), layer.add_norm(i), layer.experts(i), layer.combine(i)

        for form, attend in {"one after the other": lambda i: attention.apart(i, 2), "beside": lambda i: attention.beside(i, 1, 66)}.items():
            report(rows, f"layer of 256 + {step.rows - 256} rows, {name}{form}", us_of(lambda i: run(i, attend)), step.bytes)
        del step, layer


BENCHES = [decode_uneven, prompts_beside, mixed_layer]
