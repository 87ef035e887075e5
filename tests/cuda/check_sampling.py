"""Sampling, slots and log-probabilities against a port of their definition (model-runtime, `sampling`): equal tokens, not close ones."""

import struct

import numpy as np
import torch
from kernels import Out, call, refuses, sized, u32

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


NO_SLOT, MAX_EDITS, LOGPROB_WORDS = 0xFFFFFFFF, 1024, 72
PLAIN = (1.0, 0.0, 0.0, NO_SLOT, 0, 0, 0, 0)  # no penalties, no slot, no edits, no log-probabilities


def pack_rows(params, extras=None):
    """SampleRow of sampling/sampling.cu: (temperature, k, p, min_p, seed, position) and what follows a slot."""
    rows = zip(params, extras or [PLAIN] * len(params))
    packed = b"".join(struct.pack("<fffIQQfffIIIII", t, p, m, k, seed, at, *more) for (t, k, p, m, seed, at), more in rows)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda()


def pack_masks(kept):
    """A bit for each token of each row: bit i % 32 of word i / 32; those behind the vocabulary are set, too."""
    rows, vocab = kept.shape
    bits = np.ones((rows, (vocab + 31) // 32 * 32), bool)
    bits[:, :vocab] = kept
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).cuda()


def run_rows(logits, params, name, extras=None, uses=None, edits=None, edited=None, masks=None):
    """Checks one launch; `edited` are the logits that the reference samples from, `masks` say which tokens are kept."""
    rows, vocab = logits.shape
    tokens, status = Out((rows,), torch.int32), Out((rows,), torch.int32)
    device, packed = torch.from_numpy(logits).cuda(), pack_rows(params, extras)
    slots = 0 if uses is None else len(uses)
    bits = None if masks is None else pack_masks(masks)
    call("moe_sample", device, packed, uses, edits, slots, bits, rows, vocab, tokens.t, status.t)
    got = [(t & 0xFFFFFFFF, s) for t, s in zip(tokens.t.tolist(), status.t.tolist())]
    for r, (t, k, p, m, seed, at) in enumerate(params):
        want = sample_ref((logits if edited is None else edited)[r], t, k, p, m, seed, at)
        same = got[r] == want if want[1] != 2 else got[r][1] == 2
        assert same, f"{name} row {r} {params[r]}: got {got[r]}, want {want}"
    tokens.check_guard()
    status.check_guard()
    assert np.array_equal(device.cpu().numpy().view(np.uint32), logits.view(np.uint32)), "the logits changed"
    return device, packed, tokens.t, [g[0] for g in got]


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
    kinds = ("normal", "sharp", "ties", "flat", "masked")
    for vocab in sized((1, 7, 1000, 4097, 151936, 151937), (7, 4097)):
        for kind in sized(kinds, ("ties", "masked")):
            rows = sized(24 if vocab > 10000 else 60, 4)
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
    logits = rng.standard_normal(sized((256, 151936), (8, 1000))).astype(F)
    params = [(1.0, 0, 1.0, 0.0, int(rng.integers(2**63)), i) for i in range(len(logits))]
    run_rows(logits, params, f"{len(logits)} rows at temperature 1")


def slots():
    """Rebuilt slots, penalties, edits, counted tokens, log-probabilities."""
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    rows, count = 9, 12
    for vocab in sized((33, 5000, 151936), (33, 5000)):
        logits = rng.standard_normal((rows, vocab)).astype(F) * F(3)
        slot = rng.permutation(count)[:rows].tolist()
        prompts = [rng.integers(vocab, size=rng.integers(1, 60)) for _ in range(rows)]
        outputs = [rng.integers(min(vocab, 50), size=rng.integers(0, 60)) for _ in range(rows)]
        bias = [np.sort(rng.integers(vocab, size=rng.integers(0, 9))) for _ in range(rows)]
        bans = [np.sort(rng.integers(vocab, size=2)) for _ in range(rows)]
        values = [np.where(rng.random(len(b)) < 0.3, -np.inf, rng.standard_normal(len(b)) * 3).astype(F) for b in bias]
        entries, tail = [], []
        for r in range(rows):
            ids, at = np.concatenate([prompts[r], outputs[r]]).astype(np.uint32), 8 * rows + len(tail)
            changes = list(zip(bans[r].tolist(), [0xFF800000] * 2)) + list(zip(bias[r].tolist(), values[r].view(np.uint32).tolist()))
            entries += [slot[r], at, len(prompts[r]), len(ids), at + len(ids), len(changes), 0, 0]
            tail += ids.tolist() + [word for pair in changes for word in pair]
        uses, edits = u32([[7] * vocab] * count), u32([[0] * 2 * MAX_EDITS] * count)
        words = u32(entries + tail)
        call("moe_reset_slots", words, len(words), rows, uses, edits, count, vocab)
        held = uses.cpu().numpy().view(np.uint32).copy()
        choices = [(1.3, 0.2, 0.5), (1.0, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, -0.3, 0.0), (1.0, 0.0, 2.0)] * 2
        wanted, extras, edited = [1, 0, 6, 21, 2, 33, 0, 3, 1], [], logits.copy()
        for r in range(rows):
            n = np.bincount(outputs[r], minlength=vocab)
            flags = np.zeros(vocab, np.uint32)
            flags[prompts[r]] = 1 << 31
            assert np.array_equal(held[slot[r]], flags + n.astype(np.uint32)), f"slot of row {r}"
            repetition, frequency, presence = (F(v) for v in choices[r])
            early, x = r % 2 == 0, edited[r]
            if early:
                x[bans[r]] = -np.inf
            for i, b in zip(bias[r], values[r]):
                x[i] = -np.inf if b == -np.inf else x[i] + b
            used = (n > 0) | (flags > 0)
            y = np.where(x > 0, x / repetition, x * repetition) - frequency * n.astype(F) - np.where(n > 0, presence, F(0))
            edited[r] = np.where(used & np.isfinite(x), y, x)
            extras.append((*choices[r], slot[r], 2 if early else 0, len(bias[r]), 2, wanted[r]))
        params = params_mix(rng, rows, vocab)
        device, packed, tokens, sampled = run_rows(logits, params, f"slots V={vocab}", extras, uses, edits, edited)
        for r in range(rows):
            held[slot[r], sampled[r]] += 1
        assert np.array_equal(uses.cpu().numpy().view(np.uint32), held), "counts"
        check_logprobs(logits, device, packed, tokens, sampled, wanted)


def absent_slots():
    """Slots that rows and resets name but that are not there: such a row is one without a slot, such a reset is none."""
    rng, vocab, count = np.random.default_rng(torch.randint(2**31, ()).item()), 1000, 3
    logits = rng.standard_normal((3, vocab)).astype(F)
    best = logits.argmax(1)
    uses, edits = u32([[7] * vocab] * (count + 2)), u32([[int(best[0]), 0xFF800000] * MAX_EDITS] * (count + 2))
    held = [uses.cpu(), edits.cpu()]
    params = [(0.0, 0, 1.0, 0.0, 1, 1)] * 3
    extras = [(1.3, 0.2, 0.5, slot, MAX_EDITS, 0, 0, 0) for slot in (count, count + 1, 0xFFFFFFFE)]
    run_rows(logits, params, "beyond the slots", extras, uses[:count], edits[:count])
    run_rows(logits, params, "no slots", extras)
    # One whose slot is not there; then ids, too many edits and edits behind the words, of a slot that is.
    entries = [[count, 8, 0, 2, 10, 1, 0, 0], [0, 9, 0, 4, 8, 0, 0, 0], [0, 8, 0, 0, 8, MAX_EDITS + 1, 0, 0], [0, 8, 0, 0, 11, 1, 0, 0],
               [0, 0xFFFFFFFF, 0, 2, 8, 0, 0, 0]]
    for entry in entries:
        words = u32(entry + [1, 2, 3, 4])
        call("moe_reset_slots", words, len(words), 1, uses[:count], edits[:count], count, vocab)
    assert torch.equal(uses.cpu(), held[0]) and torch.equal(edits.cpu(), held[1]), "a slot changed"
    assert refuses("moe_reset_slots", words, len(words), 2, uses, edits, count, vocab), "two entries in 12 words"
    assert refuses("moe_sample", torch.from_numpy(logits).cuda(), pack_rows(params), None, None, 1, None, 3, vocab, words, words), "no uses"


def masked():
    """Rows with masks: random ones, of few tokens, of one, of none, and of all; what they exclude may be NaN."""
    rng = np.random.default_rng(torch.randint(2**31, ()).item())
    for vocab in (5, 31, 32, 33, 601, 1000, 32768, 151936):
        rows = 12
        logits = (4 * rng.standard_normal((rows, vocab))).astype(F)
        kept = rng.random((rows, vocab)) < np.repeat([0.5, 3 / vocab, 1 / 32, 1.0], 3)[:, None]
        kept[0], kept[1] = False, np.arange(vocab) == rng.integers(vocab)
        kept[4, vocab // 2] = True
        excluded = np.flatnonzero(~kept[4])
        logits[4, excluded[: len(excluded) // 2]] = np.nan
        edited = np.where(kept, logits, F(-np.inf))
        run_rows(logits, params_mix(rng, rows, vocab), f"masks of {vocab}", edited=edited, masks=kept)


def check_logprobs(logits, device, packed, tokens, sampled, wanted):
    rows, vocab = logits.shape
    out = Out((rows, LOGPROB_WORDS), torch.int32)
    call("moe_logprobs", device, packed, 16, tokens, rows, vocab, out.t)
    out.check_guard()
    words = out.t.cpu().numpy().view(np.uint32)
    for r in [r for r in range(rows) if wanted[r] > 0]:
        order = np.lexsort((np.arange(vocab), -logits[r].astype(np.float64)))
        total = int(weights(logits[r], logits[r].max(), F(1), 0.0).sum())
        want = [0, int(np.flatnonzero(order == sampled[r])[0]) + 1, logits[r].max().view(np.uint32), logits[r, sampled[r]].view(np.uint32)]
        assert words[r, :4].tolist() == [int(w) for w in want], f"row {r}: {words[r, :4]} {want}"
        assert int(words[r, 4]) | int(words[r, 5]) << 32 == total
        n = min(wanted[r] - 1, vocab)
        assert {int(~w & 0xFFFFFFFF) for w in words[r, 8 : 8 + 2 * n : 2].astype(np.int64)} == set(order[:n].tolist())
    for r in [r for r in range(rows) if wanted[r] == 0]:
        assert (words[r] == 0x5A5A5A5A).all()


CHECKS = [known_answers, sampling, slots, absent_slots, masked]
