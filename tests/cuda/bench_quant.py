"""Times the streaming kernels for quantised weights beside those for bf16, layers with weights of their own in one graph."""

import os

import bench_layer
import torch
from bench_decode import D, H, HQ, QKV, tensors
from bench_layer import E, I, K, LAYERS, Step
from kernels import call, randn
from library import BF16, UNWATCHED
from quant_pack import FP8_BLOCK, INT4_128, INT4_32Z, INT8_128, RawPack

LINEARS = 36  # matrices of a product that is timed alone: of 4 bits, fewer would stay in L2
SCHEMES = [None, INT4_128, INT4_32Z, INT8_128, FP8_BLOCK]


class Model:
    """Layers of one scheme; None: bf16."""

    def __init__(self, scheme):
        self.scheme, self.gain = scheme, randn(H)
        self.gate = tensors(LAYERS, E, H)
        if scheme is None:
            self.qkv, self.o = tensors(LINEARS, QKV, H), tensors(LINEARS, H, HQ * D)
            self.w13, self.w2 = tensors(LAYERS, E, 2 * I, H), tensors(LAYERS, E, H, I)
            return
        packs = lambda count, *args: [RawPack(*args) for _ in range(count)]
        self.qkv, self.o = packs(LINEARS, 1, QKV, H, scheme), packs(LINEARS, 1, H, HQ * D, scheme)
        self.w13, self.w2 = packs(LAYERS, E, 2 * I, H, scheme, True), packs(LAYERS, E, H, I, scheme)

    def bytes(self, n, k):
        return 2 * n * k if self.scheme is None else self.scheme.bytes(n, k)

    def linear_bytes(self):
        return self.bytes(QKV, H), self.bytes(H, HQ * D)

    def expert_bytes(self):
        return self.bytes(2 * I, H) + self.bytes(H, I)


class QuantStep(Step):
    """Launches of a layer of either kind of weights."""

    def norm_qkv(self, i):
        if self.m.scheme is None:
            call("moe_linear_stream", self.residual, self.m.gain, 1e-6, self.m.qkv[i], None, self.q, 0, self.batch, QKV, H)
        else:
            call("moe_quant_linear_stream", self.residual, self.m.gain, 1e-6, self.m.qkv[i], None, self.q, 0, self.batch)

    def o_proj(self, i):
        if self.m.scheme is None:
            call("moe_linear_stream", self.att, None, 0.0, self.m.o[i], None, self.residual, 2, self.batch, H, HQ * D)
        else:
            call("moe_quant_linear_stream", self.att, None, 0.0, self.m.o[i], None, self.residual, 2, self.batch)

    def attention_fused(self, i):
        self.norm_qkv(i)
        self.caches.attend(i, self.q, self.att, self.work, self.splits)
        self.o_proj(i)

    def one_launch(self, i):
        if self.m.scheme is None:
            return super().one_launch(i)
        call("moe_quant_layer_stream", self.residual, self.m.gain, 1e-6, self.m.gate[i], None, None, None, self.ids, self.weights,
             self.m.w13[i], self.m.w2[i], None, self.residual, 2, self.state, self.batch, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, UNWATCHED)

    def experts_of_one_launch(self, i):
        if self.m.scheme is None:
            return super().experts_of_one_launch(i)
        call("moe_quant_layer_stream", self.x, None, 0.0, None, None, None, None, self.routes[i], self.weights,
             self.m.w13[i], self.m.w2[i], None, self.out, 1, self.state, self.batch, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, UNWATCHED)

    def experts_alone(self, i):
        if self.m.scheme is None:
            return super().experts_alone(i)
        call("moe_quant_experts_stream", self.x, self.m.w13[i], self.m.w2[i], self.routes[i], self.weights, None, self.act, self.rows, self.out,
             self.flags, self.flags.numel(), self.batch, K, E, BF16)

    def touched(self):
        return sum(ids.unique().numel() for ids in self.routes) / LAYERS


def quant_streams(rows):
    """us and, in brackets, GB/s of the weights."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    columns = ("norm + qkv", "o_proj", "half layer", "experts", "given ids", "with router", "layer")
    print(f"{'us (GB/s)':16s} B " + " ".join(f"{name:>13s}" for name in columns))
    for scheme in SCHEMES:
        model = Model(scheme)
        name = scheme.name if scheme else "bf16"
        for batch in bench_layer.asked(1, 2, 4, 8):
            step = QuantStep(model, batch, 256)
            qkv, o = model.linear_bytes()
            experts = step.touched() * model.expert_bytes()
            runs = [("norm+qkv", step.norm_qkv, qkv), ("o_proj", step.o_proj, o), ("half", step.attention_fused, 0),
                    ("experts", step.experts_alone, experts)]
            if batch <= 4:  # of the router's choice in the first, so its bytes are an estimate
                runs += [("given ids", step.experts_of_one_launch, experts), ("launch", step.one_launch, experts), ("layer", step.fused, 0)]
            line = f"{name:16s} {batch}"
            for what, run, size in runs:
                us = step.us(run, LINEARS if run in (step.norm_qkv, step.o_proj) else LAYERS)
                rows.append({"name": f"{name} B={batch} {what}", "us": us, "bytes": size})
                line += f" {f'{us:.1f} ({size / us / 1e3:.0f})' if size else f'{us:.1f}':>13s}"
            print(line, flush=True)
            del step
        del model
        torch.cuda.empty_cache()


BENCHES = [quant_streams]
