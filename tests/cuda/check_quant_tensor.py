"""Checks the kernels on warpgroup products with quantised weights against float64; run by quant_tensor.py.

moe_quant_experts_tensor and moe_quant_linear_tensor round no weight; the former has a form for few rows of an expert, which `invariant`
excludes. moe_quant_experts_wide has them as `Rounded`: it is held to that
reference within the noise of sums and of rounded activations, and to the exact one within the noise of bf16.
"""
import itertools

import torch

from check_wide import BOUNDS, same
from expert_cases import Case, cases, counters_for, expect_close, expect_counts_cleared, list_slots
from library import ADD_F32, BF16, F32, ids_back, poison, rel_error, sized
from quant_pack import FP8, FP8_BLOCK, FP8_CHANNEL, INT4, INT4_128, INT4_32Z, INT4_CHANNEL, INT8_128, INT8_Z, SCHEMES, Pack, fixed_point

CHECKS = []
MOST_DIGITS = 4  # rows of an expert, on average, below which rows beside integers are digits
MOST_EXACT = 64  # rows of a dense product up to which no weight is rounded
SHAPES = sized([(128, 8, 2048, 768), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344), (12, 4, 4096, 1536)],
               [(8, 2, 64, 64), (5, 1, 320, 192)])


def check(function):
    CHECKS.append(function)
    return function


class Rounded:
    """Matrices of a pack as bf16: scales of 16 bits are rounded first."""

    def __init__(self, pack):
        self.pack = pack

    def __getitem__(self, e):
        p = self.pack
        if p.format == FP8:
            return p.w[e].to(torch.bfloat16).double()
        scale = p.scale[e].float().repeat_interleave(p.group, -1)[:, : p.k]
        units = p.w[e] / scale.double()  # q - zero, but for the last bit
        return (units.round() * scale.to(torch.bfloat16).double()).to(torch.bfloat16).double()


def packs_of(local, shape, scheme):
    return Pack(local, 2 * shape[3], shape[2], scheme, gate_up=True), Pack(local, shape[2], shape[3], scheme)


def quantised(case, packs, rounded=False):
    """The case with these experts instead of its own."""
    case.packs = packs
    case.w13, case.w2 = (Rounded(p) if rounded else p.w for p in packs)
    return case


def quant_cases(token_counts, shapes=SHAPES, schemes=SCHEMES, rounded=False):
    """(name, case) over shapes, schemes and the situations that break kernels."""
    for shape in shapes:
        for scheme in schemes:
            packs = packs_of(shape[0], shape, scheme)
            for name, case in cases(token_counts, [shape]):
                local = case.local == shape[0]
                yield f"{scheme.name} {name}", quantised(case, packs if local else packs_of(case.local, shape, scheme), rounded)


def as_digits(case):
    """The case with rows as integer products take them, where moe_quant_experts_tensor has these."""
    tokens, top_k, experts, *_ = case.sizes()
    if case.packs[0].format != FP8 and tokens * top_k // experts < MOST_DIGITS:
        case.operand = fixed_point
    return case


def run(lib, launcher, case, buckets=False, counters=None, invariant=0):
    """Slot rows and token rows, over listed slots or each expert's slots in a bucket, shuffled."""
    wide = launcher == "moe_quant_experts_wide"
    act, rows, out = case.buffers(rows=torch.bfloat16 if wide else torch.float32)
    tokens, top_k, experts, local, hidden, _ = case.sizes()
    counters = counters_for(lib, local) if counters is None else counters
    listed, counts, places = list_slots(lib, case, counters, buckets)
    lib.launch(launcher, case.x, *case.packs, listed, counts, places, act, rows, counters, tokens, top_k, experts, invariant)
    lib.launch("moe_combine", rows, case.ids, case.weights, case.map, out, tokens, top_k, experts, local, hidden, BF16 if wide else F32, BF16)
    expect_counts_cleared(lib, counters, local)
    return rows, out


def run_tensor(lib, case, **how):
    return run(lib, "moe_quant_experts_tensor", case, **how)


