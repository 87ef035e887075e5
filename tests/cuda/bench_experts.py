"""Times the expert kernels: CUDA graphs, weights rotated so that nothing is warm in L2, medians.

Bytes counted: weights of the experts that the routing touches, plus token rows read and written.
"""
import torch

from library import BF16, F32, UNCOPIED, UNWATCHED, graph_us, routing

E, K, H, I = 128, 8, 2048, 768
QKV, O = (5120, 2048), (2048, 4096)
LINEARS = 40  # matrices of a quantised product; with 4 bits, fewer matrices would stay in L2
SETS = 4  # of 1.2 GB each; even with one token, 226 MB of other sets are read before a set is used again


class Inputs:
    """Weight sets, and fresh rows and routing for each call."""

    def __init__(self, tokens, skew, weights, calls):
        self.tokens = tokens
        self.weights = weights
        self.x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
        self.routes = [routing(tokens, E, K, skew) for _ in range(calls)]
        self.act = torch.empty(tokens * K, I, device="cuda", dtype=torch.bfloat16)
        self.rows = torch.empty(tokens * K, H, device="cuda", dtype=torch.float32)
        self.short_rows = torch.empty(tokens * K, H, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(tokens, H, device="cuda", dtype=torch.bfloat16)
        self.distinct = sum(ids.unique().numel() for ids, _ in self.routes) / calls

    def route(self):
        """Gates, and the mean of the experts that they choose, instead of given ids."""
        self.gates = [torch.randn(E, H, device="cuda", dtype=torch.bfloat16) * H**-0.5 for _ in self.routes]
        chosen = [(self.x.float() @ gate.float().T).topk(K, -1).indices for gate in self.gates]
        self.distinct = sum(ids.unique().numel() for ids in chosen) / len(chosen)
        return self

    def bytes(self):
        return self.distinct * 3 * H * I * 2 + self.tokens * H * 4


def make_weights():
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    return [(torch.randn(E, 2 * I, H, **bf16) * 0.02, torch.randn(E, H, I, **bf16) * 0.02) for _ in range(SETS)]


def stream_calls(lib, inputs, plan):
    flags = torch.zeros(lib.raw("moe_experts_stream_flags", inputs.tokens * K, E), dtype=torch.int32, device="cuda")

    def call(i):
        (w13, w2), (ids, weights) = inputs.weights[i % SETS], inputs.routes[i]
        lib.launch("moe_experts_stream_planned", inputs.x, w13, w2, ids, weights, None, inputs.act, inputs.rows,
                   inputs.out, flags, flags.numel(), inputs.tokens, K, E, E, H, I, BF16, *plan)

    return [lambda i=i: call(i) for i in range(len(inputs.routes))]


def grouped_calls(lib, inputs, only=None):
    """All launches of the grouped path, or one of them alone (after one complete run)."""
    slots = inputs.tokens * K
    i32 = dict(dtype=torch.int32, device="cuda")
    meta = (torch.empty(E + 1, **i32), torch.empty(slots, **i32),
            torch.empty(lib.raw("moe_max_tiles", slots, E, 128), 2, **i32), torch.empty(1, **i32))

    def call(i, only):
        (w13, w2), (ids, weights) = inputs.weights[i % SETS], inputs.routes[i]
        if only in (None, "align"):
            lib.launch("moe_align_tokens", ids, None, slots, E, E, 128, *meta)
        args = inputs.x, w13, w2, *meta, inputs.act, inputs.rows, slots, K, E, H, I
        if only in (None, "gate_up"):
            lib.launch("moe_experts_grouped_gate_up", *args)
        if only in (None, "down"):
            lib.launch("moe_experts_grouped_down", *args)
        if only in (None, "combine"):
            lib.launch("moe_combine", inputs.rows, ids, weights, None, inputs.out, inputs.tokens, K, E, E, H, F32, BF16)

    call(0, None)
    return [lambda i=i: call(i, only) for i in range(len(inputs.routes))]


def tensor_calls(lib, inputs, only=None, wide=False):
    """Lists, products and sum, or a part: "list"; "products", without the sum; "alone", with lists made before;
    "combine"."""
    tokens, slots = inputs.tokens, inputs.tokens * K
    i32 = dict(dtype=torch.int32, device="cuda")
    lists = [(torch.empty(E, slots, **i32), torch.empty(E, **i32)) for _ in (inputs.routes if only == "alone" else inputs.routes[:1])]
    counters = torch.zeros(lib.raw("moe_experts_tensor_counters", E), **i32)
    launcher, rows, code = ("moe_experts_wide", inputs.short_rows, BF16) if wide else ("moe_experts_tensor", inputs.rows, F32)

    def list_slots(i):
        listed, counts = lists[i % len(lists)]
        lib.launch("moe_any_list_slots", inputs.routes[i][0], None, slots, E, E, counts, listed)

    def call(i):
        (w13, w2), (ids, weights), (listed, counts) = inputs.weights[i % SETS], inputs.routes[i], lists[i % len(lists)]
        if only not in ("alone", "combine"):
            list_slots(i)
        if only not in ("list", "combine"):
            lib.launch(launcher, inputs.x, w13, w2, listed, counts, slots, inputs.act, rows, counters, tokens, K, E, E, H, I)
        if only in (None, "combine"):
            lib.launch("moe_combine", rows, ids, weights, None, inputs.out, tokens, K, E, E, H, code, BF16)

    if only == "alone":
        for i in range(len(lists)):
            list_slots(i)
    return [lambda i=i: call(i) for i in range(len(inputs.routes))]


def routed_calls(lib, inputs, only=None):
    """As a decode step has them: the router lists each expert's slots, and no alignment runs. `only`: "router", or
    "norm": the weighted sum with addition and next norm."""
    tokens = inputs.tokens
    i32 = dict(dtype=torch.int32, device="cuda")
    counters, buckets = torch.zeros(lib.raw("moe_experts_tensor_counters", E), **i32), torch.empty(E, tokens, **i32)
    counts = counters[lib.raw("moe_experts_tensor_counts") :]
    ids, weights = torch.empty(tokens, K, **i32), torch.empty(tokens, K, dtype=torch.float32, device="cuda")
    logits = torch.empty(tokens, E, dtype=torch.float32, device="cuda")
    residual, gain = torch.zeros(tokens, H, dtype=torch.float32, device="cuda"), torch.ones(H, dtype=torch.bfloat16, device="cuda")

    def call(i):
        gate, (w13, w2) = inputs.gates[i], inputs.weights[i % SETS]
        lists = (None, None) if only == "router" else (counts, buckets)
        lib.launch("moe_gate_route", inputs.x, gate, None, None, None, logits, ids, weights, tokens, H, E, K, 0, 0, 1, 1.0, 0.0, *lists, None, 0, 0, 1.0, 0, 0, UNWATCHED, UNCOPIED)
        if only == "router":
            return
        lib.launch("moe_experts_tensor", inputs.x, w13, w2, buckets, counts, tokens, inputs.act, inputs.rows, counters, tokens, K, E, E, H, I)
        if only == "norm":
            lib.launch("moe_combine_add_rms_norm", inputs.rows, ids, weights, None, inputs.out, tokens, K, E, E, H, F32, BF16, residual, gain, 1e-6)
        else:
            lib.launch("moe_combine", inputs.rows, ids, weights, None, inputs.out, tokens, K, E, E, H, F32, BF16)

    return [lambda i=i: call(i) for i in range(len(inputs.gates))]


def layer_calls(lib, inputs, routed=False):
    """The one launch that serves up to 4 tokens, with given ids or with the router."""
    tokens = inputs.tokens
    state = torch.zeros(lib.raw("moe_layer_stream_state", E, I), dtype=torch.uint8, device="cuda")
    chosen = torch.empty(tokens, K, dtype=torch.int32, device="cuda"), torch.empty(tokens, K, dtype=torch.float32, device="cuda")

    def call(i):
        (w13, w2), (ids, weights) = inputs.weights[i % SETS], chosen if routed else inputs.routes[i]
        lib.launch("moe_layer_stream", inputs.x, None, 0.0, inputs.gates[i] if routed else None, None, None, None, ids, weights, w13, w2,
                   None, inputs.out, 1, state, tokens, H, I, E, E, K, 0, 0, 1, 1.0, 0.0, 0, 1.0, 0, 0, UNWATCHED)

    return [lambda i=i: call(i) for i in range(len(inputs.routes))]


def variants(lib, inputs):
    """Kernel name -> calls. A plan is (columns per pass, elements per stage)."""
    tokens = inputs.tokens
    found = {}
    if tokens * K <= 2048:
        found["stream"] = stream_calls(lib, inputs, (0, 1024))
        for chunk in (512, 768):
            found[f"stream, stage of {chunk}"] = stream_calls(lib, inputs, (0, chunk))
        for columns in (8, 16, 32):
            if 8 <= tokens <= 32 * columns:
                found[f"stream, {columns} columns"] = stream_calls(lib, inputs, (columns, 1024 if columns < 32 else 384))
    if tokens <= 4:
        found["one launch"] = layer_calls(lib, inputs)
    if tokens >= 8:
        found["tensor"] = tensor_calls(lib, inputs)
        found["tensor: no combine"] = tensor_calls(lib, inputs, "products")
        found["tensor: list alone"] = tensor_calls(lib, inputs, "list")
    if tokens >= 512:
        found["tensor: products alone"] = tensor_calls(lib, inputs, "alone")
        found["wide"] = tensor_calls(lib, inputs, wide=True)
        found["wide: no combine"] = tensor_calls(lib, inputs, "products", wide=True)
        found["wide: products alone"] = tensor_calls(lib, inputs, "alone", wide=True)
        found["wide: combine alone"] = tensor_calls(lib, inputs, "combine", wide=True)
    if tokens >= 64:
        found["grouped"] = grouped_calls(lib, inputs)
        for part in ("align", "gate_up", "down", "combine"):
            found[f"grouped, {part} alone"] = grouped_calls(lib, inputs, part)
    return found


def rate(name, inputs, us, skew):
    return {"kernel": name, "tokens": inputs.tokens, "skew": skew, "us": us, "distinct": inputs.distinct,
            "tb_s": inputs.bytes() / us / 1e6, "tflop_s": 6 * inputs.tokens * K * H * I / us / 1e6}


def run(lib, token_counts, skews, only=None):
    weights = make_weights()
    rows = []
    for skew in skews:
        for tokens in token_counts:
            inputs = Inputs(tokens, skew, weights, calls=max(8, min(48, 96 // tokens)))
            found = variants(lib, inputs)
            if not skew and (tokens <= 4 or tokens >= 8):
                routed = ["router + one launch"] if tokens <= 4 else ["router + tensor", "router + tensor + norm"]
                found |= dict.fromkeys([*routed, "router alone"])
            for name, calls in found.items():
                if only and name not in only:
                    continue
                if skew and name not in ("stream", "one launch", "grouped", "tensor", "wide"):
                    continue
                if calls is None:
                    if not hasattr(inputs, "gates"):
                        inputs.route()
                    if name == "router + one launch":
                        calls = layer_calls(lib, inputs, routed=True)
                    else:
                        calls = routed_calls(lib, inputs, {"router alone": "router", "router + tensor": None}.get(name, "norm"))
                try:
                    us = graph_us(calls)
                except RuntimeError as error:
                    print(f"{name}, T={tokens}: {error}")
                    continue
                rows.append(rate(name, inputs, us, skew))
                if name == "router alone":
                    whole = next(r for r in reversed(rows) if r["kernel"] in ("router + tensor", "router + one launch"))
                    rows.append(rate("experts as routed", inputs, whole["us"] - us, skew))
    print(f"{'kernel':<24} {'T':>5} {'skew':>5} {'us':>8} {'experts':>8} {'TB/s':>6} {'TFLOP/s':>8}")
    for r in rows:
        print(f"{r['kernel']:<24} {r['tokens']:>5} {r['skew']:>5} {r['us']:>8.1f} {r['distinct']:>8.1f} {r['tb_s']:>6.2f} {r['tflop_s']:>8.1f}")
    return rows
