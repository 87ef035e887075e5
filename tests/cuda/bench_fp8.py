"""Times the products of FP8 weights with FP8 activations, launch by launch, weights rotated, in one graph each; beside them bf16."""
import torch

from bench_experts import E, H, I, K, Inputs
from library import F32, graph_us
from quant_pack import FP8_BLOCK, RawPack

SETS = 3


def buffers(rows, columns):
    return torch.empty(rows, columns, dtype=torch.uint8, device="cuda"), torch.empty(columns // 128, rows, device="cuda")


def experts(lib, tokens, results):
    weights = [(RawPack(E, 2 * I, H, FP8_BLOCK, True), RawPack(E, H, I, FP8_BLOCK)) for _ in range(SETS)]
    print(f"{'fp8 experts: us':18s}{'x':>8s}{'gate, up':>16s}{'act':>8s}{'down':>16s}{'all (TFLOP/s)':>18s}")
    for t in tokens:
        inputs = Inputs(t, 0.0, weights, SETS)
        i32, slots = dict(dtype=torch.int32, device="cuda"), t * K
        lists = [(torch.empty(E, slots, **i32), torch.empty(E, **i32)) for _ in inputs.routes]
        for (ids, _), (listed, counts) in zip(inputs.routes, lists):
            lib.launch("moe_any_list_slots", ids, None, slots, E, E, counts, listed)
        x, act = buffers(t, H), buffers(slots, I)
        parts = [lambda i: lib.launch("moe_fp8_quantise", inputs.x, *x, t, H),
                 lambda i: lib.launch("moe_fp8_experts_gate_up", *x, weights[i][0], *lists[i], slots, inputs.act, t, K),
                 lambda i: lib.launch("moe_fp8_quantise", inputs.act, *act, slots, I),
                 lambda i: lib.launch("moe_fp8_experts_down", *act, weights[i][1], *lists[i], slots, inputs.short_rows, t, K)]
        together = lambda i: [part(i) for part in parts]
        us = [graph_us([lambda i=i: part(i) for i in range(SETS)], replays=10) for part in [*parts, together]]
        flops = 2 * t * K * H * I / 1e6
        cells = [f"{us[0]:.0f}", f"{us[1]:.0f} ({2 * flops / us[1]:.0f})", f"{us[2]:.0f}", f"{us[3]:.0f} ({flops / us[3]:.0f})", f"{us[4]:.0f} ({3 * flops / us[4]:.0f})"]
        print(f"{t:<18,}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, (8, 16, 8, 16, 18))), flush=True)
        results.append({"fp8 experts": t, "us": us})
        del inputs, lists, act
        torch.cuda.empty_cache()


def linears(lib, rows, results):
    print(f"{'fp8 linear: us':22s}{'x':>8s}{'fp8 (TFLOP/s)':>18s}{'bf16 cuBLAS':>18s}")
    for name, n, k in (("qkv", 5120, 2048), ("o_proj", 2048, 4096)):
        packs = [RawPack(1, n, k, FP8_BLOCK) for _ in range(8)]
        floats = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            q, out = buffers(m, k), torch.empty(m, n, device="cuda")
            short = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            quantise = graph_us([lambda: lib.launch("moe_fp8_quantise", x, *q, m, k)] * 8)
            us = graph_us([lambda p=p: lib.launch("moe_fp8_linear", *q, p, out, F32, m) for p in packs])
            plain = graph_us([lambda w=w: torch.matmul(x, w.T, out=short) for w in floats])
            tera = 2 * m * n * k / 1e6
            cells = [f"{quantise:.1f}", f"{us:.1f} ({tera / us:.0f})", f"{plain:.1f} ({tera / plain:.0f})"]
            print(f"{name + f', {m:,} rows':22s}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, (8, 18, 18))), flush=True)
            results.append({"fp8 linear": name, "rows": m, "quantise": quantise, "us": us, "bf16": plain})


def run(lib, tokens, results):
    linears(lib, [t for t in tokens if t <= 8192], results)
    experts(lib, tokens, results)
