"""Sampling and penalties against a port of their definition (model-runtime, `sampling`): equal tokens, not close ones."""

import struct

import numpy as np
import torch
from kernels import NOTHING, Out, call, randn, rel, u32

F = np.float32


def exp_exact(x):
    """e^x for -30 <= x <= 0 in f32, no operation fused."""
    rounder = F(12582912.0)
    shifted = x * F(1.4426950408889634) + rounder
    n = shifted - rounder
    r = (x - n * F(0.6933594)) - n * F(-2.1219444e-4)
    p = np.full_like(x, F(1.9875691e-4))
    for c in (1.3982e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 5e-1):
        p = p * r + F(c)
    p = p * (r * r) + r + F(1.0)
    exponent = (shifted.view(np.uint32) - rounder.view(np.uint32) + np.uint32(127)).astype(np.uint32)
    return p * (exponent << np.uint32(23)).view(np.float32)


def weights(logits, top, temperature, min_p):
    with np.errstate(over="ignore"):
        x = (logits - top) / temperature
    e = exp_exact(np.where(x > F(-30), x, F(-30)).astype(np.float32))
    w = ((e.astype(np.float64) * 2.0**38 + 2.0**52).view(np.uint64) & np.uint64(2**52 - 1)).astype(np.uint64)
    return np.where(e < F(min_p), np.uint64(0), w)


