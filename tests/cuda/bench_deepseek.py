"""A layer of DeepSeek-V2-Lite at one sequence, launch by launch and whole, against the bytes of its weights and
cache."""

import torch
from bench_latent import BLOCK, HEAD, KEY, NOPE, ROPE, VALUE, decode_splits, splits_of
from kernels import LIB, call, graph_us, randn, u32
from library import ADD_F32, BF16, F32, UNWATCHED

HEADS, HIDDEN, EXPERTS, TOP_K, SHARED, INTER = 16, 2048, 64, 6, 2, 1408
READ = 4.4e12  # bytes per second
LAYERS = 10  # with weights of their own: 1.9 GB
PRODUCTS = HEADS * HEAD + KEY


class Layer:
    def __init__(self, positions):
        self.qkv, self.o = randn(PRODUCTS, HIDDEN, scale=0.02), randn(HIDDEN, HEADS * NOPE, scale=0.02)
        self.w_uk, self.w_uv = randn(HEADS, VALUE, NOPE, scale=0.05), randn(HEADS, NOPE, VALUE, scale=0.05)
        self.gate, self.gain, self.latent_gain = randn(EXPERTS, HIDDEN, scale=0.02), randn(HIDDEN), randn(VALUE)
        self.w13, self.w2 = randn(EXPERTS + SHARED, 2 * INTER, HIDDEN, scale=0.02), randn(EXPERTS + SHARED, HIDDEN, INTER, scale=0.02)
        self.cache = randn(positions // BLOCK + 1, 1, BLOCK, KEY)


class Chain:
    """The launches of one new token after `positions` positions."""

    def __init__(self, positions):
        self.layers = [Layer(positions) for _ in range(LAYERS)]
        f32, bf16 = (lambda *s: torch.zeros(*s, device="cuda")), (lambda *s: torch.zeros(*s, device="cuda", dtype=torch.bfloat16))
        self.residual, self.products = f32(1, HIDDEN).normal_(), f32(1, PRODUCTS)
        self.plain, self.query, self.latents, self.values = bf16(1, HEADS, NOPE), bf16(1, HEADS, KEY), bf16(1, HEADS * VALUE), bf16(1, HEADS * NOPE)
        self.cos, self.sin = f32(1, ROPE // 2).fill_(0.8), f32(1, ROPE // 2).fill_(0.6)
        self.slots, self.starts, self.positions = u32([positions]), u32([0, 1]), u32([positions])
        pages = positions // BLOCK + 1
        self.table = torch.arange(pages, dtype=torch.int32, device="cuda").view(1, pages)
        self.splits, self.few_splits = splits_of(1, 1, HEADS), decode_splits(1)
        self.partials, self.counters = f32(HEADS * max(self.splits, self.few_splits) * (VALUE + 2)), torch.zeros(2, dtype=torch.int32, device="cuda")
        self.ids, self.weights = torch.zeros(1, TOP_K + SHARED, dtype=torch.int32, device="cuda"), f32(1, TOP_K + SHARED)
        self.state = torch.zeros(LIB.raw("moe_layer_stream_state", EXPERTS + SHARED, INTER), dtype=torch.uint8, device="cuda")
        self.sums, self.act, self.x, self.delta = f32(1, 2 * SHARED * INTER), bf16(1, SHARED * INTER), bf16(1, HIDDEN), f32(1, HIDDEN)

    def project(self, l):
        call("moe_linear_stream", self.residual, l.gain, 1e-6, l.qkv, None, self.products, F32, 1, PRODUCTS, HIDDEN)

    def rows(self, l, width=KEY):
        latents = self.products.data_ptr() + 4 * (PRODUCTS - KEY)
        return (self.products, latents, l.latent_gain, 1e-6, self.cos, self.sin, self.slots, self.plain, self.query, l.cache, BF16, BF16, 1,
                HEADS, NOPE, ROPE, width, VALUE, PRODUCTS, PRODUCTS, l.cache.shape[0] * BLOCK)

    def query_apart(self, l):
        call("moe_any_mla_rows", *self.rows(l))

    def w_uk(self, l):
        call("moe_any_per_head", self.plain, l.w_uk, self.query, BF16, BF16, 1, HEADS, VALUE, NOPE, KEY, 0)

    def query_at_once(self, l):
        call("moe_attention_latent_query", *self.rows(l), l.w_uk)

    def attention(self, l, splits):
        return (self.query, l.cache, l.cache, self.starts, self.positions, self.table, self.latents, BF16, BF16, 1, 1, self.table.shape[1],
                HEADS, 1, KEY, VALUE, KEY, l.cache.shape[0], BLOCK, HEAD**-0.5, 0, 0, self.counters, self.partials, splits)

    def attend(self, l):
        call("moe_attention_latent", *self.attention(l, self.splits))

    def w_uv(self, l):
        call("moe_any_per_head", self.latents, l.w_uv, self.values, BF16, BF16, 1, HEADS, NOPE, VALUE, NOPE, 0)

    def attend_at_once(self, l):
        call("moe_attention_latent_values", *self.attention(l, self.splits), l.w_uv, self.values)

    def attend_few(self, l):
        call("moe_attention_latent_decode", *self.attention(l, self.few_splits), l.w_uv, self.values)

    def output(self, l):
        call("moe_linear_stream", self.values, None, 0.0, l.o, None, self.residual, ADD_F32, 1, HIDDEN, HEADS * NOPE)

    def experts(self, l, x, norm, out, output, shared):
        call("moe_layer_stream", x, norm, 1e-6, l.gate, None, None, None, self.ids, self.weights, l.w13, l.w2, None, out, output, self.state,
             1, HIDDEN, INTER, EXPERTS + shared, EXPERTS + shared, TOP_K + shared, 0, 0, 0, 1.0, 0.0, shared, 1.0, 0, 0, UNWATCHED)

    def slots_of_all(self, l):
        self.experts(l, self.residual, l.gain, self.residual, ADD_F32, SHARED)

    def routed(self, l):
        self.experts(l, self.x, None, self.delta, F32, 0)

    def shared_up(self, l):
        call("moe_linear_stream", self.x, None, 0.0, l.w13[:SHARED].view(-1, HIDDEN), None, self.sums, F32, 1, 2 * SHARED * INTER, HIDDEN)

    def shared_down(self, l):
        call("moe_linear_stream", self.act, None, 0.0, l.w2[:SHARED].view(HIDDEN, -1), None, self.delta, ADD_F32, 1, HIDDEN, SHARED * INTER)

    def add_norm(self, l):
        call("moe_add_rms_norm", self.delta, self.residual, l.gain, 1e-6, self.x, 1, HIDDEN)


WEIGHTS = {"project": PRODUCTS * HIDDEN, "output": HIDDEN * HEADS * NOPE, "w_uk": HEADS * VALUE * NOPE, "w_uv": HEADS * VALUE * NOPE,
           "query_at_once": HEADS * VALUE * NOPE, "slots_of_all": 3 * (TOP_K + SHARED) * INTER * HIDDEN, "routed": 3 * TOP_K * INTER * HIDDEN,
           "shared_up": 2 * SHARED * INTER * HIDDEN, "shared_down": SHARED * INTER * HIDDEN}
CHAINS = {
    "layer, launches apart": ["project", "query_apart", "w_uk", "attend", "w_uv", "output", "slots_of_all"],
    "layer": ["project", "query_at_once", "attend_few", "output", "slots_of_all"],
    "layer, attention of any rows": ["project", "query_at_once", "attend_at_once", "output", "slots_of_all"],
    "attention": ["project", "query_at_once", "attend_few", "output"],
    "experts, shared ones apart": ["add_norm", "routed", "shared_up", "shared_down", "add_norm"],
}


def lite_layer(rows):
    """A launch that is repeated alone overlaps with itself. So its cost in a layer is measured as the time that the
    layer saves without it."""
    for positions in (256, 8192):
        chain = Chain(positions)
        cached = {"attend": positions * KEY, "attend_at_once": positions * KEY + HEADS * VALUE * NOPE}
        cached["attend_few"] = cached["attend_at_once"]
        names = [[name] for name in ("project", "query_apart", "w_uk", "query_at_once", "attend", "w_uv", "attend_at_once", "attend_few",
                                     "output", "slots_of_all", "routed", "shared_up", "shared_down", "add_norm")]
        whole = CHAINS["layer"]
        without = [("layer without " + left, [name for name in whole if name != left]) for left in whole]
        for label, parts in [(part[0], part) for part in names] + list(CHAINS.items()) + without:
            us = graph_us([lambda l=l, part=part: getattr(chain, part)(l) for l in chain.layers for part in parts]) * len(parts)
            size = 2 * sum((WEIGHTS | cached).get(part, 0) for part in parts)
            rows.append({"name": f"lite, {positions} positions: {label}", "us": us, "floor_us": size / READ * 1e6})
            print(f"{positions:6} {label:36} {us:7.2f} us  bytes {size / READ * 1e6:6.2f} us", flush=True)


BENCHES = [lite_layer]
