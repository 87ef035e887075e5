"""Prompts of Qwen3-30B-A3B's shape on one card: attention next to PyTorch's FlashAttention-2 and cuDNN, and every
launch of a layer next to the floor of its bytes and FLOPs."""

import torch
from bench_decode import BLOCK, D, H, HKV, HQ, QKV, READ, tensors
from bench_layer import E, I, K
from kernels import LIB, call, graph_us, randn, u32
from library import BF16, F32, UNCOPIED, UNWATCHED
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK = 790e12  # FLOP/s of large matrix products on this card
COUNTS = (1024, 2048, 4096, 8192, 32768)


def paged_run(kernel, tokens, sequences):
    """Whole prompts, pages in random order."""
    count, pages = tokens // sequences, tokens // BLOCK
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1).contiguous()
    cache = [randn(pages, HKV, BLOCK, D) for _ in range(2)]
    q, out = randn(tokens, HQ, D), torch.empty(tokens, HQ * D, dtype=torch.bfloat16, device="cuda")
    starts, positions = u32([i * count for i in range(sequences + 1)]), u32(list(range(count)) * sequences)
    args = (q, *cache, starts, positions, table, out, BF16, BF16, tokens, sequences, table.shape[1], HQ, HKV, D, D, D, pages,
            BLOCK, D**-0.5, 0, 0, torch.zeros(2, dtype=torch.int32, device="cuda"), None, 1)
    return lambda: call(kernel, *args)