def philox(seed, position):
    mask = 0xFFFFFFFF
    c, k = [position & mask, position >> 32, 0, 0], [seed & mask, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[1] << 32 | c[0]


def sample_ref(logits, temperature, top_k, top_p, min_p, seed, position):
    """(token, status) of one row, by sorting."""
    if position == 2**64 - 1:
        return 0xFFFFFFFF, 0
    bad = np.flatnonzero(np.isnan(logits) | (logits == np.inf))
    if len(bad):
        return int(bad[0]), 1
    likeliest = int(np.argmax(logits))
    if logits[likeliest] == -np.inf:
        return likeliest, 2
    if F(temperature) < F(1e-5):
        return likeliest, 0
    w = weights(logits, logits[likeliest], max(F(temperature), F(1e-2)), min_p)
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    if 0 < top_k < len(logits):
        order = order[:top_k]
    if F(top_p) < 1:
        before = np.concatenate(([0], np.cumsum(w[order])[:-1])).astype(np.uint64)
        wanted = float(F(top_p)) * float(int(w[order].sum()))
        order = order[before.astype(np.float64) < wanted]
    kept = np.sort(order)
    running = np.cumsum(w[kept])
    share = philox(seed, position) * int(running[-1]) >> 64
    return int(kept[np.searchsorted(running, np.uint64(share), side="right")]), 0


def known_answers():
    assert philox(0, 0) == 0xE169C58D6627E8D5
    got = weights(np.array([-0.1, -1.0, -2.5, -7.75, -20.0], F), F(0), F(1), 0.0)
    assert got.tolist() == [248719818752, 101121933312, 22563352576, 118401608, 567]


def run_rows(logits, params, name):
    rows, vocab = logits.shape
    packed = b"".join(struct.pack("<fffIQQ", t, p, m, k, seed, at) for t, k, p, m, seed, at in params)
    device = torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda()
    tokens, status = Out((rows,), torch.int32), Out((rows,), torch.int32)
    call("moe_sample", torch.from_numpy(logits).cuda(), device, rows, vocab, tokens.t, status.t)
    got = [(t & 0xFFFFFFFF, s) for t, s in zip(tokens.t.tolist(), status.t.tolist())]
    for r, (t, k, p, m, seed, at) in enumerate(params):
        want = sample_ref(logits[r], t, k, p, m, seed, at)
        same = got[r] == want if want[1] != 2 else got[r][1] == 2
        assert same, f"{name} row {r} {params[r]}: got {got[r]}, want {want}"
    tokens.check_guard()
    status.check_guard()


def params_mix(rng, rows, vocab):
    choice = lambda *values: values[rng.integers(len(values))]
    return [
        (
            choice(0.0, 1e-6, 0.005, 0.3, 0.7, 1.0, 1.0, 2.5),
            int(choice(0, 0, 1, 2, 20, 50, vocab // 2 + 1, vocab, vocab + 5)),
            choice(1.0, 1.0, 0.9, 0.95, 0.5, 0.01, 0.999),
            choice(0.0, 0.0, 0.05, 0.3, 1.0),
            int(rng.integers(2**63)),
            int(rng.integers(2**40)),
        )
        for _ in range(rows)
    ]


def sampling():
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    for vocab in (1, 7, 1000, 4097, 151936, 151937):
        for kind in ("normal", "sharp", "ties", "flat", "masked"):
            rows = 24 if vocab > 10000 else 60
            logits = rng.standard_normal((rows, vocab)).astype(F) * F(3)
            if kind == "sharp":
                logits *= F(6)
            if kind == "ties":
                logits = np.round(logits).astype(F)
                logits[logits == 0] *= rng.choice([F(1), F(-1)], size=int((logits == 0).sum())).astype(F)
            if kind == "flat":
                logits[:] = F(-1.5)
            if kind == "masked":
                logits[rng.random(logits.shape) < 0.7] = -np.inf
            params = params_mix(rng, rows, vocab)
            if kind == "masked":
                logits[0] = -np.inf
                logits[1, rng.integers(vocab)] = np.nan
                logits[2, rng.integers(vocab)] = np.inf
                params[3] = (*params[3][:5], 2**64 - 1)
            run_rows(logits, params, f"V={vocab} {kind}")
    logits = rng.standard_normal((256, 151936)).astype(F)
    run_rows(logits, [(1.0, 0, 1.0, 0.0, int(rng.integers(2**63)), i) for i in range(256)], "256 rows at temperature 1")


def penalties():
    rows, slots = 9, 12
    for vocab in (33, 5000, 151936):
        logits = randn(rows, vocab, dtype=torch.float32)
        counts = (torch.rand(slots, vocab, device="cuda") * 4 - 2).clamp(min=0).ceil().to(torch.int16)
        seen = torch.rand(slots, vocab, device="cuda") < 0.3
        bits = torch.nn.functional.pad(seen, (0, -vocab % 32)).view(slots, -1, 32).long()
        prompt = (bits << torch.arange(32, device="cuda")).sum(-1).to(torch.int32)
        slot = torch.randperm(slots)[:rows].tolist()
        params = [(1.3, 0.2, 0.5), (1.0, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, -0.3, 0.0), (1.0, 0.0, 2.0)] * 2
        slot[8] = 0xFFFFFFFF
        packed = b"".join(struct.pack("<fffI", *params[r], slot[r]) for r in range(rows))
        device = torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda()
        want = logits.clone()
        for r in range(rows - 1):
            repetition, frequency, presence = params[r]
            n = counts[slot[r]].float()
            hit = (n > 0) | seen[slot[r]]
            x = torch.where(want[r] > 0, want[r] / repetition, want[r] * repetition)
            want[r] = torch.where(hit, x - frequency * n - presence * (n > 0), want[r])
        got = logits.clone()
        call("moe_penalties", got, device, counts, prompt, rows, vocab)
        assert rel(got, want) < 1e-6
        assert torch.equal(got[1], logits[1]) and torch.equal(got[8], logits[8])
        tokens = torch.randint(0, vocab, (rows,), device="cuda").to(torch.int32)
        tokens[2] = NOTHING
        after = counts.clone()
        call("moe_count_tokens", tokens, device, after, rows, vocab)
        for r in range(rows - 1):
            if r != 2:
                counts[slot[r], int(tokens[r])] += 1
        assert torch.equal(after, counts)


CHECKS = [known_answers, sampling, penalties]
