"""Every kernel of a decode step of Qwen3-30B-A3B's shape by itself: microseconds, bytes, GB/s and launches a step.

Weights and caches of 12 layers in turn, each set far larger than L2 but for the router's gates (6 MB in all).
"""

import torch
from bench_decode import D, H, HQ, QKV, READ, VOCAB, graph_us, tensors
from bench_layer import BATCHES, E, I, K, LAYERS, Model, Step
from kernels import call, pack_rows, randn, u32
from library import BF16, F32

MODEL_LAYERS = 48
CONTEXT = 256


def attention_half(step):
    """qkv, attention, o_proj: (name, bytes, run(layer)) of each launch, as the engine chooses them by rows."""
    b, m = step.batch, step.m
    qkv_rows, o_rows = b * (4 * H + 4 * QKV), b * (2 * HQ * D + 4 * H)
    attend = lambda i: step.caches.attend(i, step.q, step.att, step.work, step.splits)
    if b <= 4:
        qkv = lambda i: call("moe_linear_stream", step.residual, m.gain, 1e-6, m.qkv[i], None, step.q, 0, b, QKV, H)
        o = lambda i: call("moe_linear_stream", step.att, None, 0.0, m.o[i], None, step.residual, 2, b, H, HQ * D)
        names = "norm + qkv", "o_proj + residual"
    elif b <= 64:
        qkv = lambda i: call("moe_linear_tensor", step.x, m.qkv[i], None, step.q, 0, b, QKV, H, 0)
        o = lambda i: call("moe_linear_tensor", step.att, m.o[i], None, step.delta, 0, b, H, HQ * D, 0)
        names = "qkv", "o_proj"
    else:
        qkv = lambda i: torch.mm(step.x, m.qkv[i].T, out=step.half_q)
        o = lambda i: torch.mm(step.att, m.o[i].T, out=step.half_x)
        names = "qkv (cuBLAS)", "o_proj (cuBLAS)"
        step.half_q, step.half_x = (torch.empty(b, n, dtype=torch.bfloat16, device="cuda") for n in (QKV, H))
    return [(names[0], 2 * QKV * H + qkv_rows, qkv), ("attention, K/V write", step.caches.bytes + b * (4 * QKV + 2 * HQ * D), attend),
            (names[1], 2 * H * HQ * D + o_rows, o)]


def expert_half(step):
    """The other launches of a layer."""
    b, m = step.batch, step.m
    touched = E * (1 - (1 - K / E) ** b)
    experts = touched * 6 * H * I + b * 4 * H
    if b <= 4:
        return [("norm, router, experts, sum: one launch", experts + 2 * E * H, step.one_launch)]
    norm = lambda i: call("moe_add_rms_norm", step.delta, step.residual, m.gain, 1e-6, step.x, b, H)
    combine = lambda i: call("moe_combine_add_rms_norm", step.rows, step.ids, step.weights, None, step.x, b, K, E, E, H,
                             F32, BF16, step.residual, m.gain, 1e-6)
    return [("residual + norm", 14 * b * H, norm), ("router", 2 * E * H + b * 2 * H, step.route),
            ("experts", experts, step.products), ("weighted sum + residual + norm", b * H * (4 * K + 10), combine)]


def ends(batch):
    """The launches that a step has once, outside of its layers."""
    weights, x, out = tensors(2, VOCAB, H), randn(batch, H), torch.empty(batch, VOCAB, device="cuda")
    logits = [randn(batch, VOCAB, dtype=torch.float32, scale=2.0) for _ in range(2)]
    params = pack_rows([(1.0, 0, 1.0, 0.0, i, i) for i in range(batch)])
    tokens, status = u32([0] * batch), u32([0] * batch)
    head = lambda i: call("moe_linear_tensor", x, weights[i % 2], None, out, 0, batch, VOCAB, H, 0)
    draw = lambda i: call("moe_sample", logits[i % 2], params, None, None, 0, None, batch, VOCAB, tokens, status)
    return [("lm_head", 2 * VOCAB * H + batch * (2 * H + 4 * VOCAB), head), ("sampling", 4 * batch * VOCAB, draw)]


def kernels(rows):
    """Prints a row for each kernel and batch, in the order of a step."""
    model = Model()
    print(f"{'B':>4} {'kernel':42} {'us':>8} {'launches':>8} {'us a step':>10} {'GB/s':>7}  of {READ / 1e9:.0f}")
    for batch in BATCHES:
        step = Step(model, batch, CONTEXT)
        step.residual.normal_()
        step.x.normal_()
        step.weights.uniform_()
        found = {}
        for launches, part in ((MODEL_LAYERS, attention_half(step)), (MODEL_LAYERS, expert_half(step)), (1, ends(batch))):
            for name, size, run in part:
                us = graph_us(lambda: [run(i) for i in range(LAYERS)], LAYERS)
                if name == "experts":
                    us -= found["router"]  # the router lists the slots, so the experts cannot run without it
                found[name] = us
                row = {"name": f"step B={batch} {name}", "batch": batch, "kernel": name, "us": us, "launches": launches,
                       "step_us": us * launches, "gb_s": size / us / 1e3}
                rows.append(row)
                print(f"{batch:4} {name:42} {us:8.2f} {launches:8} {us * launches:10.1f} {row['gb_s']:7.0f}  {100 * row['gb_s'] * 1e9 / READ:5.1f} %",
                      flush=True)
        del step


BENCHES = [kernels]
