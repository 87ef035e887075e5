"""Times products of FP8 weights with FP8 activations, launch by launch, weights rotated, in one graph each."""
import torch

from bench_experts import E, H, I, K, Inputs
from cublaslt import CublasLt, Product
from library import F32, graph_us
from quant_pack import FP8_BLOCK, RawPack, pack_fields

SETS = 3
QKV, O = (5120, 2048), (2048, 4096)
LINEARS = 16  # matrices of a product, which L2 does not hold


def buffers(rows, columns):
    return torch.empty(rows, columns, dtype=torch.uint8, device="cuda"), torch.empty(columns // 128, -(-rows // 4) * 4, device="cuda")


def experts(lib, tokens, results):
    weights = [(RawPack(E, 2 * I, H, FP8_BLOCK, True), RawPack(E, H, I, FP8_BLOCK)) for _ in range(SETS)]
    print(f"{'fp8 experts: us':18s}{'x':>8s}{'places':>8s}{'gate, up':>16s}{'down':>16s}{'all (TFLOP/s)':>18s}")
    for t in tokens:
        inputs = Inputs(t, 0.0, weights, SETS)
        i32, slots = dict(dtype=torch.int32, device="cuda"), t * K
        lists = [(torch.empty(E, slots, **i32), torch.empty(E, **i32)) for _ in inputs.routes]
        for (ids, _), (listed, counts) in zip(inputs.routes, lists):
            lib.launch("moe_any_list_slots", ids, None, slots, E, E, counts, listed)
        rows, x, act = buffers(t, H), buffers(slots, H), buffers(slots, I)
        parts = [lambda i: lib.launch("moe_fp8_quantise", inputs.x, *rows, t, H, 0),
                 lambda i: lib.launch("moe_fp8_places", *rows, *lists[i], slots, *x, t, K, H, E),
                 lambda i: lib.launch("moe_fp8_experts_gate_up", *x, weights[i][0], *lists[i], slots, *act, t, K),
                 lambda i: lib.launch("moe_fp8_experts_down", *act, weights[i][1], *lists[i], slots, inputs.short_rows, None, t, K)]

        def together(i):
            for part in parts:
                part(i)

        together(0)
        us = [graph_us([lambda i=i: part(i) for i in range(SETS)], replays=10) for part in [*parts, together]]
        flops = 2 * t * K * H * I / 1e6
        rate = lambda us, share: f"{us:.0f} ({share * flops / us:.0f})"
        cells = [f"{us[0]:.1f}", f"{us[1]:.0f}", rate(us[2], 2), rate(us[3], 1), rate(us[4], 3)]
        print(f"{t:<18,}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, (8, 8, 16, 16, 18))), flush=True)
        results.append({"fp8 experts": t, "us": us})
        del inputs, lists, act, x
        torch.cuda.empty_cache()


def linears(lib, rows, results, splits=0):
    """us of dense products, qkv / o_proj: with 16-bit activations, then with FP8: the rows alone, moe_fp8_linear with
    and without them, the pack as rows, cuBLASLt on these, and all three together."""
    lt = CublasLt()
    names = ["16 bits", "x", "fp8_linear", "x, it", "rows", "cuBLASLt", "x, rows, it"]
    print(f"{'fp8 linears: us':18s}" + "".join(f"{name:>16s}" for name in names))
    packs = {shape: [RawPack(1, *shape, FP8_BLOCK) for _ in range(LINEARS)] for shape in (QKV, O)}
    w = {shape: torch.empty(shape, dtype=torch.uint8, device="cuda") for shape in packs}
    w_scales = {(n, k): torch.empty(n // 128, k // 128, device="cuda") for n, k in packs}
    w16 = {shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in packs}
    for m in rows:
        cells = []
        for n, k in (QKV, O):
            shape, out = (n, k), torch.empty(m, n, device="cuda")
            x, q = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), buffers(m, k)
            padded = -(-m // 4) * 4
            product, product16 = Product(lt, padded, n, k, True, True), Product(lt, m, n, k, False, True)
            wide = torch.empty(padded, n, device="cuda")

            def exact(pack):
                if m < 512:
                    return lib.launch("moe_quant_linear_tensor", x, pack, None, out, F32, m, 0)
                lib.launch("moe_quant_dequantise", *pack_fields(pack), w16[shape])
                product16(w16[shape], x, out)

            quantise = lambda pack, quads=1: lib.launch("moe_fp8_quantise", x, *q, m, k, quads)
            own = lambda pack: lib.launch("moe_fp8_linear", *q, pack, None, out, F32, m, splits)
            write = lambda pack: lib.launch("moe_fp8_rows", *pack_fields(pack), w[shape], w_scales[shape])
            blas = lambda pack: product(w[shape], q[0], wide, w_scales[shape], q[1])
            parts = [exact, quantise, own, lambda p: (quantise(p), own(p)), write, blas, lambda p: (quantise(p, 0), write(p), blas(p))]
            write(packs[shape][0])
            us = [graph_us([lambda p=p: part(p) for p in packs[shape]], replays=10) for part in parts]
            cells.append(us)
            results.append({"fp8 linear": m, "n": n, "k": k, "us": dict(zip(names, us))})
        print(f"{m:<18,}" + "".join(f"{f'{a:.1f} / {b:.1f}':>16s}" for a, b in zip(*cells)), flush=True)
