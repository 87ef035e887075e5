"""Checks moe_layer_stream (norm, router, experts, weighted sum in one launch) against float64."""

import torch
from kernels import LIB, call, randn, refuses, rel, sized, u32
from library import NO_EXPERT, Routing, UNWATCHED, ids_back, ids_tensor, poison
from router import SCORINGS, compacted, expected, forced_rows, score

CHECKS = []
# E, K, H, I
FULL = [(128, 8, 2048, 768), (16, 8, 4096, 2048), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344),
        (40, 3, 128, 2560), (200, 4, 4096, 128)]
SHAPES = sized(FULL, [(8, 2, 64, 64), (60, 6, 320, 192)])


def check(function):
    CHECKS.append(function)
    return function


def state_for(experts, inter):
    return torch.zeros(LIB.raw("moe_layer_stream_state", experts, inter), dtype=torch.uint8, device="cuda")


class Case:
    """Weights and rows of one shape; `given`: ids instead of a router."""

    def __init__(self, tokens, shape, normed=True, given=False, output=2, table=None, local=None, scoring="softmax", raw=False,
                 renormalize=True, scale=1.0, biased=False, valid=None, shared=0):
        self.tokens, (self.experts, self.top_k, self.hidden, self.inter), self.shared = tokens, shape, shared
        self.given, self.output, self.table = given, output, table
        self.local = self.experts if local is None else local
        self.x = randn(tokens, self.hidden, scale=3.0, dtype=torch.float32 if normed else torch.bfloat16)
        self.norm = randn(self.hidden) if normed else None
        self.gate = randn(self.experts - shared, self.hidden, scale=self.hidden**-0.5)
        self.gate_bias = randn(self.experts - shared) if biased else None
        self.bias = randn(self.experts - shared, dtype=torch.float32, scale=0.1) if biased else None
        self.how = dict(scoring=scoring, bias=self.bias, raw=raw, renormalize=renormalize, scale=scale, cap=0.0)
        self.valid = None if valid is None else u32([valid])
        self.live = tokens if valid is None else valid
        self.w13 = randn(self.local, 2 * self.inter, self.hidden, scale=self.hidden**-0.5)
        self.w2 = randn(self.local, self.hidden, self.inter, scale=self.inter**-0.5)
        self.ids = torch.rand(tokens, self.experts, device="cuda").topk(self.top_k, -1).indices.to(torch.int32)
        self.weights = torch.softmax(torch.randn(tokens, self.top_k, device="cuda"), -1)
        self.dtype = torch.bfloat16 if output == 1 else torch.float32
        self.before = randn(tokens, self.hidden, dtype=torch.float32)
        self.routing = UNWATCHED

    def run(self, state, out=None):
        if not self.given:
            self.ids, self.weights = poison(self.tokens, self.top_k, dtype=torch.int32), poison(self.tokens, self.top_k, dtype=torch.float32)
        if out is None:
            out = self.before.clone() if self.output == 2 else poison(self.tokens, self.hidden, dtype=self.dtype)
        how = self.how
        call("moe_layer_stream", self.x, self.norm, 1e-6, None if self.given else self.gate, self.gate_bias, self.bias, self.valid,
             self.ids, self.weights, self.w13, self.w2, self.table, out, self.output, state,
             self.tokens, self.hidden, self.inter, self.experts, self.local, self.top_k, SCORINGS.index(how["scoring"]),
             int(how["raw"]), int(how["renormalize"]), how["scale"], how["cap"], self.shared, 0.75, self.routing)
        return out

    def operand(self, rows):
        """What the experts' products make of rows of bf16, f64."""
        return rows.double()

    def rows(self, operand=torch.Tensor.double):
        """Rows as the kernel rounds them, f64."""
        if self.norm is None:
            return operand(self.x)
        factor = (self.x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return operand((self.x * self.norm.float()).to(torch.bfloat16)) * factor

    def expect(self, name, out):
        x, operand = self.rows(), self.rows(self.operand)
        ids = ids_back(self.ids)
        if not self.given:
            logits = x @ self.gate.double().T + (self.gate_bias.double() if self.gate_bias is not None else 0)
            chosen, ids_of_all, weights_of_all = self.top_k - self.shared, ids, self.weights
            ids, own_weights = ids[:, :chosen], self.weights[:, :chosen]
            want, weights, keys = expected(logits, chosen, **self.how)
            assert (ids_of_all[self.live :] == NO_EXPERT).all() and (self.weights[self.live :] == 0).all(), f"{name}: padding has experts"
            live = slice(0, self.live)
            gap = (keys[live].gather(1, want[live]) - keys[live].gather(1, ids[live])).abs()
            assert self.live == 0 or gap.max() < 4e-6 * keys.abs().max(), f"{name}: chose {ids.tolist()} instead of {want.tolist()}"
            same = (want == ids).all(-1)
            assert rel(own_weights[same], weights[same]) < 2e-5, f"{name}: routing weights"
            ids = ids_of_all
            if self.shared > 0:
                last = torch.arange(self.experts - self.shared, self.experts, device="cuda")
                assert (ids[live, chosen:] == last).all() and (weights_of_all[live, chosen:] == 0.75).all(), f"{name}: shared experts"
        table = torch.arange(self.experts, device="cuda") if self.table is None else self.table.long()
        local = torch.where(ids < self.experts, table[ids.clamp(max=self.experts - 1)], -1)
        ref = torch.zeros(self.tokens, self.hidden, dtype=torch.float64, device="cuda")
        for t in range(self.tokens):
            for k in range(self.top_k):
                e = int(local[t, k])
                if e >= 0:
                    gate, up = (self.w13[e].double() @ operand[t]).split(self.inter)
                    act = self.operand((gate * torch.sigmoid(gate) * up).to(torch.bfloat16))
                    ref[t] += self.weights[t, k].double() * (self.w2[e].double() @ act)
        got = out.double() - (self.before.double() if self.output == 2 else 0)
        error = rel(got, ref)
        # An activation between two bf16 may round the other way: a thousandth at most, once in thousands of cases.
        assert error < (5e-3 if self.output == 1 else 3e-3), f"{name}: off by {error}"
        return error


def token_counts(shape):
    return [t for t in (1, 2, 3, 4) if t * shape[1] <= 32]


@check
def layer_matches_float64():
    worst = 0.0
    for shape in SHAPES:
        state = state_for(shape[0], shape[3])
        for tokens in token_counts(shape):
            for output in (0, 1, 2):
                for normed, given in ((True, False), (False, False), (False, True)):
                    case = Case(tokens, shape, normed, given, output)
                    worst = max(worst, case.expect(f"{shape} T={tokens} output {output} {normed} {given}", case.run(state)))
    print(f"      worst error {worst:.1e}")


@check
def layer_routes_like_the_router():
    for shape in SHAPES[:5]:
        state = state_for(shape[0], shape[3])
        for scoring in SCORINGS:
            for raw, biased in ((False, True), (True, False)):
                case = Case(2, shape, scoring=scoring, raw=raw, biased=biased, renormalize=not biased, scale=2.5)
                case.expect(f"{shape} {scoring} raw={raw}", case.run(state))


@check
def layer_adds_shared_experts():
    """DeepSeek-V2-Lite's sizes, whose tiles of one shared expert are more than there are blocks, and small ones, of which a
    block's first tile may be of a shared or a chosen expert."""
    for shape, shared in sized([((66, 8, 2048, 1408), 2), ((10, 5, 256, 128), 2), ((7, 3, 512, 64), 1)], [((10, 5, 256, 128), 2)]):
        state = state_for(shape[0], shape[3])
        for tokens in token_counts(shape):
            for renormalize in (True, False):
                case = Case(tokens, shape, renormalize=renormalize, shared=shared)
                case.expect(f"{shape} T={tokens} {shared} shared", case.run(state))
        for valid in (0, 1):
            case = Case(2, shape, valid=valid, shared=shared)
            case.expect(f"{shape} valid {valid} of 2, {shared} shared", case.run(state))


@check
def layer_skips_padding_holes_and_repeats():
    for shape in SHAPES[:5]:
        experts, top_k = shape[0], shape[1]
        state = state_for(experts, shape[3])
        for valid in (0, 2):
            case = Case(3, shape, valid=valid)
            case.expect(f"{shape} valid {valid}", case.run(state))
        table = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
        here = torch.arange(0, experts, 2, device="cuda").flip(0)
        table[here] = torch.arange(here.numel(), dtype=torch.int32, device="cuda")
        for given in (False, True):
            case = Case(4, shape, table=table, local=here.numel(), given=given, normed=not given)
            case.expect(f"{shape} map", case.run(state))
        case = Case(4, shape, given=True, normed=False)
        case.ids[0] = case.ids[0, 0]  # one expert K times
        case.ids[1] = NO_EXPERT - (1 << 32)
        case.ids[2, 0] = experts + 3
        case.expect(f"{shape} repeated, absent, out of range", case.run(state))


@check
def layer_chooses_no_nan():
    """A softmax over a NaN chooses nothing, elsewhere the experts without one are left: fewer than a token may have."""
    for shape in SHAPES[:3]:
        state = state_for(shape[0], shape[3])
        for scoring, left in (("softmax", 0), ("sigmoid", 1), ("sigmoid", 2)):
            for tokens in (1, 2):
                case = Case(tokens, shape, output=0, scoring=scoring)
                case.gate[left or -1 :] = float("nan")
                out, ids = case.run(state), ids_back(case.ids)
                left = min(left, shape[1])
                assert (ids[:, :left].sort(-1).values == torch.arange(left, device="cuda")).all(), f"{shape} {scoring}: {ids.tolist()}"
                assert (ids[:, left:] == NO_EXPERT).all() and (case.weights[:, left:] == 0).all(), f"{shape} {scoring}: {ids.tolist()}"
                case.given = True
                assert (out == 0).all() if left == 0 else case.expect(f"{shape} {scoring} {left} left", out) >= 0


@check
def layer_repeats_bit_for_bit():
    """Also whichever tokens stand beside one, and in place on the residual."""
    shape = SHAPES[0]
    state = state_for(shape[0], shape[3])
    case = Case(4, shape)
    first = case.run(state)
    for _ in range(sized(20, 3)):
        assert torch.equal(case.run(state), first), "runs differ"
    ids = case.ids
    for t in (0, 3):
        one = Case(1, shape)
        one.norm, one.gate, one.w13, one.w2 = case.norm, case.gate, case.w13, case.w2
        one.x, one.before = case.x[t : t + 1].contiguous(), case.before[t : t + 1].contiguous()
        assert torch.equal(one.run(state)[0], first[t]), "a token depends on its neighbours"
        assert torch.equal(one.ids[0], ids[t])
    case.before = case.x
    apart = case.run(state)
    case.run(state, out=case.x)
    assert torch.equal(case.x, apart), "in place"


def watched_and_forced(name, case, state):
    """A watched launch leaves its choices and their counts and computes the same; a forced one computes what is forced."""
    chosen = case.top_k - case.shared
    experts = case.experts - case.shared
    before = case.before.clone()
    out = case.run(state)
    ids, weights = ids_back(case.ids), case.weights
    heat, routed = torch.zeros(experts, dtype=torch.int32, device="cuda"), poison(case.tokens, 2, chosen, dtype=torch.int32)
    case.routing = Routing(heat, routed.data_ptr() + 4 * chosen, None, 2 * chosen)
    assert torch.equal(case.run(state), out) and torch.equal(case.weights, weights), f"{name}: watching changes bits"
    assert torch.equal(ids_back(routed[: case.live, 1]), ids[: case.live, :chosen]), f"{name}: choices that were left"
    assert (routed[:, 0] == 0x5A5A5A5A).all(), f"{name}: wrote beside the layer's rows"
    assert torch.equal(heat.long(), torch.bincount(ids[: case.live, :chosen].flatten(), minlength=experts)), f"{name}: counts"
    forced = forced_rows(case.tokens, experts, chosen)
    arrays = ids_tensor(forced)
    case.routing, case.before = Routing(None, None, arrays, chosen), before
    out = case.run(state)
    is_free = (forced == NO_EXPERT).all(-1, keepdim=True)
    want = torch.where(is_free, ids[:, :chosen], compacted(forced))
    assert torch.equal(ids_back(case.ids)[: case.live, :chosen], want[: case.live]), f"{name}: forced ids"
    if case.live == case.tokens:
        values = score(case.rows() @ case.gate.double().T, "softmax")
        own = values.gather(1, want.clamp(max=experts - 1)) * (want != NO_EXPERT)
        assert rel(case.weights[:, :chosen], own / own.sum(-1, keepdim=True)) < 2e-5, f"{name}: forced weights"
        case.given = True
        case.expect(f"{name} forced", out)
        case.given = False
    spread = torch.rand(case.tokens, experts, device="cuda").topk(chosen, -1).indices
    arrays = ids_tensor(spread)
    case.routing = Routing(None, None, arrays, chosen, True)
    out = case.run(state)
    assert torch.equal(ids_back(case.ids)[: case.live, :chosen], spread[: case.live]), f"{name}: spread ids"
    # The kernel for any rule may round otherwise than that for the usual one.
    assert rel(case.weights, weights) < 1e-6, f"{name}: an even spread keeps the weights"
    if case.live == case.tokens:
        case.given = True
        case.expect(f"{name} spread", out)


@check
def layer_is_watched_and_forced():
    for shape, shared in [(shape, 0) for shape in SHAPES[:5]] + sized([((66, 8, 2048, 1408), 2), ((10, 5, 256, 128), 2)], []):
        state = state_for(shape[0], shape[3])
        for tokens in token_counts(shape):
            watched_and_forced(f"{shape} T={tokens} {shared} shared", Case(tokens, shape, shared=shared), state)
        watched_and_forced(f"{shape} valid 1 of 2", Case(2, shape, valid=1, shared=shared), state)


@check
def layer_fills_its_ring_again():
    """Sizes of which a block has more tiles than stages; also under compute-sanitizer, which is to see how stages change hands."""
    shape = (8, 8, 2048, 768)
    state = state_for(shape[0], shape[3])
    for given in (True, False):
        case = Case(1, shape, normed=not given, given=given)
        case.expect(f"{shape} given {given}", case.run(state))


@check
def layer_refuses_what_it_cannot_do():
    none = [None] * 9
    for tokens, hidden, inter, experts, top_k in ((5, 64, 64, 8, 2), (-1, 64, 64, 8, 2), (1, 96, 64, 8, 2), (1, 64, 100, 8, 2),
                                                  (4, 64, 64, 16, 9), (1, 64, 64, 8, 0), (1, 1 << 20, 64, 8, 2), (1, 64, 64, 2000, 2)):
        assert refuses("moe_layer_stream", None, None, 0.0, *none, None, 0, None, tokens, hidden, inter, experts, experts, top_k,
                       0, 0, 1, 1.0, 0.0, 0, 1.0, UNWATCHED), (tokens, hidden, inter, experts, top_k)
