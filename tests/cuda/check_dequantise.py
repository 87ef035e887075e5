"""Checks moe_quant_dequantise against the definition of a pack and against moe_any_dequantise, bit by bit; run by quant_tensor.py."""
import torch

from library import BF16, poison, sized
from quant_pack import FP8, FP8_BLOCK, INT4, INT4_128, SCHEMES, Pack, pack_fields

CHECKS = []
GUARD = 4096


def check(function):
    CHECKS.append(function)
    return function


def rows_of(pack):
    """scale * (q - zero) in f32, rounded once to bf16."""
    codes = pack.codes
    q = codes.view(torch.float8_e4m3fn).float() if pack.format == FP8 else codes.float()
    if pack.format != FP8:
        middle = 8 if pack.format == INT4 else 128
        q = q - (middle if pack.zero is None else pack.zero.float().repeat_interleave(pack.group, -1)[..., : pack.k])
    return (q * pack.scale.float().repeat_interleave(pack.group, -1)[..., : pack.k]).to(torch.bfloat16)


def bits(tensor):
    return tensor.view(torch.int16)


def expect_same(name, lib, pack):
    size = pack.experts * pack.n * pack.k
    fast, other = poison(size + GUARD, dtype=torch.bfloat16), poison(size, dtype=torch.bfloat16)
    lib.launch("moe_quant_dequantise", *pack_fields(pack), fast)
    lib.launch("moe_any_dequantise", *pack_fields(pack), other, BF16)
    assert torch.equal(bits(fast[:size]), bits(rows_of(pack).flatten())), f"{name}: not what the pack means"
    assert torch.equal(bits(fast[:size]), bits(other)), f"{name}: not the bits of moe_any_dequantise"
    assert fast[size:].isnan().all(), f"{name}: wrote behind the output"


@check
def dequantise_has_the_defined_bits(lib):
    """Every scheme, with gate and up in tiles and without, K from one unit of 64 columns to several blocks' share."""
    shapes = sized([(1, 16, 64), (1, 128, 128), (3, 96, 320), (5, 64, 1088), (2, 1536, 2048), (1, 5120, 2048), (4, 2048, 768)], [(1, 16, 64), (3, 96, 320)])
    for experts, n, k in shapes:
        for scheme in SCHEMES:
            if scheme.format == FP8 and n % 32:
                continue  # two scales of a tile are one copy of 16 bytes
            for gate_up in (False, True):
                expect_same(f"{scheme.name} {experts} x [{n}, {k}] gate_up={gate_up}", lib, Pack(experts, n, k, scheme, gate_up))


@check
def dequantise_of_every_code(lib):
    """All 256 bytes of FP8, its NaNs as 480, and all integers with all zero points."""
    for scheme in SCHEMES:
        codes = torch.arange(16 if scheme.format == INT4 else 256, dtype=torch.uint8, device="cuda").repeat(4096 // (16 if scheme.format == INT4 else 256))
        q = codes.repeat(32, 1)[None]
        pack = Pack(1, 32, 4096, scheme, q=q.contiguous())
        if scheme.format == FP8:
            size = 32 * 4096
            got, want = poison(size, dtype=torch.bfloat16), poison(size, dtype=torch.bfloat16)
            lib.launch("moe_quant_dequantise", *pack_fields(pack), got)
            lib.launch("moe_any_dequantise", *pack_fields(pack), want, BF16)
            assert torch.equal(bits(got), bits(want)), scheme.name
        else:
            expect_same(scheme.name, lib, pack)


@check
def dequantise_refuses_other_packs(lib):
    def refused(scheme, **change):
        pack = Pack(1, 32, 128, scheme)
        for name, value in change.items():
            setattr(pack, name, value)
        return lib.raw("moe_quant_dequantise", *pack_fields(pack), None, None) == 1
    for change in (dict(group=48, groups=3), dict(scale_dtype=0), dict(format=3), dict(k=96, k_packed=96), dict(k_packed=192), dict(n_tiles=1), dict(experts=0)):
        assert refused(INT4_128, **change), change
    for change in (dict(scale_dtype=BF16), dict(group=32, groups=4)):
        assert refused(FP8_BLOCK, **change), change
    assert refused(INT4_128, perm=torch.zeros(128, dtype=torch.int32, device="cuda"))
