"""Times of the decode kernels in CUDA graphs, weights and caches rotated, cuBLAS next to them, against byte floors."""

import os

import library
import torch
from kernels import PLAIN, attention_splits, attention_workspace, call, pack_rows, randn, u32

READ = 4.59e12  # bytes per second of a read-only stream on this card
H, HQ, HKV, D, LAYERS, VOCAB = 2048, 32, 4, 128, 48, 151936
QKV = (HQ + 2 * HKV) * D
ASKED = os.environ.get("BENCH_BATCHES")  # only these numbers of rows
# The seed of weights and rows. These determine the routing.
SEED = int(os.environ.get("BENCH_SEED") or int.from_bytes(os.urandom(4), "little"))
BLOCK = 16


def asked(*counts):
    return [int(n) for n in ASKED.split()] if ASKED else list(counts)


def graph_us(record, calls, replays=30):
    """Median microseconds per call of a graph of what `record` launches, which are `calls` calls."""
    return library.graph_us([record], replays) / calls


def report(rows, name, us, floor_bytes, flops=0.0, note=""):
    floor = max(floor_bytes / READ, flops / 790e12) * 1e6
    rows.append({"name": name, "us": us, "floor_us": floor, "tb_s": floor_bytes / us / 1e6, "note": note})
    print(f"{name:42s} {us:9.2f} us  floor {floor:8.2f}  {100 * floor / us:5.1f} %  {floor_bytes / us / 1e6:5.2f} TB/s {note}",
          flush=True)


def tensors(count, *shape):
    return [randn(*shape, scale=shape[-1] ** -0.5) for _ in range(count)]


def linears(rows):
    for name, n, k, output in [("qkv", QKV, H, 0), ("o_proj", H, HQ * D, 2), ("lm_head", VOCAB, H, 0)]:
        count = 2 if n == VOCAB else 24
        weights, gain = tensors(count, n, k), randn(k)
        for m in asked(1, 2, 4, 8, 16, 32, 64, 128, 256):
            x, xf = randn(m, k), randn(m, k, dtype=torch.float32)
            out = torch.zeros(m, n, device="cuda")
            floor, flops = 2 * n * k + m * (2 * k + 4 * n), 2 * m * n * k
            runs = {}
            if m <= 8:
                runs["stream"] = lambda w: call("moe_linear_stream", x, None, 0.0, w, None, out, output, m, n, k)
                if output == 0:
                    runs["stream+norm"] = lambda w: call("moe_linear_stream", xf, gain, 1e-6, w, None, out, output, m, n, k)
            if m >= 4:
                for splits in (0, 1, 2, 4) if m in (16, 64, 256) and n != VOCAB else (0,):
                    runs[f"tensor/{splits}"] = lambda w, s=splits: call("moe_linear_tensor", x, w, None, out, output, m, n, k, s)
            half = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            runs["cublas bf16 out"] = lambda w: torch.mm(x, w.T, out=half)
            for kind, run in runs.items():
                us = graph_us(lambda: [run(w) for w in weights], count, 10 if n == VOCAB else 30)
                report(rows, f"{name} M={m} {kind}", us, floor, flops)
        del weights