def run_wide(lib, case, **how):
    return run(lib, "moe_quant_experts_wide", case, **how)


def expect_near_exact(name, case, got):
    """Slot rows within the noise of weights rounded to bf16."""
    case.w13, case.w2 = case.packs[0].w, case.packs[1].w
    present = case.local_ids() >= 0
    if not present.any():
        return 0.0
    error = rel_error(got[0][present], case.reference()[0][present])
    # Gate, up and down are each rounded by up to 2^-8, and the few columns of small shapes hardly average that.
    assert error < 2.0**-6, f"{name}: slot rows are off by {error} from those of exact weights"
    return error


@check
def quant_tensor_matches_float64(lib):
    worst = exact = 0.0
    for name, case in quant_cases(sized([1, 17, 300], [1, 40])):
        for invariant in (0, 1):
            what, how = f"tensor {name} invariant={invariant}", dict(invariant=invariant)
            case.operand = torch.Tensor.double
            got = run_tensor(lib, case, **how)
            worst = max(worst, expect_close(what, case if invariant else as_digits(case), got, bound=6e-4))
            assert same(run_tensor(lib, case, buckets=True, **how), got), f"{what}: shuffled buckets differ from listed slots"
            exact = max(exact, expect_near_exact(what, case, got))
    print(f"  tensor: worst error of token rows {worst:.2e}, of slot rows from exact weights {exact:.2e}")


@check
def quant_wide_matches_float64(lib):
    worst = exact = 0.0
    for name, case in quant_cases(sized([1, 257, 3000], [1, 40, 300]), SHAPES[1:], [INT4_128, INT4_32Z, INT4_CHANNEL, INT8_Z, FP8_BLOCK, FP8_CHANNEL], True):
        got = run_wide(lib, case)
        worst = max(worst, expect_close(f"wide {name}", case, got, **BOUNDS))
        assert same(run_wide(lib, case, buckets=True), got), f"wide {name}: shuffled buckets differ from listed slots"
        exact = max(exact, expect_near_exact(f"wide {name}", case, got))
    print(f"  wide: worst error of token rows {worst:.2e}, of slot rows from exact weights {exact:.2e}")


