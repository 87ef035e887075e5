"""Times the experts' products of FP8 weights with FP8 activations, launch by launch, weights rotated, in one graph each."""
import torch

from bench_experts import E, H, I, K, Inputs
from library import graph_us
from quant_pack import FP8_BLOCK, RawPack

SETS = 3


def buffers(rows, columns):
    return torch.empty(rows, columns, dtype=torch.uint8, device="cuda"), torch.empty(columns // 128, -(-rows // 4) * 4, device="cuda")


def experts(lib, tokens, results):
    weights = [(RawPack(E, 2 * I, H, FP8_BLOCK, True), RawPack(E, H, I, FP8_BLOCK)) for _ in range(SETS)]
    print(f"{'fp8 experts: us':18s}{'places':>8s}{'x':>8s}{'gate, up':>16s}{'act':>8s}{'down':>16s}{'all (TFLOP/s)':>18s}")
    for t in tokens:
        inputs = Inputs(t, 0.0, weights, SETS)
        i32, slots = dict(dtype=torch.int32, device="cuda"), t * K
        lists = [(torch.empty(E, slots, **i32), torch.empty(E, **i32)) for _ in inputs.routes]
        for (ids, _), (listed, counts) in zip(inputs.routes, lists):
            lib.launch("moe_any_list_slots", ids, None, slots, E, E, counts, listed)
        places = torch.empty(slots, **i32), torch.empty(slots, **i32)
        x, act = buffers(slots, H), buffers(slots, I)
        parts = [lambda i: lib.launch("moe_fp8_places", *lists[i], slots, *places, E, slots),
                 lambda i: lib.launch("moe_fp8_quantise", inputs.x, *x, *places, t, H, K),
                 lambda i: lib.launch("moe_fp8_experts_gate_up", *x, weights[i][0], *lists[i], slots, inputs.act, t, K),
                 lambda i: lib.launch("moe_fp8_quantise", inputs.act, *act, None, None, slots, I, 1),
                 lambda i: lib.launch("moe_fp8_experts_down", *act, weights[i][1], *lists[i], slots, inputs.short_rows, t, K)]

        def together(i):
            for part in parts:
                part(i)

        together(0)
        us = [graph_us([lambda i=i: part(i) for i in range(SETS)], replays=10) for part in [*parts, together]]
        flops = 2 * t * K * H * I / 1e6
        rate = lambda us, share: f"{us:.0f} ({share * flops / us:.0f})"
        cells = [f"{us[0]:.1f}", f"{us[1]:.0f}", rate(us[2], 2), f"{us[3]:.0f}", rate(us[4], 1), rate(us[5], 3)]
        print(f"{t:<18,}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, (8, 8, 16, 8, 16, 18))), flush=True)
        results.append({"fp8 experts": t, "us": us})
        del inputs, lists, act, x
        torch.cuda.empty_cache()


def run(lib, tokens, results):
    experts(lib, tokens, results)
