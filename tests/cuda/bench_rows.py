"""The launches of a step that memory bounds, by rows: microseconds next to the floor of their bytes.

Inputs in turn, 300 MB of them and more where there are many rows, so that reads come from memory as they do in a model.
"""

import torch
from bench_decode import D, H, HKV, HQ, QKV, READ, VOCAB
from bench_layer import E, K
from kernels import call, graph_us as us_of
from kernels import pack_rows, randn, u32
from library import BF16, F32

ROWS = (1, 8, 64, 256, 512, 1000, 1200, 2048, 8192)
BLOCK = 16


def report(rows, name, count, size, make, run):
    """Times `run` on inputs of `make`, `size` bytes each."""
    inputs = [make() for _ in range(max(2, min(64, int(3e8 / size) + 1)))]
    us, floor = us_of([lambda i=i: run(*i) for i in inputs], 12), size / READ * 1e6
    rows.append({"name": f"{name} rows={count}", "us": us, "floor_us": floor, "bytes": size})
    print(f"{name:32} {count:6} rows {us:9.2f} us  floor {floor:8.2f}  x {us / floor:5.2f}", flush=True)


def empty(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")


def norms(rows, count):
    gain, delta = randn(H), lambda: randn(count, H, dtype=torch.float32)
    report(rows, "residual + norm", count, count * 14 * H, lambda: (delta(), delta(), empty(count, H)),
           lambda d, x, out: call("moe_add_rms_norm", d, x, gain, 1e-6, out, count, H))
    report(rows, "norm", count, count * 6 * H, lambda: (delta(), empty(count, H)),
           lambda x, out: call("moe_rms_norm", x, gain, 1e-6, out, count, H))


def sums(rows, count):
    """Rows in f32 up to 1,200 tokens (`moe_experts_tensor`), in bf16 from 512 on (`moe_experts_wide`)."""
    gain, ids = randn(H), lambda: torch.rand(count, E, device="cuda").topk(K).indices.to(torch.int32)
    for code, dtype in ((F32, torch.float32), (BF16, torch.bfloat16)):
        if (count > 1200) if code == F32 else (count < 512):
            continue
        make = lambda: (randn(count * K, H, dtype=dtype), ids(), torch.rand(count, K, device="cuda"), empty(count, H),
                        randn(count, H, dtype=torch.float32))
        report(rows, f"sum + residual + norm, {str(dtype)[6:]}", count, count * H * (K * dtype.itemsize + 10), make,
               lambda r, i, w, out, x: call("moe_combine_add_rms_norm", r, i, w, None, out, count, K, E, E, H, code, BF16, x, gain, 1e-6))


def head_norm(rows, count):
    gains, angles, pages = (randn(D), randn(D)), [torch.rand(count, D // 2, device="cuda") for _ in range(2)], -(-count // BLOCK)
    at = torch.arange(count, device="cuda")
    slots = lambda: (torch.randperm(pages, device="cuda")[at // BLOCK] * BLOCK + at % BLOCK).to(torch.int32)
    make = lambda: (randn(count, QKV, dtype=torch.float32), slots(), empty(count, HQ * D), empty(pages, HKV, BLOCK, D), empty(pages, HKV, BLOCK, D))
    report(rows, "head norm, rope, cache", count, count * 6 * QKV, make,
           lambda x, slot, q, k, v: call("moe_qk_norm_rope_cache", x, *gains, 1e-6, *angles, None, slot, q, k, v, BF16, F32, BF16,
                                         count, HQ, HKV, D, BLOCK, pages * BLOCK))


def sampling(rows, count):
    tokens, status = u32([0] * count), u32([0] * count)
    for name, (t, p) in {"greedy": (0.0, 1.0), "temperature": (1.0, 1.0), "top-p 0.9": (1.0, 0.9)}.items():
        params = pack_rows([(t, 0, p, 0.0, i, i) for i in range(count)])
        report(rows, f"sampling, {name}", count, 4 * count * VOCAB, lambda: (randn(count, VOCAB, dtype=torch.float32, scale=2.0),),
               lambda x: call("moe_sample", x, params, None, None, 0, None, count, VOCAB, tokens, status))


def memory_bound(rows):
    """Prints a row for each kernel and number of rows."""
    for kernel in (sums, norms, head_norm):
        for count in ROWS:
            kernel(rows, count)
    for count in (1, 8, 64, 256, 512):
        sampling(rows, count)


BENCHES = [memory_bound]