def rival_run(backend, tokens, sequences):
    q = randn(sequences, HQ, tokens // sequences, D)
    k, v = (randn(sequences, HKV, tokens // sequences, D) for _ in range(2))

    def run():
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def prefill_attention(rows):
    """A row for each length; 8 prompts at once as well."""
    kinds = [("moe_attention_prefill_wgmma", paged_run, "moe_attention_prefill_wgmma"), ("moe_attention_prefill", paged_run, "moe_attention_prefill"),
             ("FlashAttention-2 (torch)", rival_run, SDPBackend.FLASH_ATTENTION), ("cuDNN (torch)", rival_run, SDPBackend.CUDNN_ATTENTION)]
    for sequences in (1, 8):
        for tokens in COUNTS:
            flops = 2 * HQ * D * tokens * (tokens // sequences + 1)
            for name, make, kind in kinds:
                if tokens > 8192 and kind == "moe_attention_prefill":
                    continue
                try:
                    us = graph_us([make(kind, tokens, sequences)] * 4, 5)
                except Exception as e:  # a kernel that this torch was built without
                    print(f"{name}: {type(e).__name__} {str(e)[:100]}")
                    continue
                rows.append({"name": f"attention {sequences} x {tokens // sequences} {name}", "us": us, "tflop_s": flops / us / 1e6})
                print(f"{sequences} x {tokens // sequences:6} {name:28} {us:10.1f} us {flops / us / 1e6:7.1f} TFLOP/s  {100 * flops / us / PEAK * 1e6:5.1f} %", flush=True)


class Layer:
    """One prompt of `tokens` tokens, and the launches of a layer as the engine makes them."""

    COUNT = 4  # layers with weights of their own

    def __init__(self, tokens):
        self.t = tokens
        f32, bf16, i32 = (dict(dtype=d, device="cuda") for d in (torch.float32, torch.bfloat16, torch.int32))
        self.qkv, self.o, self.gate = tensors(self.COUNT, QKV, H), tensors(self.COUNT, H, HQ * D), tensors(self.COUNT, E, H)
        self.w13, self.w2, self.norm, self.head_norm = tensors(self.COUNT, E, 2 * I, H), tensors(self.COUNT, E, H, I), randn(H), randn(D)
        self.x, self.residual, self.delta = randn(tokens, H), randn(tokens, H, dtype=torch.float32), torch.empty(tokens, H, **f32)
        self.rows, self.q, self.att = torch.empty(tokens, QKV, **f32), torch.empty(tokens, HQ * D, **bf16), torch.empty(tokens, HQ * D, **bf16)
        pages = -(-tokens // BLOCK)
        self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(1, -1).contiguous()
        self.caches = [randn(pages, HKV, BLOCK, D) for _ in range(2)]
        at = torch.arange(tokens, device="cuda")
        self.positions, self.starts = at.to(torch.int32), u32([0, tokens])
        self.slots = (self.table[0].long()[at // BLOCK] * BLOCK + at % BLOCK).to(torch.int32)
        self.angles = torch.rand(tokens, D // 2, device="cuda"), torch.rand(tokens, D // 2, device="cuda")
        self.logits, self.ids, self.weights = torch.empty(tokens, E, **f32), torch.empty(tokens, K, **i32), torch.empty(tokens, K, **f32)
        self.act, self.slot_rows = torch.empty(tokens * K, I, **bf16), torch.empty(tokens * K, H, **bf16)
        self.counters, self.buckets = torch.zeros(LIB.raw("moe_experts_tensor_counters", E), **i32), torch.empty(E, tokens, **i32)
        self.attention_counters = torch.zeros(2, **i32)
        self.counts = self.counters[LIB.raw("moe_experts_tensor_counts") :]

    def product_qkv(self, i):
        torch.mm(self.x, self.qkv[i].T, out_dtype=torch.float32)

    def rope(self, i):
        call("moe_qk_norm_rope_cache", self.rows, self.head_norm, self.head_norm, 1e-6, *self.angles, None, self.slots, self.q,
             *self.caches, BF16, F32, BF16, self.t, HQ, HKV, D, BLOCK, self.table.shape[1] * BLOCK)

    def attend(self, i):
        call("moe_attention_prefill_wgmma", self.q, *self.caches, self.starts, self.positions, self.table, self.att, BF16, BF16, self.t, 1,
             self.table.shape[1], HQ, HKV, D, D, D, self.table.shape[1], BLOCK, D**-0.5, 0, 0, self.attention_counters, None, 1)

    def product_o(self, i):
        torch.mm(self.att, self.o[i].T, out_dtype=torch.float32)

    def add_norm(self, i):
        call("moe_add_rms_norm", self.delta, self.residual, self.norm, 1e-6, self.x, self.t, H)

    def route(self, i):
        self.counts[:E].zero_()
        call("moe_gate_route", self.x, self.gate[i], None, None, None, self.logits, self.ids, self.weights, self.t, H, E, K, 0, 0, 1, 1.0,
             0.0, self.counts, self.buckets, None, 0, 0, 1.0, 0, 0, UNWATCHED, UNCOPIED)

    def experts(self, i):
        self.route(i)
        call("moe_experts_wide", self.x, self.w13[i], self.w2[i], self.buckets, self.counts, self.t, self.act, self.slot_rows,
             self.counters, self.t, K, E, E, H, I)

    def combine(self, i):
        call("moe_combine_add_rms_norm", self.slot_rows, self.ids, self.weights, None, self.x, self.t, K, E, E, H, BF16, BF16, self.residual,
             self.norm, 1e-6)

    def launches(self):
        """(name, bytes it must move, FLOPs, run(layer)), in the order of a step; caches and rows once."""
        t, q, kv = self.t, HQ * D, HKV * D
        weights = min(t * K, E) * 6 * H * I
        return [("qkv (cuBLAS)", 2 * QKV * H + t * (2 * H + 4 * QKV), 2 * t * QKV * H, self.product_qkv),
                ("head norm, rope, cache", t * (4 * QKV + 2 * QKV), 0, self.rope),
                ("attention", t * (4 * q + 4 * kv), 2 * q * t * (t + 1), self.attend),
                ("o_proj (cuBLAS)", 2 * q * H + t * (2 * q + 4 * H), 2 * t * q * H, self.product_o),
                ("residual + norm", t * 14 * H, 0, self.add_norm), ("router", 2 * E * H + t * (2 * H + 4 * E), 2 * t * E * H, self.route),
                ("experts", weights + t * (2 * H + K * (4 * I + 2 * H)), 6 * t * K * H * I, self.experts),
                ("weighted sum + residual + norm", t * H * (2 * K + 10), 0, self.combine)]


def prefill_layer(rows):
    """A row for each launch of a layer."""
    for tokens in (2048, 8192, 32768):
        layer, sum_us = Layer(tokens), 0.0
        for tensor in (layer.rows, layer.delta, layer.att, layer.weights):
            tensor.normal_()
        found = {}
        for name, size, flops, run in layer.launches():
            us = graph_us([lambda i=i: run(i) for i in range(layer.COUNT)], 7)
            if name == "experts":
                us -= found["router"]  # the router lists the experts' slots, so the experts cannot be timed without it
            found[name] = us
            sum_us += us
            floor = max(size / READ, flops / PEAK) * 1e6
            rows.append({"name": f"layer T={tokens} {name}", "us": us, "floor_us": floor, "bytes": size, "flops": flops})
            print(f"T={tokens:<6} {name:32} {us:9.1f} us  floor {floor:8.1f}  {100 * floor / us:5.1f} %  {flops / us / 1e6:6.1f} TFLOP/s", flush=True)
        print(f"T={tokens:<6} {'sum':32} {sum_us:9.1f} us  {tokens / sum_us / 48 * 1e6:9.0f} tok/s of 48 layers", flush=True)
        del layer


BENCHES = [prefill_attention, prefill_layer]
