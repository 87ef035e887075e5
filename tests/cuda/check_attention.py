"""Checks of norm + RoPE + cache write and of both attention kernels against float64."""

import functools
import math

import torch
from check_rows import norm_ref
from kernels import Out, attention_splits, attention_workspace, call, randn, refuses, rel, sized, u32
from library import BF16, F32

BOUND = 1e-2  # q, weights, keys, values and result rounded to bf16; sharp softmaxes round worst


class Paged:
    """A random cache with shuffled block tables for sequences of the given lengths (after this step)."""

    def __init__(self, lengths, kv_heads, head_dim, block_size):
        self.lengths, self.block_size, self.kv_heads, self.d = lengths, block_size, kv_heads, head_dim
        per = [max(1, -(-n // block_size)) for n in lengths]
        self.max_blocks = max(per) + 1
        self.num_blocks = sum(per) + 3
        order = torch.randperm(self.num_blocks).tolist()
        # Entries past a sequence's blocks are no blocks: nothing may follow them.
        table = torch.full((len(lengths), self.max_blocks), 0x7FFFFFFF, dtype=torch.int64)
        for s, n in enumerate(per):
            table[s, :n] = torch.tensor([order.pop() for _ in range(n)])
        self.host_table = table
        self.table = table.to(torch.int32).cuda()
        shape = (self.num_blocks, kv_heads, block_size, head_dim)
        self.k, self.v = randn(*shape), randn(*shape)

    def slot(self, s, position):
        return int(self.host_table[s, position // self.block_size]) * self.block_size + position % self.block_size

    def gather(self, cache, s, count):
        """[kv_heads, count, D] float64 of the first positions."""
        slots = torch.tensor([self.slot(s, p) for p in range(count)], device="cuda", dtype=torch.long)
        flat = cache.permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.d)
        return flat[:, slots].double()


def rope_ref(x, cos, sin):
    """x [.., heads, D] float64, cos and sin [.., D/2]."""
    a, b = x.chunk(2, -1)
    c, s = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def split_qkv(qkv, heads, kv, d):
    return [t.view(-1, n, d) for t, n in zip(qkv.split([heads * d, kv * d, kv * d], -1), (heads, kv, kv))]


def angles(count, d):
    a = torch.rand(count, d // 2, device="cuda") * 6.3
    return torch.cos(a), torch.sin(a)


def attend(q, k, v, visible, scale):
    """q [Hq, D], k and v [Hkv, n, D]; the last `visible` positions count."""
    group = q.shape[0] // k.shape[0]
    k, v = (t[:, -visible:].repeat_interleave(group, 0) for t in (k, v))
    return torch.einsum("hn,hnd->hd", torch.softmax(torch.einsum("hd,hnd->hn", q, k) * scale, -1), v)


def decode_case(heads, kv, d, block_size, positions, splits, window=0, norms=True, padding=(), index=False):
    rows = len(positions)
    paged = Paged([p + 1 for p in positions], kv, d, block_size)
    qkv = randn(rows, (heads + 2 * kv) * d, dtype=torch.float32, scale=2.0)
    gains = (randn(d), randn(d)) if norms else (None, None)
    cos, sin = angles(rows + 5, d)
    at = torch.randperm(rows + 5)[:rows].tolist() if index else list(range(rows))
    slots = [0xFFFFFFFF if r in padding else paged.slot(r, p) for r, p in enumerate(positions)]
    scale = d**-0.5
    q, k, v = (t.double() for t in split_qkv(qkv, heads, kv, d))
    if norms:
        q, k = norm_ref(q, gains[0], 1e-6), norm_ref(k, gains[1], 1e-6)
    q, k = (rope_ref(t, cos[at], sin[at]) for t in (q, k))
    k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
    hide_unwritten(paged)
    for r in set(range(rows)) - set(padding):
        block, offset = divmod(slots[r], block_size)
        paged.k[block, :, offset], paged.v[block, :, offset] = float("nan"), float("nan")
    bits = lambda cache: cache.view(torch.int16)
    before_k, before_v = bits(paged.k).clone(), bits(paged.v).clone()
    out = Out((rows, heads * d), torch.bfloat16)
    work = attention_workspace(rows, heads, kv, d, splits)

    rows_at, row_slots, row_positions = u32(at) if index else None, u32(slots), u32(positions)

    def run(to):
        call("moe_attention_decode", qkv, *gains, 1e-6, cos, sin, rows_at, row_slots, row_positions, paged.table,
             paged.max_blocks, paged.k, paged.v, to, work, rows, heads, kv, d, block_size, scale, window, splits, paged.num_blocks * block_size)

    torch.cuda.synchronize()
    run(out.t)
    name = f"Hq={heads} Hkv={kv} D={d} bs={block_size} splits={splits} window={window} rows={rows} max={max(positions)}"
    untouched = torch.ones(paged.num_blocks, block_size, dtype=torch.bool)
    worst = 0.0
    for r, p in enumerate(positions):
        if r in padding:
            assert bool((out.t[r] == 0).all()), f"{name}: padding row {r} is not zero"
            continue
        block, offset = divmod(slots[r], block_size)
        untouched[block, offset] = False
        assert rel(paged.k[block, :, offset], k[r]) < 1e-3, f"{name}: key of row {r}"
        assert torch.equal(paged.v[block, :, offset], v[r]), f"{name}: value of row {r}"
        keys, values = (paged.gather(c, r, p + 1) for c in (paged.k, paged.v))
        visible = min(p + 1, window) if window else p + 1
        want = attend(q[r], keys, values, visible, scale)
        worst = max(worst, rel(out.t[r].view(heads, d), want))
    # Without norms q is larger, and softmaxes are sharper: 1.06e-2 was seen.
    assert worst < (BOUND if norms else 2 * BOUND), f"{name}: error {worst:.2e}"
    mask = untouched.cuda()[:, None, :, None].expand_as(paged.k)
    same = torch.equal(bits(paged.k)[mask], before_k[mask]) and torch.equal(bits(paged.v)[mask], before_v[mask])
    assert same, f"{name}: wrote elsewhere"
    out.check_guard()
    again = torch.empty_like(out.t)
    run(again)
    assert torch.equal(again, out.t), f"{name}: not repeatable"


def decode():
    edges = sized([0, 1, 15, 16, 17, 63, 64, 65, 127, 255, 256, 1000], [0, 15, 16, 17, 130])
    for splits in sized((1, 2, 4, 8, 16, 32), (1, 4, 16)):
        decode_case(32, 4, 128, 16, edges, splits, padding=(3,))
    decode_case(32, 4, 128, 16, [255], attention_splits(1, 32, 4), index=True)
    long = sized(8191, 1000)
    decode_case(32, 4, 128, 64, [long, long * 5 // 8], 32)
    decode_case(32, 4, 128, 16, [long], 64)
    heads_of = sized([(8, 8, 64), (12, 1, 128), (16, 4, 64), (32, 2, 128), (6, 2, 128), (5, 1, 64)], [(12, 1, 128), (5, 1, 64)])
    for heads, kv, d in heads_of:
        for splits in sized((1, 4, 8, 16), (1, 8)):
            decode_case(heads, kv, d, 7, edges, splits, norms=splits != 4)
    for window in sized((1, 16, 100, 2000), (1, 100)):
        for splits in sized((1, 2, 16), (2,)):
            decode_case(16, 2, 128, 16, edges, splits, window=window)
    rows = sized(256, 24)
    decode_case(32, 4, 128, 16, torch.randint(0, 400, (rows,)).tolist(), 1, padding=tuple(range(rows - rows // 4, rows)))
    decode_case(32, 4, 128, 16, [40], 8, padding=(0,))


def qk_norm_rope():
    cases = [(32, 4, 128, 70, True), (5, 1, 64, 3, True), (8, 2, 128, 1, False), (4, 1, 64, 150, False)]
    # 512 tokens and more go another way; 4 + 2 and 5 + 2 heads leave warps without a head, or with one.
    for heads, kv, d, tokens, norms in cases + sized([(32, 4, 128, 700, True), (5, 1, 64, 513, True), (4, 1, 128, 600, False)], [(5, 1, 64, 513, True)]):
        paged = Paged([tokens + 200], kv, d, 16)
        qkv, cos_sin = randn(tokens, (heads + 2 * kv) * d, dtype=torch.float32), angles(tokens, d)
        gains = (randn(d), randn(d)) if norms else (None, None)
        where = torch.randperm(tokens + 200)[:tokens].tolist()
        slots = [paged.slot(0, p) for p in where]
        if tokens > 1:
            slots[1] = 0xFFFFFFFF
        before = paged.k.clone()
        out = Out((tokens, heads, d), torch.bfloat16)

        def run(first, count, q, k, v):
            rows = slice(first, first + count)
            call("moe_qk_norm_rope_cache", qkv[rows], *gains, 1e-6, *(t[rows] for t in cos_sin), None, u32(slots[rows]), q, k, v,
                 BF16, F32, BF16, count, heads, kv, d, 16, paged.num_blocks * 16)

        run(0, tokens, out.t, paged.k, paged.v)
        q, k, v = (t.double() for t in split_qkv(qkv, heads, kv, d))
        if norms:
            q, k = norm_ref(q, gains[0], 1e-6), norm_ref(k, gains[1], 1e-6)
        assert rel(out.t, rope_ref(q, *cos_sin)) < 3e-3
        k = rope_ref(k, *cos_sin)
        kept = torch.tensor([s != 0xFFFFFFFF for s in slots])
        at = torch.tensor(slots)[kept]
        assert rel(paged.k[at // 16, :, at % 16], k[kept]) < 4e-3
        assert torch.equal(paged.v[at // 16, :, at % 16], v[kept].to(torch.bfloat16))
        written = torch.zeros(paged.num_blocks, 16, dtype=torch.bool)
        written[at // 16, at % 16] = True
        mask = ~written.cuda()[:, None, :, None].expand_as(paged.k)
        assert torch.equal(paged.k[mask], before[mask])
        out.check_guard()
        # A row's bits do not depend on the rows beside it.
        few, caches = torch.empty_like(out.t), [before.clone(), torch.zeros_like(paged.v)]
        for first in range(0, tokens, 37):
            run(first, min(37, tokens - first), few[first : first + 37], *caches)
        assert torch.equal(few, out.t) and torch.equal(caches[0], paged.k)


def decode_writes_what_prompts_write():
    """A key's bits in the cache are the same from the launch of a decoding row."""
    heads, kv, rows = 32, 4, sized(40, 3)
    for d in (64, 128):
        paged = Paged([30] * rows, kv, d, 16)
        qkv, cos_sin, gains = randn(rows, (heads + 2 * kv) * d, dtype=torch.float32), angles(rows, d), (randn(d), randn(d))
        slots, k, v = u32([paged.slot(r, 29) for r in range(rows)]), paged.k.clone(), paged.v.clone()
        q, out = (torch.empty(rows, heads * d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        call("moe_qk_norm_rope_cache", qkv, *gains, 1e-6, *cos_sin, None, slots, q, k, v, BF16, F32, BF16, rows, heads, kv, d, 16,
             paged.num_blocks * 16)
        call("moe_attention_decode", qkv, *gains, 1e-6, *cos_sin, None, slots, u32([29] * rows), paged.table, paged.max_blocks, paged.k,
             paged.v, out, attention_workspace(rows, heads, kv, d, 1), rows, heads, kv, d, 16, d**-0.5, 0, 1, paged.num_blocks * 16)
        assert torch.equal(paged.k, k) and torch.equal(paged.v, v), f"D={d}"


def slots_beyond_the_cache():
    """A row whose slot the cache does not have writes nothing to it; where rows decode, it is padding."""
    heads, kv, d, rows = 32, 4, 128, 3
    paged = Paged([30] * rows, kv, d, 16)
    # The last block lies behind the cache that the launches are told of.
    end = (paged.num_blocks - 1) * 16
    qkv, cos_sin, gains = randn(rows, (heads + 2 * kv) * d, dtype=torch.float32), angles(rows, d), (randn(d), randn(d))
    slots, before = u32([end, end + 15, 0xFFFFFFFF]), [paged.k.clone(), paged.v.clone()]
    q, out = (torch.full((rows, heads * d), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    call("moe_qk_norm_rope_cache", qkv, *gains, 1e-6, *cos_sin, None, slots, q, paged.k, paged.v, BF16, F32, BF16, rows, heads, kv, d, 16, end)
    assert bool((q != 7.0).any(1).all()), "queries have no slot"
    for splits in (1, 4, 16):
        out.fill_(7.0)
        call("moe_attention_decode", qkv, *gains, 1e-6, *cos_sin, None, slots, u32([29] * rows), paged.table, paged.max_blocks, paged.k,
             paged.v, out, attention_workspace(rows, heads, kv, d, splits), rows, heads, kv, d, 16, d**-0.5, 0, splits, end)
        assert bool((out == 0).all()), f"splits={splits}: a row without a slot is not zero"
    bits = lambda cache: cache.view(torch.int16)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, (paged.k, paged.v))), "wrote behind the cache"


def hide_unwritten(paged):
    """What no sequence has written is no number, and must not reach a result."""
    for s, n in enumerate(paged.lengths):
        blocks = -(-n // paged.block_size)
        if n % paged.block_size:
            last = int(paged.host_table[s, blocks - 1])
            paged.k[last, :, n % paged.block_size :] = float("nan")
            paged.v[last, :, n % paged.block_size :] = float("nan")


def prefill_case(heads, kv, d, block_size, chunks, window=0, pad=0, kernel="moe_attention_prefill", invariant=0, sharp=1.0):
    """chunks: (start, count) of each sequence; sharp: factor of the scores."""
    paged = Paged([s + n for s, n in chunks], kv, d, block_size)
    if pad == 0:
        hide_unwritten(paged)
    starts = [0]
    for _, n in chunks:
        starts.append(starts[-1] + n)
    tokens = starts[-1] + pad
    positions = [s + i for s, n in chunks for i in range(n)] + [0] * pad
    q = randn(tokens, heads, d, scale=sharp)
    out, counters = Out((tokens, heads * d), torch.bfloat16), torch.zeros(2, dtype=torch.int32, device="cuda")
    call(kernel, q, paged.k, paged.v, u32(starts), u32(positions), paged.table, out.t, BF16, BF16,
         tokens, len(chunks), paged.max_blocks, heads, kv, d, d, d, paged.num_blocks, block_size, d**-0.5, window, invariant, counters, None, 1)
    assert not counters.any(), "counters are not left zero"
    group, name = heads // kv, f"{kernel} Hq={heads} Hkv={kv} D={d} chunks={chunks} window={window} sharp={sharp}"
    for s, (start, n) in enumerate(chunks):
        if n == 0:
            continue
        k, v = (paged.gather(c, s, start + n).repeat_interleave(group, 0) for c in (paged.k, paged.v))
        scores = torch.einsum("thd,hnd->htn", q[starts[s] : starts[s + 1]].double(), k) * d**-0.5
        at = torch.arange(start, start + n, device="cuda")[:, None]
        keys = torch.arange(start + n, device="cuda")[None]
        hidden = (keys > at) | ((keys <= at - window) if window else torch.zeros_like(keys, dtype=torch.bool))
        want = torch.einsum("htn,hnd->thd", torch.softmax(scores.masked_fill(hidden, -math.inf), -1), v)
        error = rel(out.t[starts[s] : starts[s + 1]].view(n, heads, d), want)
        assert error < (BOUND if sharp == 1.0 else 2 * BOUND), f"{name}: sequence {s}: error {error:.2e}"
    assert bool((out.t[starts[-1] :] == 0).all()), f"{name}: padding rows are not zero"
    out.check_guard()


def prefill():
    prefill_case(32, 4, 128, 16, [(0, 200)])
    prefill_case(32, 4, 128, 16, [(0, 1), (7, 65), (0, 0), (130, 1), (64, 64)], pad=9)
    prefill_case(32, 4, 128, 7, [(i * 3, 1 + i % 5) for i in range(70)], pad=1)
    prefill_case(8, 8, 64, 64, [(100, 33), (0, 129)])
    prefill_case(12, 4, 128, 16, [(100, 33), (0, 129)], window=20)
    prefill_case(5, 1, 64, 16, [(500, 3)], window=1, pad=300)
    prefill_case(32, 2, 128, 16, [(0, sized(1500, 300))], window=sized(700, 140))


def prefill_wgmma():
    case = functools.partial(prefill_case, kernel="moe_attention_prefill_wgmma")
    for invariant in (0, 1):
        case(32, 4, 128, 16, [(0, 200)], invariant=invariant)
        case(32, 4, 128, 16, [(0, 1), (7, 65), (0, 0), (130, 1), (64, 64), (0, 8), (0, 9), (3, 17)], pad=9, invariant=invariant)
        case(8, 2, 128, 8, [(i * 3, 1 + i % 45) for i in range(70)], pad=1, invariant=invariant)
        case(8, 8, 64, 64, [(100, 33), (0, 129), (1000, 256)], invariant=invariant)
    for block_size in sized((8, 32, 64, 128, 256), (8, 128)):
        case(32, 4, 128, block_size, [(77, sized(1000, 140)), (0, 128), (0, 127), (128, 1)])
        case(6, 1, 64, block_size, [(0, 300), (513, 130)])
    for window in (1, 20, 128, 129, 300):
        case(12, 4, 128, 16, [(100, 333), (0, 129)], window=window)
        case(16, 2, 64, 32, [(0, 700)], window=window)
    case(5, 1, 64, 16, [(500, 3)], window=1, pad=300)
    case(32, 2, 128, 16, [(0, sized(1500, 300))], window=sized(700, 140))
    case(32, 4, 128, 16, [(sized(5000, 300), sized(2100, 200))])
    # Blocks in pairs, whose second has no rows in the last pair; rows of a pair see positions of two tiles.
    for rows in (129, 160, 161, 384):
        case(32, 1, 64, 16, [(3, rows)])
        case(32, 1, 128, 32, [(3, 3 * rows), (90, 3 * rows)], window=300)
    # Scores grow by far more than weights may (by 2^32) from one tile to the next, and beyond what f32 can say.
    for sharp in (12.0, 40.0):
        case(32, 4, 128, 16, [(sized(1000, 300), 300)], sharp=sharp)
        case(32, 1, 128, 16, [(sized(1000, 300), 300)], sharp=sharp)
        case(8, 2, 64, 32, [(0, 700), (130, 5)], window=200, sharp=sharp)


def expanded_case(heads, chunks, sharp=1.0):
    """Keys of 192 and values of 128, sequences one behind the other; chunks: (start, count) of each."""
    d, v, lengths = 192, 128, [start + n for start, n in chunks]
    bases, starts = ([sum(x[:i]) for i in range(len(x) + 1)] for x in (lengths, [n for _, n in chunks]))
    positions = [start + i for start, n in chunks for i in range(n)]
    q, keys, values = randn(starts[-1], heads, d, scale=sharp), randn(heads, bases[-1], d), randn(heads, bases[-1], v)
    out, counters = Out((starts[-1], heads * v), torch.bfloat16), torch.zeros(2, dtype=torch.int32, device="cuda")
    call("moe_attention_expanded", q, keys, values, u32(starts), u32(positions), None, out.t, BF16, BF16, starts[-1], len(chunks), 0,
         heads, heads, d, v, v, 0, 1, d**-0.5, 0, 0, counters, None, 1, u32(bases[:-1]), bases[-1])
    assert not counters.any(), "counters are not left zero"
    for s, (start, n) in enumerate(chunks):
        own = slice(bases[s], bases[s] + start + n)
        scores = torch.einsum("thd,hnd->htn", q[starts[s] : starts[s + 1]].double(), keys[:, own].double()) * d**-0.5
        hidden = torch.arange(start + n, device="cuda")[None] > torch.arange(start, start + n, device="cuda")[:, None]
        want = torch.einsum("htn,hnd->thd", torch.softmax(scores.masked_fill(hidden, -math.inf), -1), values[:, own].double())
        error = rel(out.t[starts[s] : starts[s + 1]].view(n, heads, v), want)
        assert error < (BOUND if sharp == 1.0 else 2 * BOUND), f"expanded {chunks} sharp={sharp}: sequence {s}: error {error:.2e}"
    out.check_guard()


def expanded():
    for sharp in (1.0, 40.0):
        expanded_case(3, [(0, 300), (77, sized(1000, 260)), (5, 1), (128, 128)], sharp)
        expanded_case(2, [(0, sized(3000, 1100)), (513, 1030)], sharp)
        expanded_case(16, [(130, 17)], sharp)


def prefill_wgmma_rows_do_not_depend_on_their_step():
    """The rows of a prompt in one step, in chunks, and beside another sequence: the same bits. With sharp scores as well:
    a row whose weights become too large must not change its neighbours."""
    for sharp in (1.0, 12.0, 40.0):
        rows_do_not_depend_on_their_step(sharp)


def rows_do_not_depend_on_their_step(sharp):
    heads, kv, d, count = 32, 4, 128, 700
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    paged, q = Paged([count, 300], kv, d, 16), randn(count, heads, d, scale=sharp)

    def run(chunks, rows, invariant):
        starts = [0]
        for _, _, n in chunks:
            starts.append(starts[-1] + n)
        positions = [s + i for _, s, n in chunks for i in range(n)]
        tables = paged.table[[s for s, _, _ in chunks]].contiguous()
        out = torch.empty(starts[-1], heads * d, dtype=torch.bfloat16, device="cuda")
        call("moe_attention_prefill_wgmma", rows, paged.k, paged.v, u32(starts), u32(positions), tables, out, BF16, BF16,
             starts[-1], len(chunks), paged.max_blocks, heads, kv, d, d, d, paged.num_blocks, 16, d**-0.5, 0, invariant, counters, None, 1)
        return out

    whole = run([(0, 0, count)], q, 1)
    parts = [run([(0, at, min(n, count - at))], q[at : at + n].contiguous(), 1) for at, n in ((0, 1), (1, 130), (131, 400), (531, 169))]
    assert torch.equal(torch.cat(parts), whole), "chunks of a prompt have other bits"
    other = randn(300, heads, d)
    both = run([(1, 0, 300), (0, 0, count)], torch.cat([other, q]), 1)
    assert torch.equal(both[300:], whole), "a prompt beside another has other bits"
    assert torch.equal(run([(0, 0, count)], q, 0), whole), "a prompt alone has other bits without batch invariance"


def refusals():
    x, i = randn(1, 64, dtype=torch.float32), u32([0])
    assert refuses("moe_attention_decode", x, None, None, 1e-6, x, x, None, i, i, i, 1, x, x, x, x, 1, 1, 1, 96, 16, 1.0, 0, 1, 16)
    assert refuses("moe_attention_decode", x, None, None, 1e-6, x, x, None, i, i, i, 1, x, x, x, x, 1, 1, 1, 64, 16, 1.0, 0, 3, 16)
    assert refuses("moe_attention_decode", x, None, None, 1e-6, x, x, None, i, i, i, 1, x, x, x, x, 1, 1, 1, 64, 16, 1.0, 0, 1, -1)
    assert refuses("moe_attention_prefill", x, x, x, i, i, i, x, BF16, BF16, 1, 1, 1, 3, 2, 64, 64, 64, 1, 16, 1.0, 0, 0, x, None, 1)
    assert refuses("moe_attention_prefill", x, x, x, i, i, i, x, F32, F32, 1, 1, 1, 2, 2, 64, 64, 64, 1, 16, 1.0, 0, 0, x, None, 1)
    for block_size in (7, 12, 96, 192):
        assert refuses("moe_attention_prefill_wgmma", x, x, x, i, i, i, x, BF16, BF16, 1, 1, 1, 2, 2, 64, 64, 64, 1, block_size, 1.0, 0, 0, x, None, 1)
    assert refuses("moe_attention_prefill_wgmma", x, x, x, i, i, i, x, BF16, BF16, 1, 1, 1, 2, 2, 96, 96, 96, 1, 16, 1.0, 0, 0, x, None, 1)


CHECKS = [decode, qk_norm_rope, decode_writes_what_prompts_write, slots_beyond_the_cache, prefill, prefill_wgmma, expanded, prefill_wgmma_rows_do_not_depend_on_their_step, refusals]
