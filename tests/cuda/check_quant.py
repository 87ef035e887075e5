"""Checks the streaming kernels for quantised weights (few rows) against float64 from the dequantised weights."""

import itertools

import torch
from check_layer import Case as LayerCase
from check_layer import state_for, watched_and_forced
from expert_cases import Case as ExpertsCase
from kernels import LIB, Out, call, randn, refuses, rel
from library import BF16, F32, NO_EXPERT, ids_back, poison, sized
from quant_pack import FP8, FP8_BLOCK, FP8_TENSOR, INT4, INT4_128, INT4_32Z, INT8_128, INT8_Z, SCHEMES, Pack, fixed_point
from router import SCORINGS

F32_BOUND, BF16_BOUND = 2e-5, 4e-3
BLOCK_SMEM = 227 * 1024  # bytes of shared memory that a block may ask for
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def linear_case(scheme, m, n, k, output, bias, norm):
    pack = Pack(1, n, k, scheme)
    x = randn(m, k, scale=3.0 if norm else 1.0, dtype=torch.float32 if norm else torch.bfloat16)
    gain, b = randn(k) if norm else None, randn(n) if bias else None
    before = randn(m, n, dtype=torch.float32)
    out = Out((m, n), torch.bfloat16 if output == 1 else torch.float32)
    if output == 2:
        out.t.copy_(before)
    run = lambda to: call("moe_quant_linear_stream", x, gain, 1e-6, pack, b, to, output, m)
    run(out.t)
    operand = fixed_point if m == 1 and scheme.streams_digits() else torch.Tensor.double
    rows = operand((x * gain.float()).to(torch.bfloat16) if norm else x)  # rounded where the kernel rounds
    if norm:
        rows *= (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    want = rows @ pack.w[0].T + (b.double() if bias else 0) + (before.double() if output == 2 else 0)
    error = rel(out.t, want)
    name = f"{scheme.name} m={m} n={n} k={k} output={output} bias={bias} norm={norm}"
    assert error < (BF16_BOUND if output == 1 else F32_BOUND), f"{name}: error {error:.2e}"
    out.check_guard()
    again = before.clone() if output == 2 else torch.empty_like(out.t)
    run(again)
    assert torch.equal(again, out.t), f"{name}: not repeatable"
    return pack, x, gain, out.t


FULL = [(5120, 2048), (2048, 4096), (130, 64), (1, 128), (33, 1088), (777, 2880), (16, 1024), (100, 6208)]
SHAPES = sized(FULL, [(1, 128), (130, 64), (300, 1088), (5, 4160), (5000, 64)])


@check
def quant_linear():
    for i, (scheme, (n, k), m) in enumerate(itertools.product(SCHEMES, SHAPES, sized([1, 3, 8], [1, 8]))):
        if not LIB.raw("moe_quant_linear_stream_fits", scheme.format, m, k, BLOCK_SMEM):
            assert m * k > 8 * 4096, f"{scheme.name} m={m} k={k}: rows of the models' sizes fit"
            continue
        if scheme in (FP8_BLOCK, FP8_TENSOR) and -(-n // 16) * (-(-k // 128) if scheme is FP8_BLOCK else 1) % 2 != 0:
            continue  # refused: the last copy would reach beyond the scales
        linear_case(scheme, m, n, k, i % 3, i % 2 == 0, i % 5 in (1, 3))


@check
def quant_linear_reads_every_code():
    """All integers with all zero points, all finite numbers of E4M3."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    for scheme in SCHEMES:
        of = codes[(codes & 0x7F) != 0x7F] if scheme.format == FP8 else codes[:16] if scheme.format == INT4 else codes
        q = of[torch.randint(0, of.numel(), (1, 512, 2048), device="cuda")]
        pack = Pack(1, 512, 2048, scheme, q=q)
        x = torch.eye(2048, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(2048, 512, device="cuda")
        for row in range(0, 2048, 8):
            call("moe_quant_linear_stream", x[row : row + 8], None, 0.0, pack, None, out[row : row + 8], F32, 8)
        # One product of two exact numbers, one rounding by the scale.
        want = pack.w[0].T
        assert ((out.double() - want).abs() <= want.abs() * 2.0**-24).all(), scheme.name


@check
def quant_linear_rows_of_any_magnitude():
    """In one row of digits a value below 2^-7 of the largest of its 128 columns loses at most 2^-15 of it, others nothing."""
    n, k, m = 160, 1088, 7
    for scheme in SCHEMES:
        pack = Pack(1, n, k, scheme)

        def products(x):
            out = poison(m, n, dtype=torch.float32)
            for row, to in zip(x, out):
                call("moe_quant_linear_stream", row, None, 0.0, pack, None, to, F32, 1)
            return out

        x = randn(m, k, dtype=torch.float32) * 2.0 ** torch.randint(-24, 1, (m, k), device="cuda")
        x = (x * 2.0 ** torch.randint(-90, 90, (m, 1), device="cuda")).to(torch.bfloat16)
        x[0, 128:256], x[1] = 0, 0
        x[2, 256:384] = 511 / 256  # the largest number of an exponent
        out, w, size = products(x), pack.w[0], x.double().abs()
        error = size * 4e-6
        if scheme.streams_digits():
            blocks = torch.nn.functional.pad(size, (0, -k % 128)).view(m, -1, 128)
            largest = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(m, -1)[:, :k]
            error += torch.where(size < 2.0**-7 * largest, 2.0**-15 * largest, 0)
        off, most = (out.double() - x.double() @ w.T).abs(), error @ w.abs().T
        assert (off <= most).all(), f"{scheme.name}: off by {(off / most.clamp_min(1e-300)).max().item()} of the bound"
        x[2, 5], x[3, 1000] = float("nan"), float("-inf")
        lost = products(x)
        assert not lost[2:4].isfinite().any(), f"{scheme.name}: numbers out of a row that has one that is none"
        assert torch.equal(lost[[0, 1, 4, 5, 6]], out[[0, 1, 4, 5, 6]]), f"{scheme.name}: one row changes others"


@check
def quant_linear_bits_do_not_depend_on_other_rows():
    for scheme, norm in itertools.product((INT4_128, INT8_Z, FP8_BLOCK), (False, True)):
        pack, x, gain, out = linear_case(scheme, 8, 640, 2048, 0, False, norm)
        for m in (2, 3, 5) if scheme.streams_digits() else (1, 3, 5):  # one row beside integers is digits
            few = torch.empty(m, 640, device="cuda")
            call("moe_quant_linear_stream", x[:m].contiguous(), gain, 1e-6, pack, None, few, F32, m)
            assert torch.equal(few, out[:m]), f"{scheme.name} m={m}"


@check
def quant_linear_refuses_what_it_cannot_do():
    x, out = randn(8, 128), torch.empty(8, 32, device="cuda")

    def refused(change, scheme=INT4_128, m=1):
        pack = Pack(1, 32, 128, scheme)
        change(pack)
        return refuses("moe_quant_linear_stream", x, None, 0.0, pack, None, out, F32, m)

    def sets(**fields):
        return lambda pack: [setattr(pack, name, value) for name, value in fields.items()]

    assert refused(sets(), m=9) and refused(sets(perm=x)) and refused(sets(k=96, k_packed=96)) and refused(sets(k_packed=192))
    assert refused(sets(group=96, groups=2)) and refused(sets(group=16, groups=8)) and refused(sets(scale_dtype=0)) and refused(sets(format=3))
    assert refused(sets(scale_rows=2)) and refused(sets(gate_up=1)) and refused(sets(experts=2)) and refused(sets(n_tiles=1))
    assert refused(sets(n_tiles=1, n=16), FP8_BLOCK) and refused(sets(zeros=x), FP8_BLOCK)


class QuantLayer(LayerCase):
    """A case of moe_layer_stream with quantised experts."""

    def __init__(self, tokens, shape, scheme, packs=None, **how):
        self.packs, self.digits = packs, scheme.streams_digits()
        super().__init__(tokens, shape, **how)
        if packs is None:
            self.packs = packs_of(self.local, shape, scheme)
        self.w13, self.w2 = self.packs[0].w, self.packs[1].w

    def operand(self, rows):
        return fixed_point(rows) if self.digits else rows.double()

    def run(self, state, out=None):
        if not self.given:
            self.ids, self.weights = poison(self.tokens, self.top_k, dtype=torch.int32), poison(self.tokens, self.top_k, dtype=torch.float32)
        if out is None:
            out = self.before.clone() if self.output == 2 else poison(self.tokens, self.hidden, dtype=self.dtype)
        how = self.how
        call("moe_quant_layer_stream", self.x, self.norm, 1e-6, None if self.given else self.gate, self.gate_bias, self.bias, self.valid,
             self.ids, self.weights, *self.packs, self.table, out, self.output, state, self.tokens, self.experts, self.top_k,
             SCORINGS.index(how["scoring"]), int(how["raw"]), int(how["renormalize"]), how["scale"], how["cap"], self.shared, 0.75, self.routing)
        return out


def packs_of(local, shape, scheme):
    return Pack(local, 2 * shape[3], shape[2], scheme, gate_up=True), Pack(local, shape[2], shape[3], scheme)


def token_counts(shape, scheme, counts=(1, 2, 3, 4)):
    """The token counts that one launch takes."""
    experts, top_k, hidden, inter = shape
    fits = lambda t: LIB.raw("moe_quant_layer_stream_fits", scheme.format, t, hidden, inter, experts, experts, top_k, BLOCK_SMEM)
    return [t for t in counts if fits(t)]


# E, K, H, I
LAYERS = sized([(128, 8, 2048, 768), (16, 8, 4096, 2048), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344),
                (40, 3, 128, 2560), (200, 4, 4096, 128)], [(8, 2, 64, 64), (60, 6, 320, 192)])


@check
def quant_layer_matches_float64():
    worst = 0.0
    for shape, scheme in itertools.product(LAYERS, SCHEMES):
        state, packs = state_for(shape[0], shape[3]), packs_of(shape[0], shape, scheme)
        if packs[0].scale_rows == 2 and any(p.experts * p.n_tiles * p.groups % 2 for p in packs):
            continue
        for i, tokens in enumerate(token_counts(shape, scheme)):
            for normed, given in ((True, False), (False, True)):
                case = QuantLayer(tokens, shape, scheme, packs, normed=normed, given=given, output=(i + given) % 3)
                worst = max(worst, case.expect(f"{scheme.name} {shape} T={tokens} {normed} {given}", case.run(state)))
        del packs
    print(f"      worst error {worst:.1e}")


@check
def quant_layer_routes_skips_and_repeats():
    for shape, scheme in itertools.product(LAYERS[:1] + LAYERS[2:5], (INT4_128, FP8_BLOCK)):
        experts = shape[0]
        state, packs = state_for(experts, shape[3]), packs_of(experts, shape, scheme)
        for scoring in SCORINGS:
            case = QuantLayer(2, shape, scheme, packs, scoring=scoring, biased=True, renormalize=False, scale=2.5)
            case.expect(f"{scheme.name} {shape} {scoring}", case.run(state))
        case = QuantLayer(2, shape, scheme, packs, shared=1)
        case.expect(f"{scheme.name} {shape} shared expert", case.run(state))
        for tokens, valid in ((1, 0), (1, 1), (3, 0), (3, 2)):
            case = QuantLayer(tokens, shape, scheme, packs, valid=valid)
            case.expect(f"{scheme.name} {shape} T={tokens} valid {valid}", case.run(state))
        case = QuantLayer(1, shape, scheme, packs, shared=1, scoring="sigmoid")
        case.expect(f"{scheme.name} {shape} T=1 shared expert", case.run(state))
        table = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        here = torch.arange(0, experts, 2, device="cuda").flip(0)
        table[here] = torch.arange(here.numel(), dtype=torch.int32, device="cuda")
        for given, tokens in itertools.product((False, True), (1, 2, 4)):
            case = QuantLayer(tokens, shape, scheme, table=table, local=here.numel(), given=given, normed=not given)
            case.expect(f"{scheme.name} {shape} T={tokens} map", case.run(state))
        for tokens in (2, 4):
            case = QuantLayer(tokens, shape, scheme, packs, given=True, normed=False)
            case.ids[0] = case.ids[0, 0]
            case.ids[1] = NO_EXPERT - (1 << 32)
            case.ids[tokens - 2, -1] = experts + 3
            case.expect(f"{scheme.name} {shape} T={tokens} repeated, absent, out of range", case.run(state))
            case.ids[:] = NO_EXPERT - (1 << 32)
            case.expect(f"{scheme.name} {shape} T={tokens} no expert", case.run(state))
        for tokens in token_counts(shape, scheme, (2, 4)):
            case = QuantLayer(tokens, shape, scheme, packs, given=True, normed=False)
            case.ids[:] = torch.arange(shape[1], device="cuda")
            case.expect(f"{scheme.name} {shape} T={tokens} of the same experts", case.run(state))


@check
def quant_layer_takes_what_is_left():
    """Experts whose logits are NaN are not chosen: fewer than a token may have, or none."""
    for shape, scheme in itertools.product(LAYERS[:1] + LAYERS[2:5], (INT4_128, FP8_BLOCK)):
        state, packs = state_for(shape[0], shape[3]), packs_of(shape[0], shape, scheme)
        for (scoring, left), tokens in itertools.product((("softmax", 0), ("sigmoid", 1)), (1, 2)):
            case = QuantLayer(tokens, shape, scheme, packs, output=0, scoring=scoring)
            case.gate[left or -1 :] = float("nan")
            out, ids = case.run(state), ids_back(case.ids)
            name = f"{scheme.name} {shape} {scoring} T={tokens}"
            assert (ids[:, :left] == 0).all() and (ids[:, left:] == NO_EXPERT).all(), f"{name}: {ids.tolist()}"
            case.given = True
            assert (out == 0).all() if left == 0 else case.expect(f"{name} {left} left", out) >= 0, name


@check
def quant_layer_is_watched_and_forced():
    for shape, scheme in itertools.product(LAYERS[:1] + LAYERS[2:5], (INT4_128, FP8_BLOCK)):
        state, packs = state_for(shape[0], shape[3]), packs_of(shape[0], shape, scheme)
        for tokens in token_counts(shape, scheme, (1, 2, 4)):
            watched_and_forced(f"{scheme.name} {shape} T={tokens}", QuantLayer(tokens, shape, scheme, packs), state)


@check
def quant_layer_repeats_bit_for_bit():
    shape = LAYERS[0]
    state = state_for(shape[0], shape[3])
    for scheme in (INT4_128, FP8_BLOCK):
        case = QuantLayer(4, shape, scheme)
        first = case.run(state)
        for _ in range(sized(20, 3)):
            assert torch.equal(case.run(state), first), "runs differ"
        ids = case.ids
        for begin, end in ((0, 1), (3, 4), (0, 2), (2, 4), (1, 4)):
            some = QuantLayer(end - begin, shape, scheme, case.packs)
            some.norm, some.gate = case.norm, case.gate
            some.x, some.before = case.x[begin:end].contiguous(), case.before[begin:end].contiguous()
            assert torch.equal(some.run(state), first[begin:end]), f"{scheme.name}: tokens {begin} to {end} depend on their neighbours"
            assert torch.equal(some.ids, ids[begin:end])
        case.before = case.x
        apart = case.run(state)
        case.run(state, out=case.x)
        assert torch.equal(case.x, apart), "in place"


class QuantExperts(ExpertsCase):
    """A case of moe_experts_stream with quantised experts."""

    def __init__(self, tokens, shape, packs, **how):
        super().__init__(tokens, shape, **how)
        self.packs = packs
        self.w13, self.w2 = packs[0].w, packs[1].w

    def run(self, result):
        act, rows, _ = self.buffers()
        flags = torch.zeros(LIB.raw("moe_experts_stream_flags", max(self.tokens * self.top_k, 1), self.local), dtype=torch.int32, device="cuda")
        out = None if result is None else poison(self.tokens, self.hidden, dtype=result)
        for _ in range(2):  # both sets of flags
            call("moe_quant_experts_stream", self.x, *self.packs, self.ids, self.weights, self.map, act, rows, out, flags, flags.numel(),
                 self.tokens, self.top_k, self.experts, F32 if result == torch.float32 else BF16)
        return rows if out is None else out


@check
def quant_experts_match_float64():
    shapes = sized([(128, 8, 2048, 768), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344), (12, 4, 4096, 1536)],
                   [(8, 2, 64, 64), (5, 1, 320, 192)])
    worst = 0.0
    for shape, scheme in itertools.product(shapes, (INT4_128, INT4_32Z, INT8_128, INT8_Z, FP8_BLOCK)):
        packs = packs_of(shape[0], shape, scheme)
        if packs[0].scale_rows == 2 and any(p.experts * p.n_tiles * p.groups % 2 for p in packs):
            continue
        everyone = torch.zeros(40, shape[1], dtype=torch.int64, device="cuda")
        nobody = torch.full((3, shape[1]), NO_EXPERT, device="cuda")
        beyond = torch.randint(0, 2 * shape[0], (7, shape[1]), device="cuda")
        for tokens, ids in [(0, None), (1, None), (5, None), (7, None), (33, None), (40, everyone), (3, nobody), (7, beyond)]:
            case = QuantExperts(tokens, shape, packs, ids=ids)
            rows, total = case.reference()
            got = case.run(torch.float32)
            name = f"{scheme.name} {shape} T={tokens}"
            if tokens == 0:
                continue
            error = rel(got, total)
            worst = max(worst, error)
            assert error < 3e-3, f"{name}: error {error:.2e}"
            assert torch.equal(case.run(torch.bfloat16), got.to(torch.bfloat16)), f"{name}: bf16 is not f32 rounded"
            slots, used = case.run(None), ~torch.isnan(rows[:, 0])
            assert rel(slots[used], rows[used]) < 3e-3 and bool(torch.isnan(slots[~used]).all()), f"{name}: slot rows"
        del packs
    print(f"      worst error {worst:.1e}")
