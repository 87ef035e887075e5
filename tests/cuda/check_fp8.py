"""Checks the products of FP8 weights with FP8 activations against float64, launch by launch; run by quant_tensor.py.

Each launch is held to what it was given: activations to the bits of their definition in torch, products to float64 of the very bytes that they
multiply, within the noise of the tensor cores' sums (128 columns with about 14 bits) and of rounding to bf16.
"""
import torch

from expert_cases import Case, cases, counters_for, list_slots
from library import F32, ids_back, poison, rel_error, sized
from quant_pack import FP8, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_128, Pack, Scheme

CHECKS = []
GROUP = 128
# Of each 128 columns, which lies where: cuda/quant/fp8_quantise.cu.
ORDER = [64 * h + 16 * j + 2 * c + i % 2 + 8 * (i // 2) for c in range(4) for h in range(2) for j in range(4) for i in range(4)]
QUADS = [16 * j + 2 * c + i % 2 + 8 * (i // 2) for j in range(8) for c in range(4) for i in range(4)]
SCHEMES = [FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, Scheme("fp8 blocks of 32 x 128", FP8, 128, scale=F32, rows=32), Scheme("fp8 blocks of 1 x 128", FP8, 128, scale=F32)]
SHAPES = sized([(8, 2, 128, 128), (16, 4, 384, 256), (5, 1, 640, 1408), (40, 3, 256, 384)], [(8, 2, 128, 128)])
BOUND = 4e-3
DIFFERENT = 0.06  # of many activations: those near the middle between two numbers of 3 bits


def check(function):
    CHECKS.append(function)
    return function


def quantised(x, scale=None):
    """(q [rows, columns] E4M3 in order of columns, scales [rows, groups]) as the kernels define them, or with these scales."""
    groups = x.float().view(x.shape[0], -1, GROUP)
    if scale is None:
        scale = groups.abs().amax(-1) / torch.tensor(448.0, device="cuda")  # by a number torch multiplies with its inverse
    inverse = torch.where(scale >= 2.0**-126, 1 / scale, 0.0)
    return (groups * inverse[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape), scale


def fp8_rows(rows, columns):
    """Memory for q, zeros, and for scales [groups, rows rounded up to 4], poisoned."""
    return torch.zeros(rows, columns, dtype=torch.uint8, device="cuda"), poison(columns // GROUP, -(-rows // 4) * 4, dtype=torch.float32)


def quantise(lib, x, quads=0):
    """q in the kernel's order and scales."""
    q, scales = fp8_rows(*x.shape)
    lib.launch("moe_fp8_quantise", x, q, scales, *x.shape, quads)
    return q, scales


def to_places(lib, rows, listed, counts, bucket, top_k):
    """Rows and scales of all slots in order of experts."""
    tokens, columns = rows[0].shape
    q, scales = fp8_rows(tokens * top_k, columns)
    lib.launch("moe_fp8_places", *rows, listed, counts, bucket, q, scales, tokens, top_k, columns, counts.numel())
    return q, scales


def in_order(q, order=ORDER):
    """Bytes of rows in order of columns."""
    back = torch.empty_like(q).view(-1, GROUP)
    back[:, order] = q.view(-1, GROUP)
    return back.view(q.shape)


def values(q, scales, order=ORDER):
    """What bytes and scales mean, in float64."""
    return in_order(q, order).view(torch.float8_e4m3fn).double() * scales.T[: q.shape[0]].double().repeat_interleave(GROUP, 1)


@check
def fp8_quantise_has_the_defined_bits(lib):
    for rows, columns in sized([(1, 128), (31, 256), (33, 768), (4097, 2048)], [(1, 128), (33, 256)]):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * torch.logspace(-20, 20, rows, device="cuda")[:, None].to(torch.bfloat16)
        x[0, :GROUP] = 0
        x[-1, -1] = 2.0**-133
        q, scales = quantise(lib, x)
        want, scale = quantised(x)
        assert torch.equal(scales[:, :rows], scale.T), f"[{rows}, {columns}]: scales differ"
        assert torch.equal(in_order(q), want.view(torch.uint8)), f"[{rows}, {columns}]: bytes differ"
        quads, scales = quantise(lib, x, quads=1)
        assert torch.equal(scales[:, :rows], scale.T), f"[{rows}, {columns}] by quads: scales differ"
        assert torch.equal(in_order(quads, QUADS), want.view(torch.uint8)), f"[{rows}, {columns}] by quads: bytes differ"


@check
def fp8_rows_go_to_the_places_of_their_slots(lib):
    for name, case in cases(sized([1, 40, 700], [1, 40]), SHAPES + [(9, 9, 128, 128), (300, 11, 128, 128)]):
        listed, counts, bucket = list_slots(lib, case, None, False)
        order = torch.cat([listed[e, : int(counts[e])] for e in range(case.local)])
        q, scales = to_places(lib, quantise(lib, case.x), listed, counts, bucket, case.top_k)
        want, scale = quantised(case.x)
        tokens = order.long() // case.top_k
        assert torch.equal(in_order(q)[: order.numel()], want.view(torch.uint8)[tokens]), f"{name}: bytes differ"
        assert torch.equal(scales[:, : order.numel()], scale[tokens].T), f"{name}: scales differ"
        assert (q[order.numel() :] == 0).all() and scales[:, order.numel() :].isnan().all(), f"{name}: rows behind the last were written"


def run_experts(lib, case, packs, buckets=False):
    """(lists, counts, rows as quantised, act as quantised, slot rows); rows and act in order of experts."""
    tokens, top_k, _, local, hidden, inter = case.sizes()
    slots = tokens * top_k
    listed, counts, bucket = list_slots(lib, case, counters_for(lib, local), buckets)
    acts, rows = fp8_rows(slots, inter), poison(slots, hidden, dtype=torch.bfloat16)
    x = to_places(lib, quantise(lib, case.x), listed, counts, bucket, top_k)
    lib.launch("moe_fp8_experts_gate_up", *x, packs[0], listed, counts, bucket, *acts, tokens, top_k)
    lib.launch("moe_fp8_experts_down", *acts, packs[1], listed, counts, bucket, rows, None, tokens, top_k)
    return listed, counts, x, acts, rows


def expect_activations(name, got, want):
    """An expert's activations in FP8 against exact ones: equal but near the middle between two FP8 numbers, and on average as large."""
    (q, scales), want = got, want.to(torch.bfloat16)
    off = (scales.T / quantised(want)[1] - 1).abs().max().item()
    assert off < 2.0**-6, f"{name}: the scale of a row of activations is off by {off}"
    exact, q = quantised(want, scales.T)[0], in_order(q).view(torch.float8_e4m3fn)
    differs, most = (q.view(torch.uint8) != exact.view(torch.uint8)).float().mean().item(), DIFFERENT + 5 * (DIFFERENT / q.numel()) ** 0.5
    assert differs < most, f"{name}: {differs:.1%} of the activations differ, {most:.1%} may"
    # Rounding to 3 bits, 2.6 % of a number, has no direction: a factor shows in the mean.
    got, want = q.double() * scales.T.double().repeat_interleave(GROUP, 1), want.double()
    squares = want.square().sum()
    factor, noise = ((got * want).sum() / squares).item(), 0.026 * (want.pow(4).sum().sqrt() / squares).item()
    assert abs(factor - 1) < BOUND + 5 * noise, f"{name}: activations are {factor} times what they should be"
    # A step of 3 bits, or of the smallest activations what sums of some 14 bits leave open.
    off = ((q.float() - exact.float()).abs() - exact.float().abs() / 8).max().item()
    assert off < 448 * 2.0**-8, f"{name}: an activation is off by more than a step, by {off} of 448"


def expect_experts(lib, name, case, packs):
    listed, counts, x, acts, rows = got = run_experts(lib, case, packs)
    x, a = values(*x), values(*acts)
    place, worst = 0, 0.0
    for e in range(case.local):
        count = int(counts[e])
        if count == 0:
            continue
        slots, mine = ids_back(listed[e, :count]), slice(place, place + count)
        gate, up = (x[mine] @ packs[0].w[e].T).split(case.inter, -1)
        expect_activations(f"{name}: expert {e}", (acts[0][mine], acts[1][:, mine]), gate * torch.sigmoid(gate) * up)
        down = rel_error(rows[slots], a[mine] @ packs[1].w[e].T)
        assert down < BOUND, f"{name}: slot rows of expert {e} are off by {down}"
        place, worst = place + count, max(worst, down)
    absent = case.local_ids() < 0
    assert rows[absent].isnan().all(), f"{name}: rows of absent slots were written"
    assert (acts[0][place:] == 0).all() and acts[1][:, place:].isnan().all(), f"{name}: activations behind the last were written"
    assert rows[~absent].isfinite().all(), f"{name}: rows are missing"
    return worst, got


def packs_of(local, hidden, inter, scheme):
    return Pack(local, 2 * inter, hidden, scheme, gate_up=True), Pack(local, hidden, inter, scheme)


@check
def fp8_experts_match_float64(lib):
    worst = 0.0
    for scheme in SCHEMES:
        for name, case in cases(sized([1, 40, 700], [1, 40]), SHAPES):
            packs = packs_of(case.local, case.hidden, case.inter, scheme)
            error, got = expect_experts(lib, f"{scheme.name} {name}", case, packs)
            worst = max(worst, error)
            shuffled = run_experts(lib, case, packs, buckets=True)[-1]
            assert torch.equal(shuffled.nan_to_num(7.0), got[-1].nan_to_num(7.0)), f"{scheme.name} {name}: shuffled buckets differ from listed slots"
    print(f"  worst error {worst:.2e}")


@check
def fp8_experts_of_the_models_shape(lib):
    shape = sized((128, 8, 2048, 768), (8, 2, 128, 128))
    packs = packs_of(shape[0], *shape[2:], FP8_BLOCK)
    for tokens in sized((600, 5000), (60,)):
        case = Case(tokens, shape)
        _, got = expect_experts(lib, f"T={tokens}", case, packs)
        for _ in range(sized(5, 1)):
            assert torch.equal(run_experts(lib, case, packs)[-1], got[-1]), f"T={tokens}: runs differ"
        part = Case(tokens // 3, shape, ids=ids_back(case.ids)[: tokens // 3])
        part.x = case.x[: tokens // 3].contiguous()
        rows = run_experts(lib, part, packs)[-1]
        assert torch.equal(rows, got[-1][: rows.shape[0]]), f"rows of {tokens // 3} tokens differ from those among {tokens}"


@check
def fp8_refuses_what_it_does_not_read(lib):
    w13, w2 = packs_of(8, 128, 128, FP8_BLOCK)
    args = (None, None, None)
    rest = (None, None, 4, None, None, 4, 2)
    assert lib.refused("moe_fp8_experts_gate_up", None, None, w2, *rest)
    assert lib.refused("moe_fp8_experts_down", None, None, w13, *rest)
    half = Pack(8, 128, 128, FP8_BLOCK, gate_up=True)
    scales = poison(1, 8, dtype=torch.float32)
    assert lib.refused("moe_fp8_experts_gate_up", None, None, half, *rest[:4], scales, 4, 2), "half of the columns that share a scale"
    assert lib.refused("moe_fp8_experts_gate_up", None, None, w13, *rest), "no place for scales"
    assert lib.refused("moe_fp8_experts_down", None, None, Pack(8, 128, 128, INT8_128), *rest)
    assert lib.refused("moe_fp8_quantise", *args, 4, 96, 0)
    assert lib.refused("moe_fp8_places", None, None, None, None, 4, None, None, 4, 2, 96, 8)
    assert lib.refused("moe_fp8_places", None, None, None, None, 4, None, None, 4, 2, 128, 1025), "more experts than it adds up"
    assert lib.raw("moe_fp8_experts_down", None, None, w2, None, None, 4, None, None, 0, 2, None) == 0, "no tokens is no error"
    assert lib.raw("moe_fp8_quantise", *args, 0, 128, 0, None) == 0, "no rows is no error"
    assert lib.raw("moe_fp8_places", None, None, None, None, 4, None, None, 0, 2, 128, 8, None) == 0, "no slots is no error"
