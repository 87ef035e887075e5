"""Checks that launches which leave rows in FP8 leave the bits of moe_fp8_quantise behind the same launch in bf16."""

import torch
from check_attention import Paged, angles
from check_fp8 import quantise
from kernels import LIB, Out, attention_workspace, call, randn, refuses, sized, u32
from library import BF16, F32, routing

GROUP = 128


class Fp8Out:
    """Poisoned rows and scales, the latter of more lines than rows need."""

    def __init__(self, rows, columns, spare=0):
        self.rows, self.lines = rows, -(-rows // 4) * 4 + spare
        self.q = Out((rows * columns // 4,), torch.int32)
        self.scales = Out((columns // GROUP, self.lines), torch.float32)
        self.columns = columns

    def bytes(self):
        return self.q.t.view(torch.uint8).view(self.rows, self.columns)

    def expect(self, name, want, quads, first=0, zero_from=None):
        """The bits of the bf16 rows `want` from `first` on; rows from `zero_from` on are zeros with a scale of zero."""
        q, scales = quantise(LIB, want, quads)
        assert torch.equal(self.bytes()[first:], q[first:]), f"{name}: bytes differ"
        assert torch.equal(self.scales.t[:, first : self.rows], scales[:, first : self.rows]), f"{name}: scales differ"
        assert bool(self.scales.t[:, self.rows :].isnan().all()), f"{name}: wrote scales of rows that are not there"
        if zero_from is not None:
            assert not self.bytes()[zero_from:].any() and not self.scales.t[:, zero_from : self.rows].any(), f"{name}: padding is not zero"
        self.q.check_guard(), self.scales.check_guard()


def sums_leave_fp8():
    for tokens, hidden, experts, top_k in sized([(1, 128, 8, 2), (70, 384, 8, 3), (300, 2048, 128, 8), (131, 2176, 16, 11), (5000, 2048, 128, 8)], [(1, 128, 8, 2), (70, 2176, 8, 3)]):
        ids, weights = routing(tokens, experts, top_k)
        gain = randn(hidden)
        for code, dtype in ((F32, torch.float32), (BF16, torch.bfloat16)):
            rows, residual = randn(tokens * top_k, hidden, dtype=dtype), randn(tokens, hidden, dtype=torch.float32)
            residual[tokens // 2] *= 1e-20
            args = (rows, ids, weights, None), (tokens, top_k, experts, experts, hidden, code, BF16)
            want, stream = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"), residual.clone()
            call("moe_combine_add_rms_norm", *args[0], want, *args[1], stream, gain, 1e-6)
            for quads in (0, 1):
                out, own = Fp8Out(tokens, hidden, 4 * quads), residual.clone()
                call("moe_combine_add_rms_norm_fp8", *args[0], out.bytes(), *args[1], own, gain, 1e-6, out.scales.t, out.lines, quads)
                name = f"T={tokens} H={hidden} {dtype} quads={quads}"
                out.expect(name, want, quads)
                assert torch.equal(own, stream), f"{name}: residual differs"


def decode_leaves_fp8():
    d = 128
    for heads, kv, splits in sized([(32, 4, 1), (32, 4, 2), (32, 4, 4), (32, 4, 8), (32, 4, 16), (12, 1, 2), (6, 2, 4), (5, 1, 32), (24, 8, 1), (12, 1, 1)], [(32, 4, 2), (5, 1, 1)]):
        positions = torch.randint(0, 700, (sized(37, 5),)).tolist() + [0, 15, 16, 1000]
        rows, padding = len(positions), 3
        paged, qkv = Paged([p + 1 for p in positions], kv, d, 16), randn(rows, (heads + 2 * kv) * d, dtype=torch.float32, scale=2.0)
        slots = [paged.slot(r, p) for r, p in enumerate(positions)]
        slots[-padding:] = [0xFFFFFFFF] * padding
        # A number of rows that leaves whole positions: padding comes last.
        given = qkv, randn(d), randn(d), 1e-6, *angles(rows, d), None, u32(slots), u32(positions), paged.table, paged.max_blocks, paged.k, paged.v
        sizes = attention_workspace(rows, heads, kv, d, splits), rows, heads, kv, d, 16, d**-0.5, 0, splits, paged.num_blocks * 16
        want = torch.empty(rows, heads * d, dtype=torch.bfloat16, device="cuda")
        call("moe_attention_decode", *given, want, *sizes)
        for quads in (0, 1):
            out = Fp8Out(rows, heads * d, 4)
            call("moe_attention_decode_fp8", *given, out.bytes(), *sizes, 0, out.scales.t, out.lines, quads)
            out.expect(f"Hq={heads} Hkv={kv} splits={splits} quads={quads}", want, quads, zero_from=rows - padding)


def prompts_leave_fp8():
    d = 128
    many = [(i * 3, 1 + i % 45) for i in range(70)]
    steps = [(32, 4, [(0, 200)], 0, 0), (32, 4, [(0, 1), (7, 65), (0, 0), (130, 1), (64, 64), (0, 8), (0, 9), (3, 17)], 9, 0), (8, 2, many, 1, 5),
             (12, 4, [(100, 333), (0, 129)], 3, 0), (32, 4, [(0, 5), (9, 2)], 2, 0), (32, 4, [(513, sized(2100, 200))], 0, 0)]
    for heads, kv, chunks, pad, before in steps:
        starts = [before]  # rows before the first are another launch's
        for _, n in chunks:
            starts.append(starts[-1] + n)
        tokens, paged = starts[-1] + pad, Paged([s + n for s, n in chunks], kv, d, 16)
        positions = [0] * before + [s + i for s, n in chunks for i in range(n)] + [0] * pad
        q, counters = randn(tokens, heads, d), torch.zeros(2, dtype=torch.int32, device="cuda")
        want = torch.zeros(tokens, heads * d, dtype=torch.bfloat16, device="cuda")
        given = q, paged.k, paged.v, u32(starts), u32(positions), paged.table
        for invariant in (0, 1):
            sizes = (BF16, BF16, tokens, len(chunks), paged.max_blocks, heads, kv, d, d, d, paged.num_blocks, 16, d**-0.5, 0, invariant, counters, None, 1)
            call("moe_attention_prefill_wgmma", *given, want, *sizes)
            for quads in (0, 1):
                out = Fp8Out(tokens, heads * d)
                call("moe_attention_prefill_wgmma_fp8", *given, out.bytes(), *sizes, 0, out.scales.t, out.lines, quads)
                name = f"Hq={heads} Hkv={kv} chunks={chunks} invariant={invariant} quads={quads}"
                out.expect(name, want, quads, before, tokens - pad)
                assert bool((out.bytes()[:before] == 0x5A).all()) and bool(out.scales.t[:, :before].isnan().all()), f"{name}: wrote rows of another launch"


def fp8_rows_refusals():
    x, i = randn(1, 64, dtype=torch.float32), u32([0])
    decode = x, None, None, 1e-6, x, x, None, i, i, i, 1, x, x, x, x, 1, 8, 1
    assert refuses("moe_attention_decode_fp8", *decode, 64, 16, 1.0, 0, 1, 16, 0, x, 4, 0), "heads of 64"
    assert refuses("moe_attention_decode_fp8", *decode, 128, 16, 1.0, 0, 1, 16, 0, x, 3, 0), "lines that are no multiple of 4"
    assert refuses("moe_attention_decode_fp8", *decode, 128, 16, 1.0, 0, 1, 16, 0, None, 4, 0), "no scales"
    sums = x, i, x, None, x, 8, 2, 8, 8
    assert refuses("moe_combine_add_rms_norm_fp8", *sums, 192, F32, BF16, x, x, 1e-6, x, 8, 0), "columns that are no multiple of 128"
    assert refuses("moe_combine_add_rms_norm_fp8", *sums, 128, F32, BF16, x, x, 1e-6, x, 4, 0), "fewer lines than rows"


CHECKS = [sums_leave_fp8, decode_leaves_fp8, prompts_leave_fp8, fp8_rows_refusals]
