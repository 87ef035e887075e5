"""Microseconds per layer of a decode step: attention half, router and experts of layers with weights of their own in
one graph."""

import torch
from bench_decode import D, H, HKV, HQ, QKV, READ, SEED, Caches, asked, graph_us, tensors
from kernels import LIB, attention_splits, attention_workspace, call, randn, state_for
from library import BF16, F32, UNCOPIED, UNWATCHED, routing

E, K, I, LAYERS = 128, 8, 768, 12
BATCHES = asked(1, 2, 4, 8, 32, 64, 128, 256)


class Model:
    def __init__(self):
        self.qkv, self.o = tensors(LAYERS, QKV, H), tensors(LAYERS, H, HQ * D)
        self.gate, self.gain = tensors(LAYERS, E, H), randn(H)
        self.w13, self.w2 = tensors(LAYERS, E, 2 * I, H), tensors(LAYERS, E, H, I)


class Step:
    """Buffers of one batch, and the launches of a layer."""

    def __init__(self, model, batch, context):
        self.m, self.batch, self.context = model, batch, context
        self.caches = Caches(LAYERS, batch, context)
        f32, bf16, i32 = (dict(dtype=d, device="cuda") for d in (torch.float32, torch.bfloat16, torch.int32))
        self.residual, self.delta = randn(batch, H, dtype=torch.float32), torch.zeros(batch, H, **f32)
        self.q, self.att = torch.empty(batch, QKV, **f32), torch.empty(batch, HQ * D, **bf16)
        self.x, self.out = torch.empty(batch, H, **bf16), torch.empty(batch, H, **bf16)
        self.splits = attention_splits(batch, HQ, HKV)
        self.work = attention_workspace(batch, HQ, HKV, D, self.splits)
        self.logits = torch.empty(batch, E, **f32)
        self.ids, self.weights = torch.empty(batch, K, **i32), torch.empty(batch, K, **f32)
        self.act, self.rows = torch.empty(batch * K, I, **bf16), torch.empty(batch * K, H, **f32)
        self.flags = torch.zeros(LIB.raw("moe_experts_stream_flags", batch * K, E), **i32)
        self.state = state_for(E, I)
        self.routes = [routing(batch, E, K)[0] for _ in range(LAYERS)]
        slots = batch * K
        self.counters = torch.zeros(LIB.raw("moe_experts_tensor_counters", E), **i32)
        self.buckets = torch.empty(E, batch, **i32)
        self.meta = (torch.empty(E + 1, **i32), torch.empty(slots, **i32), torch.empty(LIB.raw("moe_max_tiles", slots, E, 128), 2, **i32), torch.empty(1, **i32))

    def attention_fused(self, i):
        call("moe_linear_stream", self.residual, self.m.gain, 1e-6, self.m.qkv[i], None, self.q, 0, self.batch, QKV, H)
        self.caches.attend(i, self.q, self.att, self.work, self.splits)
        call("moe_linear_stream", self.att, None, 0.0, self.m.o[i], None, self.residual, 2, self.batch, H, HQ * D)

    def attention_tensor(self, i):
        call("moe_linear_tensor", self.x, self.m.qkv[i], None, self.q, 0, self.batch, QKV, H, 0)
        self.caches.attend(i, self.q, self.att, self.work, self.splits)
        call("moe_linear_tensor", self.att, self.m.o[i], None, self.delta, 0, self.batch, H, HQ * D, 0)

    def route(self, i, counts=None, buckets=None):
        call("moe_gate_route", self.x, self.m.gate[i], None, None, None, self.logits, self.ids, self.weights, self.batch, H, E, K, 0, 0, 1,
             1.0, 0.0, counts, buckets, None, 0, 0, 1.0, 0, 0, UNWATCHED, UNCOPIED)

    def listed_route(self, i):
        """The router, which lists the slots of each expert."""
        counts = self.counters[LIB.raw("moe_experts_tensor_counts") :]
        self.route(i, counts, self.buckets)
        return counts

    def products(self, i):
        """Router and products, without an alignment."""
        counts = self.listed_route(i)
        call("moe_experts_tensor", self.x, self.m.w13[i], self.m.w2[i], self.buckets, counts, self.batch, self.act, self.rows,
             self.counters, self.batch, K, E, E, H, I)

    def combined(self, i):
        """Attention half, addition and norm, router, products, then one launch for weighted sum, addition and the next
        norm."""
        self.attention_tensor(i)
        call("moe_add_rms_norm", self.delta, self.residual, self.m.gain, 1e-6, self.x, self.batch, H)
        self.products(i)
        call("moe_combine_add_rms_norm", self.rows, self.ids, self.weights, None, self.x, self.batch, K, E, E, H, F32, BF16, self.residual,
             self.m.gain, 1e-6)

    def experts(self, i):
        if self.batch < 256:
            call("moe_experts_stream", self.x, self.m.w13[i], self.m.w2[i], self.ids, self.weights, None, self.act, self.rows, self.out,
                 self.flags, self.flags.numel(), self.batch, K, E, E, H, I, BF16)
            return
        slots = self.batch * K
        call("moe_align_tokens", self.ids, None, slots, E, E, 128, *self.meta)
        args = self.x, self.m.w13[i], self.m.w2[i], *self.meta, self.act, self.rows, slots, K, E, H, I
        call("moe_experts_grouped_gate_up", *args)
        call("moe_experts_grouped_down", *args)
        call("moe_combine", self.rows, self.ids, self.weights, None, self.out, self.batch, K, E, E, H, F32, BF16)

    def one_launch(self, i):
        """Norm, router, experts and addition to the residual."""
        call("moe_layer_stream", self.residual, self.m.gain, 1e-6, self.m.gate[i], None, None, None, self.ids, self.weights,
             self.m.w13[i], self.m.w2[i], None, self.residual, 2, self.state, self.batch, H, I, E, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, 0, 0, UNWATCHED)

    def experts_of_one_launch(self, i):
        call("moe_layer_stream", self.x, None, 0.0, None, None, None, None, self.routes[i], self.weights, self.m.w13[i], self.m.w2[i],
             None, self.out, 1, self.state, self.batch, H, I, E, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, 0, 0, UNWATCHED)

    def experts_alone(self, i):
        call("moe_experts_stream", self.x, self.m.w13[i], self.m.w2[i], self.routes[i], self.weights, None, self.act, self.rows, self.out,
             self.flags, self.flags.numel(), self.batch, K, E, E, H, I, BF16)

    def separate(self, i):
        if self.batch <= 4:
            self.attention_fused(i)
            call("moe_rms_norm", self.residual, self.m.gain, 1e-6, self.x, self.batch, H)
        else:
            call("moe_add_rms_norm", self.delta, self.residual, self.m.gain, 1e-6, self.x, self.batch, H)
            self.attention_tensor(i)
            call("moe_add_rms_norm", self.delta, self.residual, self.m.gain, 1e-6, self.x, self.batch, H)
        self.route(i)
        self.experts(i)

    def fused(self, i):
        self.attention_fused(i)
        self.one_launch(i)

    def us(self, layer, count=LAYERS):
        """Of each layer, from the same rows in each call of a seed."""
        torch.manual_seed(SEED)
        self.residual.normal_()
        self.x.normal_()
        self.weights.uniform_()
        return graph_us(lambda: [layer(i) for i in range(count)], count)

    def floor(self):
        experts = E * (1 - (1 - K / E) ** self.batch)
        return (2 * H * (QKV + HQ * D + E) + self.caches.bytes + 6 * H * I * experts) / READ * 1e6


def layers(rows):
    torch.manual_seed(SEED)
    model = Model()
    for batch, context in [(b, 256) for b in BATCHES] + [(1, 8192)]:
        step = Step(model, batch, context)
        runs = {"separate launches": step.separate}
        if batch >= 8:
            runs |= {"experts on warpgroup products, combine with norm": step.combined}
        if batch <= 4:
            runs |= {"one launch for norm, router, experts": step.fused, "  that launch alone": step.one_launch,
                     "  its experts alone": step.experts_of_one_launch, "  moe_experts_stream alone": step.experts_alone,
                     "  attention half alone": step.attention_fused}
        for name, run in runs.items():
            us, floor = step.us(run), step.floor()
            rows.append({"name": f"layer B={batch} ctx={context} {name.strip()}", "us": us, "floor_us": floor})
            print(f"layer B={batch:<3} ctx={context:<4} {name:<38} {us:8.2f} us  byte floor of a layer {floor:6.1f}", flush=True)
        del step


BENCHES = [layers]