@check
def quant_large_batches(lib):
    """Many rows of the model's own shape; runs of one launch on shared counters have the same bits."""
    shape = SHAPES[0]
    for scheme in (INT4_128, INT8_128, FP8_BLOCK):
        packs, counters = packs_of(shape[0], shape, scheme), counters_for(lib, shape[0])
        for tokens, launch in ((64, run_tensor), (128, run_tensor), (500, run_tensor), (1024, run_tensor), (512, run_wide), (1500, run_wide), (5000, run_wide)):
            case = quantised(Case(sized(tokens, tokens // 8), shape), packs, launch is run_wide)
            got = launch(lib, case, counters=counters)
            expect_close(f"{scheme.name} T={tokens}", case, got, **(BOUNDS if launch is run_wide else dict(bound=6e-4)))
            for _ in range(sized(10, 2)):
                assert same(launch(lib, case, counters=counters), got), f"{scheme.name} T={tokens}: runs differ"


@check
def quant_few_rows_of_every_number(lib):
    """Experts of 0 to 17 and of 33 rows in one launch, of values over many magnitudes, one token of which is no number."""
    for scheme, (hidden, inter, idle) in itertools.product(SCHEMES, sized(((1024, 448, 30), (64, 768, 30), (320, 192, 300)), ((64, 128, 30),))):
        counts = torch.tensor([0, 33, *range(18), *[0] * idle])  # with many idle ones two blocks share an SM, else three
        ids = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        ids = ids[torch.randperm(ids.numel())][:, None]
        name, shape = f"few {scheme.name} H={hidden} I={inter}", (counts.numel(), 1, hidden, inter)
        case = quantised(Case(ids.shape[0], shape, ids=ids), packs_of(shape[0], shape, scheme))
        case.x *= 2.0 ** -torch.randint(0, 12, case.x.shape, device="cuda") * 4
        got = run_tensor(lib, case)
        expect_close(name, as_digits(case), got, bound=1e-3, exact=True)
        lost = int(torch.randint(case.tokens, ()))
        case.x[lost, int(torch.randint(hidden, ()))] = float("nan") if lost % 2 else float("inf")
        rows, _ = run_tensor(lib, case)
        assert rows[lost].isnan().all(), f"{name}: numbers out of a row that has one that is none"
        others = torch.arange(case.tokens, device="cuda") != lost
        assert torch.equal(rows[others], got[0][others]), f"{name}: one row changes others"


@check
def quant_rows_do_not_depend_on_the_batch(lib):
    shape = SHAPES[0]
    run_invariant = lambda lib, case: run_tensor(lib, case, invariant=1)
    for scheme, launch, most in ((INT4_128, run_invariant, 700), (FP8_BLOCK, run_invariant, 700), (INT4_128, run_wide, 3000), (INT8_128, run_wide, 3000)):
        packs = packs_of(shape[0], shape, scheme)
        case = quantised(Case(sized(most, 90), shape), packs)
        whole, _ = launch(lib, case)
        for tokens in sized((1, 5, 40, 200, 600), (1, 40)):
            part = quantised(Case(tokens, shape, ids=ids_back(case.ids)[:tokens]), packs)
            part.x = case.x[:tokens].contiguous()
            rows, _ = launch(lib, part)
            assert torch.equal(rows, whole[: rows.shape[0]]), f"{scheme.name}: rows of {tokens} tokens differ from those among {case.tokens}"


@check
def quant_wide_tiles_of_every_height(lib):
    """Experts of 1 to 600 rows, 7 apart, in one launch: every number of columns and every end of a tile."""
    counts = torch.arange(1, sized(600, 130), sized(7, 21))
    ids = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    ids = ids[torch.randperm(ids.numel())][:, None]
    for scheme, (hidden, inter) in itertools.product((INT4_128, INT8_Z, FP8_BLOCK), sized(((1024, 448), (64, 768), (2048, 64)), ((64, 128),))):
        shape = (counts.numel(), 1, hidden, inter)
        case = quantised(Case(ids.shape[0], shape, ids=ids), packs_of(shape[0], shape, scheme), True)
        expect_close(f"wide {scheme.name} H={hidden} I={inter}", case, run_wide(lib, case), **BOUNDS)


def linear(lib, pack, x, bias, out, output, splits=0):
    lib.launch("moe_quant_linear_tensor", x, pack, bias, out, output, x.shape[0], splits)
    return out


@check
def quant_linear_reads_every_weight(lib):
    """Rows of the identity give the weights themselves, every code with every zero point and scale at its place."""
    for scheme, (n, k) in itertools.product(SCHEMES, sized([(512, 2048), (144, 320), (64, 64)], [(144, 320)])):
        codes = torch.arange(256, dtype=torch.uint8, device="cuda")
        of = codes[(codes & 0x7F) != 0x7F] if scheme.format == FP8 else codes[:16] if scheme.format == INT4 else codes
        for gate_up in (False, True):
            pack = Pack(1, n, k, scheme, gate_up=gate_up, q=of[torch.randint(0, of.numel(), (1, n, k), device="cuda")])
            eye, name, want = torch.eye(k, device="cuda", dtype=torch.bfloat16), f"{scheme.name} {n} x {k} gate_up={gate_up}", pack.w[0].T
            for splits in (-1, 0):
                out = linear(lib, pack, eye, None, poison(k, n, dtype=torch.float32), F32, splits)
                bound = 2.0**-24 if splits == -1 or k <= MOST_EXACT else 2.0**-8 * 1.02  # rounded to bf16, once
                assert ((out.double() - want).abs() <= want.abs() * bound).all(), f"{name} splits={splits}"


@check
def quant_linear_matches_float64(lib):
    shapes = sized([(5120, 2048), (2048, 4096), (176, 64), (16, 1088), (784, 2880)], [(176, 64), (304, 1088)])
    worst = [0.0, 0.0]  # with rounded weights, exact
    for i, (scheme, (n, k), m) in enumerate(itertools.product(SCHEMES, shapes, sized([1, 8, 17, 33, 64, 65, 128, 129, 300], [1, 17, 70, 140]))):
        pack, output, splits = Pack(1, n, k, scheme, gate_up=i % 2 == 1), i % 3, (0, 0, 1, 3, -1)[i % 5]
        x, bias = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda", dtype=torch.bfloat16) if i % 4 == 0 else None
        before = torch.randn(m, n, device="cuda") if output == ADD_F32 else poison(m, n, dtype=torch.bfloat16 if output == BF16 else torch.float32)
        want = x.double() @ pack.w[0].T + (0 if bias is None else bias.double()) + (before.double() if output == ADD_F32 else 0)
        name = f"linear {scheme.name} m={m} n={n} k={k} output={output} splits={splits}"
        got = linear(lib, pack, x, bias, before.clone(), output, splits)
        error = rel_error(got, want)
        exact = m <= MOST_EXACT or splits == -1
        # A rounded weight is off by up to 2^-8; under one scale for all, e4m3 weights have eight such errors, which need not average.
        assert error < (4e-3 if output == BF16 or not exact else 5e-5), f"{name}: off by {error}"
        worst[exact] = max(worst[exact], error)
        assert torch.equal(linear(lib, pack, x, bias, before.clone(), output, splits), got), f"{name}: runs differ"
        if m > 1 and splits != 0:
            few = linear(lib, pack, x[:1].contiguous(), bias, before[:1].clone(), output, splits)
            assert splits != -1 or torch.equal(few, got[:1]), f"{name}: a row depends on the others"
    print(f"  linear: worst error {worst[1]:.2e}, with rounded weights {worst[0]:.2e}")


@check
def quant_sizes_that_do_not_fit_are_refused(lib):
    shape = (8, 2, 128, 64)

    def refused(launcher, change=None, at=0, scheme=INT4_128, tokens=4):
        packs = packs_of(8, shape, scheme)
        for name, value in (change or {}).items():
            setattr(packs[at], name, value)
        return lib.refused(launcher, None, *packs, None, None, 4, None, None, None, tokens, 2, 8, 0)

    x = torch.empty(8, device="cuda", dtype=torch.int32)
    changes = [(dict(perm=x), INT4_128), (dict(k=96, k_packed=96), INT4_128), (dict(k_packed=192), INT4_128), (dict(group=48, groups=3), INT4_128),
               (dict(scale_dtype=F32), INT4_128), (dict(scale_rows=2), INT4_128), (dict(format=3), INT4_128), (dict(experts=7), INT4_128),
               (dict(n_tiles=1), INT4_128), (dict(scale_dtype=BF16), FP8_BLOCK), (dict(group=64, groups=2), FP8_BLOCK)]
    for launcher in ("moe_quant_experts_tensor", "moe_quant_experts_wide"):
        for (change, scheme), at in itertools.product(changes, (0, 1)):
            if not (change == dict(group=48, groups=3) and at == 1):
                assert refused(launcher, change, at, scheme), (launcher, change, at)
        assert refused(launcher, dict(gate_up=0)) and refused(launcher, dict(gate_up=1), 1) and refused(launcher, tokens=-1)
        packs = packs_of(8, shape, INT4_128)
        assert lib.raw(launcher, None, *packs, None, None, 4, None, None, None, 0, 2, 8, 0, None) == 0, "no tokens is no error"
    for change, scheme in changes:
        pack = Pack(1, 32, 128, scheme)
        for name, value in change.items():
            setattr(pack, name, value)
        assert lib.refused("moe_quant_linear_tensor", None, pack, None, None, F32, 4, 0), change
    pack = Pack(1, 32, 128, INT4_128)
    assert lib.refused("moe_quant_linear_tensor", None, pack, None, None, 3, 4, 0) and lib.refused("moe_quant_linear_tensor", None, pack, None, None, F32, -1, 0)
    assert lib.refused("moe_quant_linear_tensor", None, pack, None, None, F32, 4, 9)
    assert lib.raw("moe_quant_linear_tensor", None, pack, None, None, F32, 0, 0, None) == 0, "no rows is no error"
