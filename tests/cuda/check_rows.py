"""Checks of the row-wise kernels and the dense products against float64."""

import itertools

import torch
from kernels import NOTHING, Out, call, randn, refuses, rel, sized, u32

F32_BOUND = 2e-5   # f32 sums of bf16 products
BF16_BOUND = 4e-3  # one rounding to bf16, 2^-8 at most, which a single output may meet
NORM_BOUND = 8e-3  # x rounded to bf16 ahead of a sum that may cancel, in as few as one output


def norm_ref(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def embedding():
    for tokens, hidden, vocab in sized([(1, 2048, 1000), (7, 64, 33), (300, 4160, 77)], [(7, 64, 33), (3, 4160, 77)]):
        table = randn(vocab, hidden)
        ids = torch.randint(0, vocab, (tokens,)).tolist()
        ids[-1] = 0xFFFFFFFF if tokens > 1 else ids[-1]
        out = Out((tokens, hidden), torch.float32)
        call("moe_embedding", table, u32(ids), out.t, tokens, hidden, vocab)
        want = torch.stack([table[i].float() if i < vocab else torch.zeros(hidden, device="cuda") for i in ids])
        assert torch.equal(out.t, want)
        out.check_guard()


def norms():
    for rows, hidden in sized([(1, 2048), (3, 64), (257, 2048), (5, 4160), (2, 8192), (1501, 2056), (700, 4160)],
                              [(3, 64), (9, 4160)]):
        weight, x, delta = randn(hidden), randn(rows, hidden, scale=30.0, dtype=torch.float32), None
        x[-1] = 0
        out = Out((rows, hidden), torch.bfloat16)
        call("moe_rms_norm", x, weight, 1e-6, out.t, rows, hidden)
        assert rel(out.t, norm_ref(x, weight, 1e-6)) < BF16_BOUND
        assert bool((out.t[-1] == 0).all())
        out.check_guard()
        delta, out, residual = randn(rows, hidden, dtype=torch.float32), Out((rows, hidden), torch.bfloat16), x.clone()
        call("moe_add_rms_norm", delta, residual, weight, 1e-6, out.t, rows, hidden)
        assert torch.equal(residual, x + delta)
        assert rel(out.t, norm_ref(x + delta, weight, 1e-6)) < BF16_BOUND
        out.check_guard()
    assert refuses("moe_rms_norm", x, weight, 1e-6, out.t, 1, 12)


def norms_do_not_depend_on_other_rows():
    """A block takes several rows of many: each is what it is alone."""
    for rows, hidden in sized([(1000, 2048), (600, 4160), (700, 3080), (4500, 1032)], [(300, 64), (520, 2056)]):
        weight, delta, x = randn(hidden), *(randn(rows, hidden, dtype=torch.float32) for _ in range(2))
        residual, out = x.clone(), torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
        call("moe_add_rms_norm", delta, residual, weight, 1e-6, out, rows, hidden)
        for first, count in ((0, 1), (rows - 1, 1), (17, 60), (5, 200)):
            part = slice(first, first + count)
            own, few = x[part].clone(), torch.empty(count, hidden, dtype=torch.bfloat16, device="cuda")
            call("moe_add_rms_norm", delta[part], own, weight, 1e-6, few, count, hidden)
            assert torch.equal(own, residual[part]) and torch.equal(few, out[part]), f"rows {part} of {rows}, H={hidden}"
            call("moe_rms_norm", own, weight, 1e-6, few, count, hidden)
            assert torch.equal(few, out[part]), f"norm alone, rows {part} of {rows}, H={hidden}"
        whole = torch.empty_like(out)
        call("moe_rms_norm", residual, weight, 1e-6, whole, rows, hidden)
        assert torch.equal(whole, out), f"norm alone, {rows} rows, H={hidden}"


def linear_case(kernel, m, n, k, output, bias, norm, splits=0):
    w, x = randn(n, k, scale=k**-0.5), randn(m, k)
    b = randn(n) if bias else None
    gain = randn(k) if norm else None
    if norm:
        x = x.float() * 5
        x[-1] = 0
    before = randn(m, n, dtype=torch.float32)
    out = Out((m, n), torch.bfloat16 if output == 1 else torch.float32)
    if output == 2:
        out.t.copy_(before)
    if kernel == "stream":
        run = lambda to: call("moe_linear_stream", x, gain, 1e-6, w, b, to, output, m, n, k)
    else:
        run = lambda to: call("moe_linear_tensor", x, w, b, to, output, m, n, k, splits)
    run(out.t)
    xr = norm_ref(x, gain, 1e-6) if norm else x.double()
    want = xr @ w.double().T + (b.double() if bias else 0) + (before.double() if output == 2 else 0)
    bound = NORM_BOUND if norm else BF16_BOUND if output == 1 else F32_BOUND
    error = rel(out.t, want)
    name = f"{kernel} m={m} n={n} k={k} output={output} bias={bias} norm={norm} splits={splits}"
    assert error < bound, f"{name}: error {error:.2e}"
    out.check_guard()
    again = before.clone() if output == 2 else torch.empty_like(out.t)
    run(again)
    assert torch.equal(again, out.t), f"{name}: not repeatable"
    return x, gain, w, out.t


FULL = [(5120, 2048), (2048, 4096), (130, 64), (1, 128), (33, 1088), (777, 2880), (16, 1024), (128, 2048), (100, 6208)]
SHAPES = sized(FULL, [(1, 128), (130, 64), (300, 1088), (777, 320), (5, 4160), (5000, 64)])  # the last: more stages than the ring has


def linear_stream():
    for i, ((n, k), m) in enumerate(itertools.product(SHAPES, sized([1, 2, 3, 5, 7, 8], [1, 3, 8]))):
        linear_case("stream", m, n, k, i % 3, i % 2 == 0, i % 4 == 1)
        linear_case("stream", m, n, k, (i + 1) % 3, i % 2 == 1, i % 4 == 3)
    # A row's bits depend neither on the other rows nor on their number.
    n, k = sized((640, 2048), (300, 1088))
    for norm in (False, True):
        x, gain, w, out = linear_case("stream", 8, n, k, 0, False, norm)
        for m in (1, 3, 5):
            few = torch.empty(m, n, device="cuda")
            call("moe_linear_stream", x[:m].contiguous(), gain, 1e-6, w, None, few, 0, m, n, k)
            assert torch.equal(few, out[:m])
    assert refuses("moe_linear_stream", x, None, 0.0, w, None, out, 0, 9, n, k)
    assert refuses("moe_linear_stream", x, None, 0.0, w, None, out, 0, 1, n, k + 2)


def linear_tensor():
    for i, ((n, k), m) in enumerate(itertools.product(SHAPES, sized([1, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300], [1, 17, 65, 129]))):
        linear_case("tensor", m, n, k, i % 3, i % 2 == 0, False, splits=(0, 1, 3, 8)[i % 4])
    assert refuses("moe_linear_tensor", randn(1, 64), randn(1, 64), None, randn(1, 1), 0, 1, 1, 32, 0)


CHECKS = [embedding, norms, norms_do_not_depend_on_other_rows, linear_stream, linear_tensor]
