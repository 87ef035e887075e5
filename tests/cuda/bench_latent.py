"""Attention over latent rows (DeepSeek-V2's absorbed form) on one card, against the floors of its bytes and FLOPs."""

import torch
from kernels import LIB, call, graph_us, randn, u32
from library import BF16

READ, PEAK = 4.0e12, 790e12  # bytes and FLOP per second
KEY, VALUE, BLOCK, ROPE, NOPE, HEAD = 576, 512, 16, 64, 128, 192
CACHED = 200 << 20  # bytes that no cache holds


def splits_of(tokens, sequences, heads):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return LIB.lib.moe_attention_latent_splits(tokens, sequences, heads, sms)


def decode_splits(sequences):
    """The number of splits of the kernel for one new row of each of a few sequences."""
    return LIB.lib.moe_attention_latent_decode_splits(sequences, torch.cuda.get_device_properties(0).multi_processor_count)


class Step:
    """`sequences` of `positions` positions each, the last `count` of them new; pages in random order."""

    def __init__(self, sequences, positions, count, heads):
        self.s, self.n, self.t, self.heads = sequences, positions, sequences * count, heads
        pages = -(-positions // BLOCK)
        self.copies = max(1, min(64, CACHED // (sequences * pages * BLOCK * KEY * 2)))
        self.tables = [torch.randperm(sequences * pages, device="cuda").to(torch.int32).view(sequences, pages).contiguous() for _ in range(2)]
        self.caches = [randn(sequences * pages, 1, BLOCK, KEY) for _ in range(self.copies)]
        self.starts = u32([i * count for i in range(sequences + 1)])
        self.positions = u32(list(range(positions - count, positions)) * sequences)
        self.out = torch.empty(self.t, heads * VALUE, dtype=torch.bfloat16, device="cuda")
        self.counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        # (row, position) pairs that attend
        self.pairs = sequences * sum(positions - count + i + 1 for i in range(count)) if count < 4096 else sequences * count * (2 * positions - count + 1) // 2

    def latent(self, splits, few=False):
        """Calls with each cache. `few` chooses the kernel for a few sequences."""
        q = randn(self.t, self.heads, KEY)
        partials = torch.empty(self.t * self.heads * splits * (VALUE + 2) if splits > 1 else 1, device="cuda")
        table = self.tables[0]

        def run(cache):
            args = (q, cache, cache, self.starts, self.positions, table, self.out, BF16, BF16, self.t, self.s, table.shape[1], self.heads, 1,
                    KEY, VALUE, KEY, cache.shape[0], BLOCK, KEY**-0.5, 0, 0, self.counters, partials, splits)
            if few:
                call("moe_attention_latent_decode", *args, None, None)
            else:
                call("moe_attention_latent", *args)

        return [lambda c=c: run(c) for c in self.caches] * max(1, 4 // self.copies)

    def expanded(self):
        """Keys and values of every head, by the launches of the op, with torch's products between them."""
        q, all_rows, h = randn(self.t, self.heads, HEAD), self.s * self.n, self.heads
        w_uk, w_uv = randn(h, VALUE, NOPE, scale=0.04), randn(h, VALUE, NOPE, scale=0.04)
        latents, values = torch.empty(all_rows, VALUE, dtype=torch.bfloat16, device="cuda"), torch.empty(h, all_rows, NOPE, dtype=torch.bfloat16, device="cuda")
        keys, bases = torch.empty(h, all_rows, HEAD, dtype=torch.bfloat16, device="cuda"), torch.empty(self.s, dtype=torch.int32, device="cuda")
        out, table = self.out[:, : h * NOPE].contiguous(), self.tables[0]

        def attend():
            call("moe_attention_expanded", q, keys, values, self.starts, self.positions, None, out, BF16, BF16, self.t, self.s, 0, h, h, HEAD,
                 NOPE, NOPE, 0, 1, HEAD**-0.5, 0, 0, self.counters, None, 1, bases, all_rows)

        def run(cache):
            call("moe_mla_expand", cache, self.starts, self.positions, table, latents, keys, bases, self.s, table.shape[1], BLOCK, h, all_rows)
            torch.matmul(latents, w_uk, out=keys_plain)
            torch.matmul(latents, w_uv, out=values)
            attend()

        # Torch writes no strided result.
        keys_plain = torch.empty(h, all_rows, NOPE, dtype=torch.bfloat16, device="cuda")
        run(self.caches[0])
        return [lambda c=c: run(c) for c in self.caches], [attend] * 4


def row(rows, name, us, size, flops):
    floor = max(size / READ, flops / PEAK) * 1e6
    rows.append({"name": name, "us": us, "floor_us": floor, "bytes": size, "flops": flops})
    print(f"{name:52} {us:9.1f} us  floor {floor:9.1f}  x {us / floor:5.2f}  {size / us / 1e6:5.2f} TB/s {flops / us / 1e6:6.1f} TFLOP/s", flush=True)


def latent_decode(rows):
    """One new row of each sequence, by both kernels; for one sequence also other numbers of splits than the
    launcher's."""
    for heads in (16, 128):
        for sequences, positions in ((1, 512), (1, 8192), (1, 32768), (4, 2048), (4, 8192), (8, 2048), (64, 2048), (256, 2048)):
            step = Step(sequences, positions, 1, heads)
            if heads <= 16 and sequences <= 8:
                us = graph_us(step.latent(decode_splits(sequences), few=True), 9)
                row(rows, f"latent decode {sequences} x {positions}, {heads} heads, few", us, step.pairs * KEY * 2, 2 * step.pairs * heads * (KEY + VALUE))
            own = splits_of(sequences, sequences, heads)
            trials = sorted({own, *((32, 64, 128) if sequences == 1 else (1, 2) if sequences == 256 else ())})
            for splits in trials:
                us = graph_us(step.latent(splits), 9)
                pairs = step.pairs * heads
                mark = "" if splits == own else " (not chosen)"
                row(rows, f"latent decode {sequences} x {positions}, {heads} heads, {splits} splits{mark}", us, step.pairs * KEY * 2, 2 * pairs * (KEY + VALUE))


def latent_prompts(rows):
    """Prompts from their beginning on, and a last chunk, in latent space and expanded."""
    for sequences, positions, count in ((1, 4096, 4096), (1, 8192, 8192), (4, 2048, 2048), (1, 32768, 8192)):
        step = Step(sequences, positions, count, 16)
        name = f"{sequences} x {count} of {positions}"
        row(rows, f"prompt {name} in latent space", graph_us(step.latent(1), 5), 0, 2 * step.pairs * 16 * (KEY + VALUE))
        whole, attend = step.expanded()
        flops = 2 * step.pairs * 16 * (HEAD + NOPE)
        row(rows, f"prompt {name} expanded, attention alone", graph_us(attend, 5), 0, flops)
        products = 2 * sequences * positions * 16 * VALUE * 2 * NOPE
        row(rows, f"prompt {name} expanded, with its products", graph_us(whole, 5), 0, flops + products)


BENCHES = [latent_decode, latent_prompts]
