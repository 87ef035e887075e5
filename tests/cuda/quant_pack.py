"""Quantised matrices of random bytes in the device's order (cuda/quant/args.cuh), to time kernels with."""

import dataclasses

import torch

from library import STRUCTS

INT4, INT8, FP8, FP4, NVFP4 = range(5)  # QuantFormat of cuda/codes.cuh
FOUR_BITS = INT4, FP4, NVFP4
F32, BF16, F16 = range(3)  # Dtype
TILE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How matrices are quantised. `group`: columns that share a scale, 0: all; `rows`: rows that do (FP8), 0: all."""

    name: str
    format: int
    group: int
    zeros: bool = False
    scale: int = F16
    rows: int = 1

    def bytes(self, n, k):
        """The pack of a matrix [n, k] in the layout that the device uses."""
        groups = -(-k // self.group) if self.group else 1
        if self.format in (FP4, NVFP4):
            return n * k // 2 + n * (4 + groups)
        scales = n * 4 if self.format == FP8 and self.rows == 1 else n // 8 * 4 if self.format == FP8 else n * 2
        return n * k // (2 if self.format in FOUR_BITS else 1) + groups * (scales + (n if self.zeros else 0))


INT4_128 = Scheme("int4 g128", INT4, 128)
INT4_32Z = Scheme("int4 g32 zeros", INT4, 32, zeros=True, scale=BF16)
INT8_128 = Scheme("int8 g128", INT8, 128)
FP8_BLOCK = Scheme("fp8 block", FP8, 128, scale=F32, rows=128)
MXFP4 = Scheme("mxfp4", FP4, 32, scale=F32)
NVFP4_16 = Scheme("nvfp4", NVFP4, 16, scale=F32)


class RawPack:
    """Random matrices [E, N, K]; the fields of QuantPack."""

    def __init__(self, experts, n, k, scheme, gate_up=False):
        self.experts, self.n, self.k, self.k_packed, self.gate_up = experts, n, k, k, int(gate_up)
        self.format, self.scale_dtype, self.perm = scheme.format, scheme.scale, None
        self.group, self.n_tiles = scheme.group or k, n // TILE_ROWS
        self.groups = -(-k // self.group)
        size = experts * n * k // (2 if scheme.format in FOUR_BITS else 1)
        self.q = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        self.scale_rows = 2 if scheme.format == FP8 and scheme.rows != 1 else 16
        sides = experts, self.n_tiles, self.groups
        self.zeros = None
        if scheme.format in (FP4, NVFP4):  # 16 factors of rows, then bytes of groups (cuda/quant/fp4.cuh)
            factors = torch.rand(*sides[:2], 16, device="cuda") * k**-0.5 / 5
            low, high = (248, 255) if scheme.format == FP4 else (80, 90)
            groups = torch.randint(low, high, (*sides[:2], self.groups * 16), dtype=torch.uint8, device="cuda")
            self.scales = torch.cat([factors.view(torch.uint8), groups], 2).contiguous()
            return
        scale = (torch.rand(*sides, self.scale_rows, device="cuda") + 0.5) * k**-0.5 / (100 if scheme.format == INT8 else 5)
        if scheme.rows == 128 and self.n_tiles % 8 == 0:  # blocks may have their own kernel path
            scale = scale[:, ::8].repeat_interleave(8, 1).contiguous()
        self.scales = scale.to((torch.float32, torch.bfloat16, torch.float16)[scheme.scale])
        self.zeros = torch.randint(0, 16, (*sides, 16), dtype=torch.uint8, device="cuda") if scheme.zeros else None


def pack_fields(pack):
    """The values of QuantPack in order, for launchers that take nothing else in a struct."""
    return [getattr(pack, name) for name, _ in STRUCTS["moe_quant_dequantise"]._fields_]
