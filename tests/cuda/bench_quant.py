"""Times the streaming kernels for quantised weights next to those for bf16, layers with weights of their own in one
graph."""

import bench_layer
import torch
from bench_decode import D, H, HQ, QKV, SEED, tensors
from bench_layer import E, I, K, LAYERS, Step
from kernels import LIB, call, randn
from library import BF16, F32, UNWATCHED
from quant_pack import FP8_BLOCK, INT4_128, INT4_32Z, INT8_128, RawPack

LINEARS = 36  # matrices of a product that is timed alone; with 4 bits, fewer matrices would stay in L2
MOST_STREAMED = 8  # rows of dense products that the plan streams
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

    def qkv(self, i):
        if self.m.scheme is None:
            call("moe_linear_tensor", self.x, self.m.qkv[i], None, self.q, F32, self.batch, QKV, H, 0)
        else:
            self.quant_linear(self.x, self.m.qkv[i], self.q)

    def attention(self, i):
        self.caches.attend(i, self.q, self.att, self.work, self.splits)

    def o(self, i):
        if self.m.scheme is None:
            call("moe_linear_tensor", self.att, self.m.o[i], None, self.delta, F32, self.batch, H, HQ * D, 0)
        else:
            self.quant_linear(self.att, self.m.o[i], self.delta)

    def quant_linear(self, x, w, out):
        """The products, by the launch that the plan chooses."""
        if self.batch <= MOST_STREAMED:
            call("moe_quant_linear_stream", x, None, 0.0, w, None, out, F32, self.batch)
        else:
            call("moe_quant_linear_tensor", x, w, None, out, F32, self.batch, 0)

    def attention_tensor(self, i):
        self.qkv(i), self.attention(i), self.o(i)

    def add_norm(self, i):
        call("moe_add_rms_norm", self.delta, self.residual, self.m.gain, 1e-6, self.x, self.batch, H)

    def products(self, i):
        if self.m.scheme is None:
            return super().products(i)
        counts = self.listed_route(i)
        call("moe_quant_experts_tensor", self.x, self.m.w13[i], self.m.w2[i], self.buckets, counts, self.batch, self.act, self.rows,
             self.counters, self.batch, K, E, 0)

    def sum(self, i):
        call("moe_combine_add_rms_norm", self.rows, self.ids, self.weights, None, self.x, self.batch, K, E, E, H, F32, BF16, self.residual,
             self.m.gain, 1e-6)

    def attention_fused(self, i):
        self.norm_qkv(i)
        self.caches.attend(i, self.q, self.att, self.work, self.splits)
        self.o_proj(i)

    def one_launch(self, i):
        if self.m.scheme is None:
            return super().one_launch(i)
        call("moe_quant_layer_stream", self.residual, self.m.gain, 1e-6, self.m.gate[i], None, None, None, self.ids, self.weights,
             self.m.w13[i], self.m.w2[i], None, self.residual, 2, self.state, self.batch, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, 0, 0, UNWATCHED)

    def experts_of_one_launch(self, i):
        if self.m.scheme is None:
            return super().experts_of_one_launch(i)
        call("moe_quant_layer_stream", self.x, None, 0.0, None, None, None, None, self.routes[i], self.weights,
             self.m.w13[i], self.m.w2[i], None, self.out, 1, self.state, self.batch, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, 0, 0, UNWATCHED)

    def experts_alone(self, i):
        if self.m.scheme is None:
            return super().experts_alone(i)
        call("moe_quant_experts_stream", self.x, self.m.w13[i], self.m.w2[i], self.routes[i], self.weights, None, self.act, self.rows, self.out,
             self.flags, self.flags.numel(), self.batch, K, E, BF16)

    def touched(self):
        return sum(ids.unique().numel() for ids in self.routes) / LAYERS


def quant_streams(rows):
    """us and, in brackets, GB/s of the weights."""
    torch.manual_seed(SEED)
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


def quant_layers(rows):
    """A layer's launches as a step of 8 and more sequences makes them: each alone, and all in their order; us."""
    torch.manual_seed(SEED)
    columns = ("qkv", "attention", "o_proj", "add norm", "router", "experts", "sum norm", "layer")
    print(f"{'us':16s}   B " + " ".join(f"{name:>10s}" for name in columns))
    for scheme in SCHEMES:
        model = Model(scheme)
        name = scheme.name if scheme else "bf16"
        for batch in bench_layer.asked(8, 32, 64, 128, 256):
            step = QuantStep(model, batch, 256)
            us = {"qkv": step.us(step.qkv, LINEARS), "attention": step.us(step.attention), "o_proj": step.us(step.o, LINEARS), "add norm": step.us(step.add_norm)}
            us["router"] = step.us(step.route)
            us["experts"] = step.us(step.products) - us["router"]
            us["sum norm"], us["layer"] = step.us(step.sum), step.us(step.combined)
            rows += [{"name": f"{name} B={batch} {what}", "us": value} for what, value in us.items()]
            print(f"{name:16s} {batch:3d} " + " ".join(f"{us[what]:10.1f}" for what in columns), flush=True)
            del step
        del model
        torch.cuda.empty_cache()


BENCHES = [quant_streams, quant_layers]