def make_tables(batch, context):
    per = -(-(context + 1) // BLOCK)
    table = torch.randperm(batch * per, device="cuda").to(torch.int32).view(batch, per)
    at = torch.full((batch,), context, device="cuda")
    slots = table.long().gather(1, (at // BLOCK)[:, None])[:, 0] * BLOCK + at % BLOCK
    return per, table, at.to(torch.int32), slots.to(torch.int32)


class Caches:
    """KV of `layers` layers, `context` earlier positions per sequence."""

    def __init__(self, layers, batch, context):
        self.per, self.table, self.positions, self.slots = make_tables(batch, context)
        shape = (batch * self.per, HKV, BLOCK, D)
        self.kv = [(torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(),
                    torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()) for _ in range(layers)]
        angle = torch.rand(batch, D // 2, device="cuda") * 6
        self.cos, self.sin = torch.cos(angle), torch.sin(angle)
        self.gains = randn(D), randn(D)
        self.batch, self.bytes = batch, batch * context * HKV * D * 4

    def attend(self, layer, qkv, out, work, splits):
        k, v = self.kv[layer]
        call("moe_attention_decode", qkv, *self.gains, 1e-6, self.cos, self.sin, None, self.slots, self.positions, self.table,
             self.per, k, v, out, work, self.batch, HQ, HKV, D, BLOCK, D**-0.5, 0, splits,
             self.batch * self.per * BLOCK)


def attention(rows):
    for context, batches in [(256, (1, 8, 32, 64, 128, 256)), (8192, (1, 4, 32))]:
        for batch in batches:
            layers = max(3, min(24, int(4e8 / (batch * context * HKV * D * 4)) + 1))
            caches = Caches(layers, batch, context)
            qkv, out = randn(batch, QKV, dtype=torch.float32), torch.empty(batch, HQ * D, dtype=torch.bfloat16, device="cuda")
            best = attention_splits(batch, HQ, HKV)
            for splits in sorted({1, best // 4, best // 2, best, best * 2, best * 4} & {1, 2, 4, 8, 16, 32, 64, 128}):
                if splits == 1 and batch * context < 8192 and best > 4:
                    continue
                work = attention_workspace(batch, HQ, HKV, D, splits)
                us = graph_us(lambda: [caches.attend(i, qkv, out, work, splits) for i in range(layers)], layers)
                note = "<- default" if splits == best else ""
                report(rows, f"attention B={batch} ctx={context} splits={splits}", us, caches.bytes + 4 * qkv.numel(), note=note)
            del caches


def layer_half(rows):
    """48 layers of norm, qkv, attention, o_proj, add + norm, as one graph."""
    wqkv, wo = tensors(LAYERS, QKV, H), tensors(LAYERS, H, HQ * D)
    gain = randn(H)
    shapes = [(1, 256), (1, 8192), (8, 256), (16, 256), (32, 256), (64, 256), (128, 256), (256, 256)]
    for batch, context in [s for s in shapes if s[0] in asked(1, 8, 16, 32, 64, 128, 256)]:
        caches = Caches(LAYERS, batch, context)
        residual, delta = randn(batch, H, dtype=torch.float32), torch.empty(batch, H, device="cuda")
        qkv = torch.empty(batch, QKV, device="cuda")
        att = torch.empty(batch, HQ * D, dtype=torch.bfloat16, device="cuda")
        x = torch.empty(batch, H, dtype=torch.bfloat16, device="cuda")
        splits = attention_splits(batch, HQ, HKV)
        work = attention_workspace(batch, HQ, HKV, D, splits)

        def fused(i):
            call("moe_linear_stream", residual, gain, 1e-6, wqkv[i], None, qkv, 0, batch, QKV, H)
            caches.attend(i, qkv, att, work, splits)
            call("moe_linear_stream", att, None, 0.0, wo[i], None, residual, 2, batch, H, HQ * D)
            call("moe_rms_norm", residual, gain, 1e-6, x, batch, H)

        def streamed(i):
            call("moe_rms_norm", residual, gain, 1e-6, x, batch, H)
            call("moe_linear_stream", x, None, 0.0, wqkv[i], None, qkv, 0, batch, QKV, H)
            caches.attend(i, qkv, att, work, splits)
            call("moe_linear_stream", att, None, 0.0, wo[i], None, delta, 0, batch, H, HQ * D)
            call("moe_add_rms_norm", delta, residual, gain, 1e-6, x, batch, H)

        def tensor(i):
            call("moe_rms_norm", residual, gain, 1e-6, x, batch, H)
            call("moe_linear_tensor", x, wqkv[i], None, qkv, 0, batch, QKV, H, 0)
            caches.attend(i, qkv, att, work, splits)
            call("moe_linear_tensor", att, wo[i], None, delta, 0, batch, H, HQ * D, 0)
            call("moe_add_rms_norm", delta, residual, gain, 1e-6, x, batch, H)

        floor = 2 * H * (QKV + HQ * D) + caches.bytes
        kinds = ([("fused", fused), ("unfused", streamed)] if batch <= 8 else []) + [("tensor", tensor)]
        for name, run in kinds:
            us = graph_us(lambda: [run(i) for i in range(LAYERS)], LAYERS)
            report(rows, f"half layer B={batch} ctx={context} {name}", us, floor, note=f"x48 = {us * LAYERS / 1e3:.3f} ms")
        del caches


def small(rows):
    for batch in (1, 32, 256):
        x, d, gain = randn(batch, H, dtype=torch.float32), randn(batch, H, dtype=torch.float32), randn(H)
        out = torch.empty(batch, H, dtype=torch.bfloat16, device="cuda")
        us = graph_us(lambda: [call("moe_rms_norm", x, gain, 1e-6, out, batch, H) for _ in range(40)], 40)
        report(rows, f"rms_norm rows={batch}", us, batch * H * 6)
        us = graph_us(lambda: [call("moe_add_rms_norm", d, x, gain, 1e-6, out, batch, H) for _ in range(40)], 40)
        report(rows, f"add_rms_norm rows={batch}", us, batch * H * 14)
    for count in (1, 8, 64, 256):
        logits = [randn(count, VOCAB, dtype=torch.float32, scale=2.0) for _ in range(max(2, 400 // count if count > 2 else 8))]
        tokens, status = u32([0] * count), u32([0] * count)
        slots, history = torch.zeros(count, VOCAB, dtype=torch.int32, device="cuda"), torch.randint(VOCAB, (count, 2000), device="cuda")
        slots.scatter_(1, history, 1)
        edits = u32([[0] * 2048] * count)
        found = torch.zeros(count, 72, dtype=torch.int32, device="cuda")
        kinds = {"greedy": (0.0, 0, 1.0), "temperature": (1.0, 0, 1.0), "temperature 0.7": (0.7, 0, 1.0), "top-k 50": (1.0, 50, 1.0),
                 "top-p 0.9": (1.0, 0, 0.9), "top-k 50 top-p 0.9": (1.0, 50, 0.9), "penalties": (1.0, 0, 1.0),
                 "logprobs 0": (0.0, 0, 1.0), "logprobs 20": (0.0, 0, 1.0)}
        for name, (t, k, p) in kinds.items():
            penalties, asked = name == "penalties", int(name.split()[1]) + 1 if name.startswith("logprobs") else 0
            more = lambda i: (1.2, 0.1, 0.1, i, 0, 0, 0, 0) if penalties else (*PLAIN[:-1], asked)
            params = pack_rows([(t, k, p, 0.0, i, i) for i in range(count)], [more(i) for i in range(count)])
            if asked > 0:
                run = lambda x: call("moe_logprobs", x, params, 16, tokens, count, VOCAB, found)
            else:
                run = lambda x: call("moe_sample", x, params, slots, edits, count, None, count, VOCAB, tokens, status)
            us = graph_us(lambda: [run(x) for x in logits], len(logits))
            report(rows, f"sample rows={count} {name}", us, count * VOCAB * 4 * (2 if penalties else 1))
        del logits


BENCHES = [layer_half, attention, linears, small]
