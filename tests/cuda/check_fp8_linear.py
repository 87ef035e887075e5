"""Checks dense products of FP8 weights with FP8 activations against float64 of the very bytes that they multiply; run by quant_tensor.py."""
import torch

from check_fp8 import BOUND, QUADS, in_order, quantise, values
from cublaslt import CublasLt, Product
from library import ADD_F32, BF16, F32, poison, rel_error, sized
from quant_pack import FP8, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_128, Pack, Scheme, pack_fields

CHECKS = []
GUARD = 4096
BLOCK = 128


def check(function):
    CHECKS.append(function)
    return function


def product(lib, x, pack, output=F32, bias=None, splits=0, out=None):
    """(out, x as it was quantised)."""
    q, scales = quantise(lib, x, quads=1)
    rows, n = x.shape[0], pack.n
    if out is None:
        out = poison(rows * n + GUARD, dtype=torch.bfloat16 if output == BF16 else torch.float32)
    lib.launch("moe_fp8_linear", q, scales, pack, bias, out, output, rows, splits)
    assert out[rows * n :].isnan().all(), f"[{rows}, {n}]: wrote behind the output"
    return out[: rows * n].view(rows, n), values(q, scales, QUADS)


@check
def fp8_linear_matches_float64(lib):
    """Every scheme, few and many rows, parts of K, biases."""
    worst = 0.0
    schemes = [FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, Scheme("fp8 blocks of 32 x 128", FP8, 128, scale=F32, rows=32), Scheme("fp8 blocks of 1 x 256", FP8, 256, scale=F32)]
    for n, k in sized([(128, 128), (96, 256), (640, 1408), (2048, 4096)], [(96, 256)]):
        for scheme in schemes:
            pack = Pack(1, n, k, scheme)
            bias = torch.randn(n, device="cuda").to(torch.bfloat16)
            for rows in sized([1, 3, 63, 64, 65, 127, 200, 513], [1, 65]):
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                for splits in {0, 1, min(3, k // 128), min(8, k // 128)}:
                    out, meant = product(lib, x, pack, splits=splits, bias=bias if splits == 1 else None)
                    want = meant @ pack.w[0].T + (bias.double() if splits == 1 else 0)
                    error = rel_error(out, want)
                    assert error < BOUND, f"{scheme.name} [{rows}, {k}] [{n}] splits {splits}: off by {error}"
                    worst = max(worst, error)
    print(f"  worst error {worst:.2e}")


@check
def fp8_linear_rounds_or_adds(lib):
    pack, x = Pack(1, 640, 512, FP8_BLOCK), torch.randn(77, 512, device="cuda", dtype=torch.bfloat16)
    full, _ = product(lib, x, pack)
    rounded, _ = product(lib, x, pack, BF16)
    assert torch.equal(rounded, full.to(torch.bfloat16)), "bf16 is not the f32 result, rounded once"
    before = torch.randn(77 * 640, device="cuda")
    out = torch.cat([before, poison(GUARD, dtype=torch.float32)])
    added, _ = product(lib, x, pack, ADD_F32, out=out)
    assert rel_error(added, before.view(77, 640).double() + full.double()) < 1e-6, "not added to what was there"
    again, _ = product(lib, x, pack)
    assert torch.equal(again, full), "runs differ"
    few, _ = product(lib, x[:64].contiguous(), pack, splits=1)
    many, _ = product(lib, x, pack, splits=1)
    assert torch.equal(few, many[:64]), "with K in one part rows of 64 differ from those among 77"


@check
def fp8_rows_are_those_of_the_pack(lib):
    for n, k in sized([(128, 128), (256, 384), (640, 1408), (5120, 2048)], [(256, 384)]):
        for scheme in (FP8_BLOCK, FP8_TENSOR):
            pack = Pack(1, n, k, scheme)
            blocks, lines = n // BLOCK, -(-(k // BLOCK) // 4) * 4
            rows, scales = torch.full((n * k + GUARD,), 0x5A, dtype=torch.uint8, device="cuda"), poison(blocks * lines + GUARD, dtype=torch.float32)
            lib.launch("moe_fp8_rows", *pack_fields(pack), rows, scales)
            name = f"{scheme.name} [{n}, {k}]"
            assert torch.equal(in_order(rows[: n * k].view(n, k)), pack.codes[0]), f"{name}: bytes differ"
            got = scales[: blocks * lines].view(blocks, lines)
            want = pack.scale[0, ::BLOCK].expand(-1, k // BLOCK) if pack.groups == 1 else pack.scale[0, ::BLOCK]
            assert torch.equal(got[:, : k // BLOCK], want), f"{name}: scales differ"
            assert (got[:, k // BLOCK :] == 0).all(), f"{name}: scales behind the last column"
            assert (rows[n * k :] == 0x5A).all() and scales[blocks * lines :].isnan().all(), f"{name}: wrote behind the output"


@check
def cublaslt_multiplies_rows_of_packs(lib):
    """The layout of rows and scales is the one that cuBLASLt's block scales ask for; rows of x are a multiple of 4."""
    lt = CublasLt()
    for n, k, rows in sized([(256, 384, 5), (5120, 2048, 130), (2048, 4096, 1027)], [(256, 384, 5)]):
        pack, lines = Pack(1, n, k, FP8_BLOCK), -(-(k // BLOCK) // 4) * 4
        w, w_scales = torch.empty(n, k, dtype=torch.uint8, device="cuda"), torch.empty(n // BLOCK, lines, device="cuda")
        lib.launch("moe_fp8_rows", *pack_fields(pack), w, w_scales)
        padded = -(-rows // 4) * 4
        x = torch.zeros(padded, k, device="cuda", dtype=torch.bfloat16)
        x[:rows] = torch.randn(rows, k, device="cuda")
        q, scales = quantise(lib, x)
        out = poison(padded * n + GUARD, dtype=torch.float32)
        Product(lt, padded, n, k, True, True)(w, q, out, w_scales, scales)
        error = rel_error(out[: rows * n].view(rows, n), values(q, scales)[:rows] @ pack.w[0].T)
        assert error < BOUND, f"[{rows}, {k}] [{n}]: off by {error}"
        assert out[padded * n :].isnan().all(), f"[{rows}, {k}] [{n}]: wrote behind the output"


@check
def fp8_linear_refuses_what_it_does_not_read(lib):
    nothing = (None, None)
    assert lib.refused("moe_fp8_linear", *nothing, Pack(1, 128, 192, FP8_CHANNEL), None, None, F32, 4, 0)
    assert lib.refused("moe_fp8_linear", *nothing, Pack(1, 128, 128, INT8_128), None, None, F32, 4, 0)
    assert lib.refused("moe_fp8_linear", *nothing, Pack(1, 128, 128, FP8_BLOCK, gate_up=True), None, None, F32, 4, 0)
    assert lib.refused("moe_fp8_linear", *nothing, Pack(2, 128, 128, FP8_BLOCK), None, None, F32, 4, 0)
    assert lib.raw("moe_fp8_linear", *nothing, Pack(1, 128, 128, FP8_BLOCK), None, None, F32, 0, 0, None) == 0, "no rows is no error"
    for pack in (Pack(1, 96, 128, FP8_BLOCK), Pack(1, 128, 192, FP8_TENSOR), Pack(1, 128, 128, FP8_CHANNEL), Pack(2, 128, 128, FP8_BLOCK), Pack(1, 128, 128, INT8_128)):
        assert lib.raw("moe_fp8_rows", *pack_fields(pack), None, None, None) == 1
