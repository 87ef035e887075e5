"""Times products with act-order: rows ordered ahead of the fast kernels, next to the same without an order and the
kernels for any scheme."""
import torch

from bench_experts import LINEARS, E, H, I, K, O, QKV, SETS, Inputs
from library import BF16, F32, graph_us
from quant_pack import INT4_128, RawPack, pack_fields

LINEAR_ROWS = (1, 4, 8, 64, 256, 512, 2048, 8192)
WAYS = ("plain", "ordered", "any")


def orders(experts, columns):
    """[E, K]: which column of x stands at each place."""
    return torch.rand(experts, columns, device="cuda").argsort(-1).to(torch.int32)


def expert_calls(lib, inputs, perms, wide, way):
    """Lists, products and sum."""
    t, i32 = inputs.tokens, dict(dtype=torch.int32, device="cuda")
    slots = t * K
    listed, counts = torch.empty(E, slots, **i32), torch.empty(E, **i32)
    counters = torch.zeros(lib.raw("moe_experts_tensor_counters", E), **i32)
    offsets, sorted_slots, in_rows = torch.empty(E + 1, **i32), torch.empty(slots, **i32), torch.empty(slots, **i32)
    workspace = torch.empty(lib.raw("moe_any_group_slots_workspace", E), **i32)
    x = torch.empty(slots if way == "ordered" else 0, H, device="cuda", dtype=torch.bfloat16)
    rows = inputs.short_rows if wide and way != "any" else inputs.rows
    name = "moe_quant_experts_wide" if wide else "moe_quant_experts_tensor"

    def call(i):
        (w13, w2), (ids, weights), perm = inputs.weights[i % SETS], inputs.routes[i], perms[i % SETS]
        if way == "any":
            lib.launch("moe_any_group_slots", ids, None, slots, K, E, E, offsets, sorted_slots, in_rows, workspace)
            w13.perm = perm
            lib.launch("moe_any_quant_gate_up", inputs.x, offsets, in_rows, w13, None, inputs.act, BF16, 0, 0.0, 0.0, t, slots)
            w13.perm = None
            lib.launch("moe_any_quant_down", inputs.act, offsets, sorted_slots, w2, None, rows, BF16, slots, slots)
        else:
            lib.launch("moe_any_list_slots", ids, None, slots, E, E, counts, listed)
            if way == "ordered":
                lib.launch("moe_order_rows", inputs.x, perm, listed, counts, slots, x, t, K, H, E)
            rows_of, sizes = (x, (slots, 1)) if way == "ordered" else (inputs.x, (t, K))
            lib.launch(name, rows_of, w13, w2, listed, counts, slots, inputs.act, rows, counters, *sizes, E, 0)
        lib.launch("moe_combine", rows, ids, weights, None, inputs.out, t, K, E, E, H, BF16 if rows is inputs.short_rows else F32, BF16)

    return [lambda i=i: call(i) for i in range(len(inputs.routes))]


def order_calls(lib, inputs, perms):
    """The order alone, of lists made before."""
    t, i32 = inputs.tokens, dict(dtype=torch.int32, device="cuda")
    lists = [(torch.empty(E, t * K, **i32), torch.empty(E, **i32)) for _ in inputs.routes]
    for (ids, _), (listed, counts) in zip(inputs.routes, lists):
        lib.launch("moe_any_list_slots", ids, None, t * K, E, E, counts, listed)
    x = torch.empty(t * K, H, device="cuda", dtype=torch.bfloat16)
    return [lambda i=i: lib.launch("moe_order_rows", inputs.x, perms[i % SETS], *lists[i], t * K, x, t, K, H, E) for i in range(len(lists))]


def experts(lib, tokens, results):
    weights = [(RawPack(E, 2 * I, H, INT4_128, True), RawPack(E, H, I, INT4_128)) for _ in range(SETS)]
    perms = [orders(E, H) for _ in range(SETS)]
    print(f"{'experts, us':12s}" + "".join(f"{way:>10s}" for way in (*WAYS, "order")))
    for t in tokens:
        inputs = Inputs(t, 0.0, weights, 8 if t < 2048 else SETS)
        us = {}
        for way in WAYS:
            us[way] = graph_us(expert_calls(lib, inputs, perms, t >= 1024, way), replays=10 if t < 2048 else 3)
        us["order"] = graph_us(order_calls(lib, inputs, perms), replays=10)
        results.append({"experts": t, **us})
        print(f"{t:<12d}" + "".join(f"{us[way]:10.1f}" for way in (*WAYS, "order")), flush=True)
        del inputs
        torch.cuda.empty_cache()


def linear_calls(lib, way, x, weights, perm):
    """A product of each weight, to bf16 from 512 rows on, which torch multiplies."""
    (m, k), n = x.shape, weights[0].n
    ordered, out = torch.empty_like(x), torch.empty(m, n, device="cuda", dtype=torch.float32 if m < 512 else torch.bfloat16)
    floats = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)

    def call(w):
        rows, w.perm = x, None
        if way == "ordered":
            lib.launch("moe_order_rows", x, perm, None, None, 0, ordered, m, 1, k, 1)
            rows = ordered
        if way == "any":
            w.perm = perm
        if m >= 512:
            lib.launch("moe_any_dequantise" if way == "any" else "moe_quant_dequantise", *pack_fields(w), floats, *((BF16,) if way == "any" else ()))
            torch.mm(rows, floats.T, out=out)
        elif way == "any":
            lib.launch("moe_any_quant_linear", rows, w, None, out, BF16, F32, m)
        elif m <= 8:
            lib.launch("moe_quant_linear_stream", rows, None, 0.0, w, None, out, F32, m)
        else:
            lib.launch("moe_quant_linear_tensor", rows, w, None, out, F32, m, 0)

    return [lambda w=w: call(w) for w in weights]


def linears(lib, results):
    print(f"{'linears, us':12s}" + "".join(f"{f'{name} {way}':>15s}" for name in ("qkv", "o") for way in WAYS))
    for m in LINEAR_ROWS:
        cells = []
        for name, (n, k) in (("qkv", QKV), ("o", O)):
            weights, perm = [RawPack(1, n, k, INT4_128) for _ in range(LINEARS)], orders(1, k)
            x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
            us = {way: graph_us(linear_calls(lib, way, x, weights, perm), replays=10 if m < 2048 else 3) for way in WAYS}
            results.append({"linear": name, "rows": m, **us})
            cells += [us[way] for way in WAYS]
        print(f"{m:<12d}" + "".join(f"{us:15.1f}" for us in cells), flush=True)


def run(lib, tokens, results):
    linears(lib, results)
    experts(lib, tokens, results)
