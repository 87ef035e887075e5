"""Random expert layers with their float64 answers, for the checks of experts.py and check_wide.py."""
import torch

from library import ids_back, ids_tensor, poison, rel_error, sized
from library import NO_EXPERT

# E, K, H, I: the Qwen3-30B-A3B shape, then small and uneven ones.
FULL = [(128, 8, 2048, 768), (8, 2, 64, 64), (16, 4, 320, 192), (60, 6, 1024, 448), (5, 1, 576, 1344), (40, 3, 128, 2560), (12, 4, 4096, 1536)]
SHAPES = sized(FULL, [(8, 2, 64, 64), (5, 1, 320, 192)])


class Case:
    """Random weights, rows and routing of one shape, and the float64 answer."""

    operand = staticmethod(torch.Tensor.double)  # what products make of rows of bf16

    def __init__(self, tokens, shape, ids=None, expert_map=None, local=None):
        self.tokens, (self.experts, self.top_k, self.hidden, self.inter) = tokens, shape
        self.local = self.experts if local is None else local
        self.map = expert_map
        bf16 = dict(device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(tokens, self.hidden, **bf16)
        self.w13 = torch.randn(self.local, 2 * self.inter, self.hidden, **bf16) / self.hidden**0.5
        self.w2 = torch.randn(self.local, self.hidden, self.inter, **bf16) / self.inter**0.5
        if ids is None:
            ids = torch.rand(tokens, self.experts, device="cuda").topk(self.top_k, -1).indices
        self.ids = ids_tensor(ids)
        self.weights = torch.softmax(torch.randn(tokens, self.top_k, device="cuda"), -1)

    def local_ids(self):
        """Local expert of each slot, -1 for none."""
        ids = ids_back(self.ids).flatten()
        table = torch.arange(self.experts, device="cuda") if self.map is None else self.map.to(torch.int64)
        return torch.where(ids < self.experts, table[ids.clamp(max=self.experts - 1)], -1)

    def reference(self):
        """Slot rows (f64, NaN where no expert) and token rows; activations rounded to bf16 as the kernels do."""
        local = self.local_ids()
        rows = torch.full((local.numel(), self.hidden), float("nan"), dtype=torch.float64, device="cuda")
        for e in local.unique().tolist():
            if e < 0:
                continue
            slots = (local == e).nonzero().flatten()
            both = self.operand(self.x[slots // self.top_k]) @ self.w13[e].double().T
            gate, up = both.split(self.inter, -1)
            act = (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)
            rows[slots] = self.operand(act) @ self.w2[e].double().T
        weighted = rows.nan_to_num(0.0).view(self.tokens, self.top_k, self.hidden) * self.weights.double()[..., None]
        return rows, weighted.sum(1)

    def slot_row_bounds(self, noise=4e-6):
        """How far each number of the slot rows may be off: `noise` of each sum's terms, and what activations contribute that lie, within
        that noise, between two bf16 and may round either way."""
        local = self.local_ids()
        bounds = torch.zeros(local.numel(), self.hidden, dtype=torch.float64, device="cuda")
        for e in local.unique().tolist():
            if e < 0:
                continue
            slots = (local == e).nonzero().flatten()
            x, w13 = self.operand(self.x[slots // self.top_k]), self.w13[e].double()
            (gate, up), (gate_off, up_off) = ((x @ w13.T).split(self.inter, -1), (x.abs() @ w13.abs().T * noise).split(self.inter, -1))
            silu = gate * torch.sigmoid(gate)  # whose slope is at most 1.1
            act, off = silu * up, silu.abs() * up_off + (1.1 * gate_off + noise * silu.abs()) * up.abs()
            steps = (act + off).to(torch.bfloat16).double() - (act - off).to(torch.bfloat16).double()
            bounds[slots] = (steps + noise * act.abs()) @ self.w2[e].double().abs().T
        return bounds

    def buffers(self, rows=torch.float32):
        slots = self.tokens * self.top_k
        act = poison(slots, self.inter, dtype=torch.bfloat16)
        return act, poison(slots, self.hidden, dtype=rows), poison(self.tokens, self.hidden, dtype=torch.bfloat16)

    def sizes(self):
        return self.tokens, self.top_k, self.experts, self.local, self.hidden, self.inter


def counters_for(lib, local):
    return torch.zeros(lib.raw("moe_experts_tensor_counters", local), dtype=torch.int32, device="cuda")


def expect_counts_cleared(lib, counters, local):
    first = lib.raw("moe_experts_tensor_counts")
    assert (counters[first : first + local] == 0).all(), "the counts of slots are not left zero"


def list_slots(lib, case, counters, buckets):
    """(lists, counts, places of a list) as moe_any_list_slots gives them, or as the router does: shuffled, counted in `counters`."""
    tokens, top_k, experts, local, _, _ = case.sizes()
    if not buckets:
        slots = tokens * top_k
        counts, listed = poison(local, dtype=torch.int32), poison(local, slots, dtype=torch.int32)
        lib.launch("moe_any_list_slots", case.ids, case.map, slots, experts, local, counts, listed)
        return listed, counts, slots
    listed, counts = poison(local, tokens, dtype=torch.int32), counters[lib.raw("moe_experts_tensor_counts") :]
    of_slot = case.local_ids()
    for e in of_slot.unique().tolist():
        mine = (of_slot == e).nonzero().flatten()
        if e >= 0:
            listed[e, : mine.numel()] = mine[torch.randperm(mine.numel(), device="cuda")].to(torch.int32)
            counts[e] = mine.numel()
    return listed, counts, tokens


def expect_close(name, case, got, bound=5e-4, each=None, exact=False):
    """Bounds of the slot rows' error: of all together, if given of each and, if `exact`, of each of their numbers."""
    rows, out = got
    ref_rows, ref_out = case.reference()
    present = case.local_ids() >= 0
    assert rows[~present].isnan().all(), f"{name}: rows of absent slots were written"
    if present.any():
        error = rel_error(rows[present], ref_rows[present])
        assert error < bound, f"{name}: slot rows are off by {error}"
        if each is not None:
            error = ((rows[present].double() - ref_rows[present]).norm(dim=-1) / ref_rows[present].norm(dim=-1)).max().item()
            assert error < each, f"{name}: a slot row is off by {error}"
        if exact:
            share = ((rows.double() - ref_rows).abs() / case.slot_row_bounds())[present].max().item()
            assert share <= 1, f"{name}: a slot row's number is off by {share} of its bound"
    error = rel_error(out, ref_out) if present.any() else out.float().abs().max().nan_to_num(1.0).item()
    assert error < 4e-3, f"{name}: token rows are off by {error}"
    return error


def with_padding(case):
    """The last rows are padding, and some slots of the others are absent."""
    ids = ids_back(case.ids)
    ids[-max(1, case.tokens // 4) :] = NO_EXPERT
    ids[torch.rand(ids.shape, device="cuda") < 0.2] = NO_EXPERT
    case.ids = ids_tensor(ids)
    return case


def half_map(experts):
    """Every other expert lives here, in reversed order; the rest is elsewhere."""
    table = torch.full((experts,), -1, dtype=torch.int32, device="cuda")
    here = torch.arange(0, experts, 2, device="cuda").flip(0)
    table[here] = torch.arange(here.numel(), dtype=torch.int32, device="cuda")
    return table, here.numel()


def cases(token_counts, shapes=SHAPES):
    """(name, case) over shapes and the situations that break kernels."""
    for shape in shapes:
        for tokens in token_counts:
            yield f"{shape} T={tokens}", Case(tokens, shape)
        tokens = token_counts[-1]
        yield f"{shape} T={tokens} padding", with_padding(Case(tokens, shape))
        yield f"{shape} all padding", Case(3, shape, ids=torch.full((3, shape[1]), NO_EXPERT))
        table, local = half_map(shape[0])
        yield f"{shape} T={tokens} expert_map", Case(tokens, shape, expert_map=table, local=local)
        ids = torch.rand(tokens, shape[0]).topk(shape[1], -1).indices
        ids[ids == shape[0] - 1] = 0
        ids[:, 0] = shape[0] - 1
        yield f"{shape} T={tokens} overloaded", Case(tokens, shape, ids=ids)
        ids[:, -1] = shape[0] + 7
        yield f"{shape} T={tokens} ids out of range", Case(tokens, shape, ids=ids)
