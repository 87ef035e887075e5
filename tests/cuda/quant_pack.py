"""Random quantised matrices in the device's order (cuda/quant/args.cuh), with their weights in float64."""

import dataclasses

import torch

from library import STRUCTS

INT4, INT8, FP8 = range(3)  # QuantFormat of cuda/codes.cuh
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

    def streams_digits(self):
        """Whether streaming launches of the fewest rows multiply such weights by fixed-point rows (kTakesDigits in cuda/quant)."""
        return self.format != FP8 and (self.group == 0 or self.group >= 128)

    def bytes(self, n, k):
        """Of a matrix [n, k] as it lies on the device."""
        groups = -(-k // self.group) if self.group else 1
        scales = n * 4 if self.format == FP8 and self.rows == 1 else n // 8 * 4 if self.format == FP8 else n * 2
        return n * k // (2 if self.format == INT4 else 1) + groups * (scales + (n if self.zeros else 0))


INT4_128 = Scheme("int4 g128", INT4, 128)
INT4_32Z = Scheme("int4 g32 zeros", INT4, 32, zeros=True, scale=BF16)
INT8_128 = Scheme("int8 g128", INT8, 128)
INT8_Z = Scheme("int8 channel zeros", INT8, 0, zeros=True)
FP8_BLOCK = Scheme("fp8 block", FP8, 128, scale=F32, rows=128)
FP8_CHANNEL = Scheme("fp8 channel", FP8, 0, scale=F32)
FP8_TENSOR = Scheme("fp8 tensor", FP8, 0, scale=F32, rows=0)
INT4_CHANNEL = Scheme("int4 channel", INT4, 0, scale=BF16)
SCHEMES = [INT4_128, INT4_32Z, INT4_CHANNEL, INT8_128, INT8_Z, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR]


def tile_rows(rows, gate_up):
    """[E, N, C] as [E, tiles, 16, C]: rows of tiles, gate and up rows 8 and 8."""
    experts, n, columns = rows.shape
    if gate_up:
        return rows.view(experts, 2, n // 16, 8, columns).transpose(1, 2).reshape(experts, n // 16, TILE_ROWS, columns)
    missing = -n % TILE_ROWS
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).view(experts, -1, TILE_ROWS, columns)


def fragment_order(q, bits, gate_up):
    """Bytes [E, N, K] of one weight each as tiles of 512 bytes."""
    tiles = tile_rows(q, gate_up)
    experts, count, _, k = tiles.shape
    steps = 4 if bits == 4 else 2
    # rows 8 h + g, columns 16 s + 8 v + 2 c + e of a tile
    parts = tiles.view(experts, count, 2, 8, k // (16 * steps), steps, 2, 4, 2)
    if bits == 8:
        order = parts.permute(0, 1, 4, 3, 7, 5, 6, 8, 2)  # e h: bytes of the words v
        return order.contiguous().view(-1)
    order = parts.permute(0, 1, 4, 3, 7, 5, 8, 6, 2).contiguous().view(-1, 4, 2)  # e v h: nibbles from the lowest
    return (order[..., 0] | order[..., 1] << 4).to(torch.uint8).view(-1)


class Pack:
    """Random matrices [E, N, K]; the fields of QuantPack, and `w[e]`, matrix e in float64."""

    def __init__(self, experts, n, k, scheme, gate_up=False, q=None):
        self.experts, self.n, self.k, self.k_packed, self.gate_up = experts, n, k, k, int(gate_up)
        self.format, self.scale_dtype, self.perm = scheme.format, scheme.scale, None
        self.group = scheme.group or k
        self.groups = -(-k // self.group)
        if q is not None:
            self.codes = q
        elif scheme.format == FP8:
            self.codes = torch.randn(experts, n, k, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            self.codes = torch.randint(0, 16 if scheme.format == INT4 else 256, (experts, n, k), dtype=torch.uint8, device="cuda")
        unit = {INT4: 1 / 4.6, INT8: 1 / 74, FP8: 1.0}[scheme.format] * k**-0.5
        blocks = n if scheme.rows == 1 else -(-n // scheme.rows) if scheme.rows else 1
        scale = (torch.rand(experts, blocks, self.groups, device="cuda") + 0.5) * unit
        scale = scale.to((torch.float32, torch.bfloat16, torch.float16)[scheme.scale])
        self.scale = scale.repeat_interleave(scheme.rows or n, 1)[:, :n]
        top = 16 if scheme.format == INT4 else 256
        self.zero = torch.randint(0, top, (experts, n, self.groups), dtype=torch.uint8, device="cuda") if scheme.zeros else None
        bits = 4 if scheme.format == INT4 else 8
        self.q = fragment_order(self.codes, bits, gate_up)
        self.n_tiles = self.q.numel() // (experts * TILE_ROWS * k * bits // 8)
        tiled = tile_rows(self.scale, gate_up).transpose(2, 3)
        self.scale_rows = 2 if scheme.format == FP8 and scheme.rows != 1 else 16
        self.scales = tiled[..., ::8].contiguous() if self.scale_rows == 2 else tiled.contiguous()
        self.zeros = tile_rows(self.zero, gate_up).transpose(2, 3).contiguous() if scheme.zeros else None
        self.w = Dequantised(self)


def fixed_point(rows):
    """Rows of bf16 as the 16-bit integers with a unit for 128 columns that integer products take (cuda/quant/digits.cuh), in float64."""
    blocks = torch.nn.functional.pad(rows.double(), (0, -rows.shape[-1] % 128)).unflatten(-1, (-1, 128))
    largest = blocks.abs().amax(-1, keepdim=True).to(torch.bfloat16).view(torch.int16).int()
    unit = torch.exp2(((largest + 1 >> 7).clamp(min=15) - (127 + 14)).double())
    return ((blocks / unit).round() * unit).flatten(-2)[..., : rows.shape[-1]]


class RawPack:
    """As Pack, of random bytes: to time kernels with."""

    def __init__(self, experts, n, k, scheme, gate_up=False):
        self.experts, self.n, self.k, self.k_packed, self.gate_up = experts, n, k, k, int(gate_up)
        self.format, self.scale_dtype, self.perm = scheme.format, scheme.scale, None
        self.group, self.n_tiles = scheme.group or k, n // TILE_ROWS
        self.groups = -(-k // self.group)
        size = experts * n * k // (2 if scheme.format == INT4 else 1)
        self.q = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        self.scale_rows = 2 if scheme.format == FP8 and scheme.rows != 1 else 16
        sides = experts, self.n_tiles, self.groups
        scale = (torch.rand(*sides, self.scale_rows, device="cuda") + 0.5) * k**-0.5 / (100 if scheme.format == INT8 else 5)
        if scheme.rows == 128 and self.n_tiles % 8 == 0:  # blocks, which kernels may tell from scales of their own
            scale = scale[:, ::8].repeat_interleave(8, 1).contiguous()
        self.scales = scale.to((torch.float32, torch.bfloat16, torch.float16)[scheme.scale])
        self.zeros = torch.randint(0, 16, (*sides, 16), dtype=torch.uint8, device="cuda") if scheme.zeros else None


def pack_fields(pack):
    """The values of QuantPack in order, for launchers that take nothing else in a struct."""
    return [getattr(pack, name) for name, _ in STRUCTS["moe_quant_dequantise"]._fields_]


class Dequantised:
    """Matrices of a pack in float64, by their number."""

    def __init__(self, pack):
        self.pack = pack

    def __getitem__(self, e):
        p = self.pack
        codes = p.codes[e]
        q = codes.view(torch.float8_e4m3fn).double() if p.format == FP8 else codes.double()
        if p.format != FP8:
            zero = p.zero[e].double() if p.zero is not None else torch.full_like(p.scale[e], 8 if p.format == INT4 else 128).double()
            q = q - zero.repeat_interleave(p.group, -1)[:, : p.k]
        return q * p.scale[e].double().repeat_interleave(p.group, -1)[:, : p.k]
