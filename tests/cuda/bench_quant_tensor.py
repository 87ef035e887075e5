"""Times the kernels on warpgroup products with quantised weights next to those with bf16, weights rotated, in one graph
each."""
import torch

import bench_fp8
import bench_order

from bench_experts import LINEARS, E, H, I, K, O, QKV, Inputs
from library import BF16, F32, graph_us
from quant_pack import FP8_BLOCK, INT4_128, INT4_32Z, INT8_128, MXFP4, NVFP4_16, RawPack, pack_fields

SCHEMES = [None, INT4_128, INT4_32Z, INT8_128, FP8_BLOCK, MXFP4, NVFP4_16]  # None: bf16
SETS = 4


def expert_weights(scheme):
    if scheme is None:
        return [(torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) * 0.02, torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) * 0.02)
                for _ in range(SETS)]
    return [(RawPack(E, 2 * I, H, scheme, True), RawPack(E, H, I, scheme)) for _ in range(SETS)]


def expert_bytes(scheme):
    return 6 * H * I if scheme is None else scheme.bytes(2 * I, H) + scheme.bytes(H, I)


def expert_calls(lib, scheme, inputs, wide):
    """Both products alone, with lists made before."""
    slots, i32 = inputs.tokens * K, dict(dtype=torch.int32, device="cuda")
    lists = [(torch.empty(E, slots, **i32), torch.empty(E, **i32)) for _ in inputs.routes]
    for (ids, _), (listed, counts) in zip(inputs.routes, lists):
        lib.launch("moe_any_list_slots", ids, None, slots, E, E, counts, listed)
    counters = torch.zeros(lib.raw("moe_experts_tensor_counters", E), **i32)
    name = ("moe_quant_" if scheme else "moe_") + ("experts_wide" if wide else "experts_tensor")
    rows = inputs.short_rows if wide else inputs.rows

    def call(i):
        weights, (listed, counts) = inputs.weights[i % SETS], lists[i]
        sizes = (inputs.tokens, K, E) + ((0,) if scheme else (E, H, I))
        lib.launch(name, inputs.x, *weights, listed, counts, slots, inputs.act, rows, counters, *sizes)

    return [lambda i=i: call(i) for i in range(len(lists))]


def experts(lib, tokens, schemes, results):
    """us, and TB/s of the touched experts' bytes or, from 1,024 tokens on, TFLOP/s."""
    print(f"{'experts: us (TB/s)':18s}" + "".join(f"{t:>14,}" for t in tokens))
    for scheme in schemes:
        weights, kinds = expert_weights(scheme), {}
        for t in tokens:
            inputs = Inputs(t, 0.0, weights, 8 if t < 2048 else SETS)
            for wide in [False] * (t <= 512) + [True] * (t >= 512):
                us = graph_us(expert_calls(lib, scheme, inputs, wide), replays=10)
                rate = 6 * t * K * H * I / us / 1e6 if t >= 1024 else inputs.distinct * expert_bytes(scheme) / us / 1e6
                kinds[t, wide] = f"{us:.1f} ({rate:.2f})" if t < 1024 else f"{us:.0f} ({rate:.0f})"
                results.append({"experts": scheme.name if scheme else "bf16", "wide": wide, "tokens": t, "us": us, "rate": rate})
            del inputs
        name = scheme.name if scheme else "bf16"
        for wide in (False, True):
            print(f"{name + ', wide' * wide:18s}" + "".join(f"{kinds.get((t, wide), '-'):>14s}" for t in tokens), flush=True)
        del weights
        torch.cuda.empty_cache()


def linears(lib, rows, schemes, results, splits=0):
    """K is cut over `splits` blocks; with 0 the launcher chooses the number."""
    print(f"{'linears: us':18s}" + "".join(f"{m:>14,}" for m in rows) + "   (qkv / o_proj)")
    for scheme in schemes:
        cells = {m: [] for m in rows}
        for n, k in (QKV, O):
            weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) if scheme is None else RawPack(1, n, k, scheme) for _ in range(LINEARS)]
            for m in rows:
                x, out = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.empty(m, n, device="cuda")
                if scheme is None:
                    calls = [lambda w=w: lib.launch("moe_linear_tensor", x, w, None, out, F32, m, n, k, splits) for w in weights]
                else:
                    calls = [lambda w=w: lib.launch("moe_quant_linear_tensor", x, w, None, out, F32, m, splits) for w in weights]
                us = graph_us(calls, replays=10)
                cells[m].append(f"{us:.1f}")
                results.append({"linear": scheme.name if scheme else "bf16", "n": n, "k": k, "m": m, "us": us})
        print(f"{scheme.name if scheme else 'bf16':18s}" + "".join(f"{' / '.join(cells[m]):>14s}" for m in rows), flush=True)


def dequantise(lib, schemes, results):
    """us (TB/s of packed bytes and bf16) of a pack turned into rows, by the fast kernel and by the one for any
    scheme."""
    print(f"{'dequantise: us (TB/s)':22s}{'fast':>16s}{'any':>16s}")
    for scheme in filter(None, schemes):
        for name, shapes, count in (("qkv", [(1, *QKV)], 12), ("o_proj", [(1, *O)], 12), ("experts", [(E, 2 * I, H), (E, H, I)], 2)):
            packs = [[RawPack(*shape, scheme, gate_up=shape[0] > 1 and i == 0) for i, shape in enumerate(shapes)] for _ in range(count)]
            outs = [[torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes] for _ in range(2)]
            size = sum(e * (scheme.bytes(n, k) + 2 * n * k) for e, n, k in shapes)
            cells = []
            for launcher, dtype in (("moe_quant_dequantise", ()), ("moe_any_dequantise", (BF16,))):
                def call(i):
                    for pack, out in zip(packs[i], outs[i % 2]):
                        lib.launch(launcher, *pack_fields(pack), out, *dtype)
                us = graph_us([lambda i=i: call(i) for i in range(count)], replays=5)
                cells.append(f"{us:.1f} ({size / us / 1e6:.2f})")
                results.append({"dequantise": scheme.name, "of": name, "launcher": launcher, "us": us})
            print(f"{scheme.name + ', ' + name:22s}" + "".join(f"{c:>16s}" for c in cells), flush=True)
            del packs, outs
            torch.cuda.empty_cache()


def run(lib, tokens, names=None, what="linears,experts", splits=0):
    results, schemes = [], [s for s in SCHEMES if not names or (s.name if s else "bf16") in names]
    what = what.split(",")
    if "linears" in what:
        linears(lib, [m for m in tokens if m <= 512], schemes, results, splits)
    if "experts" in what:
        experts(lib, tokens, schemes, results)
    if "dequantise" in what:
        dequantise(lib, schemes, results)
    if "order" in what:
        bench_order.run(lib, tokens, results)
    if "fp8" in what:
        bench_fp8.experts(lib, tokens, results)
    if "fp8_linears" in what:
        bench_fp8.linears(lib, tokens, results, splits)
    return results
