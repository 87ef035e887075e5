"""Writes crates/moe-quant/tests/fixtures/formats.safetensors: a small matrix in every quantised format and option.

Each case has its packed tensors, `CASE.dequantised` in f32, and in the metadata the header that a config.json would
have. Needs nothing but Python's standard library: `python3 tests/reference/make_quant_fixtures.py`.
"""

import json
import random
import struct
import sys
from pathlib import Path

import quant_packers as pack

OUT = Path(__file__).parents[2] / "crates/moe-quant/tests/fixtures/formats.safetensors"


def f16(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def bf16(x):
    return struct.unpack("<f", b"\0\0" + struct.pack("<f", x)[2:])[0]


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


ROUND = {"F16": f16, "BF16": bf16, "F32": f32}


class Integers:
    """A random matrix of integers with its scales, zero points and groups, and what it stands for."""

    def __init__(self, name, n, k, bits, group, asymmetric=False, act_order=False, dtype="F16"):
        rng = random.Random(name)
        size = k if group == -1 else group
        self.bits, self.group, self.asymmetric, self.act_order = bits, group, asymmetric, act_order
        self.g_idx = [column // size for column in range(k)]
        if act_order:
            rng.shuffle(self.g_idx)
        self.codes = [[rng.randrange(2**bits) for _ in range(k)] for _ in range(n)]
        groups = k // size
        # Zero points at both ends come often: they borrow from their neighbours in GPTQ's version 1.
        ends = [0, 0, 2**bits - 1]
        zero = lambda: rng.choice(ends + [rng.randrange(2**bits) for _ in range(3)])
        middle = 2 ** (bits - 1)
        self.zeros = [[zero() if asymmetric else middle for _ in range(groups)] for _ in range(n)]
        self.scales = [[ROUND[dtype](rng.uniform(-0.02, 0.1)) for _ in range(groups)] for _ in range(n)]
        self.dtype = dtype
        self.weights = [
            [self.scales[row][g] * (code - self.zeros[row][g]) for code, g in zip(codes, self.g_idx)]
            for row, codes in enumerate(self.codes)
        ]


def gptq(name, n, k, bits, group, version=1, **options):
    m = Integers(name, n, k, bits, group, **options)
    header = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": not m.asymmetric, "desc_act": m.act_order}
    header["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
    return header, pack.gptq(m.codes, m.zeros, m.scales, m.g_idx, bits, version, m.dtype), m.weights


def awq(name, n, k, group, **options):
    m = Integers(name, n, k, 4, group, **options)
    header = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": m.asymmetric, "version": "gemm"}
    return header, pack.awq(m.codes, m.zeros, m.scales, m.dtype), m.weights


def auto_round(name, n, k, bits, group, packing, **options):
    m = Integers(name, n, k, bits, group, **options)
    header = {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": not m.asymmetric}
    header |= {"data_type": "int", "packing_format": packing}
    if packing.endswith("awq"):
        return header, pack.awq(m.codes, m.zeros, m.scales, m.dtype), m.weights
    version = 1 if packing.endswith("gptq") else 2
    return header, pack.gptq(m.codes, m.zeros, m.scales, None, bits, version, m.dtype), m.weights


def compressed_header(form, weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    header = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return header | {"quantization_status": "compressed", "config_groups": {"group_0": group}}


def compressed(name, n, k, bits, group, actorder=None, **options):
    m = Integers(name, n, k, bits, group, act_order=actorder == "group", **options)
    weights = {"num_bits": bits, "type": "int", "symmetric": not m.asymmetric, "actorder": actorder, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    g_idx = m.g_idx if m.act_order else None
    tensors = pack.pack_quantized(m.codes, m.zeros, m.scales, g_idx, bits, m.asymmetric, m.dtype)
    return compressed_header("pack-quantized", weights), tensors, m.weights


def fp8(name, n, k, scales, block=None, dtype="F32", family="fp8"):
    """scales: block, channel or tensor."""
    rng = random.Random(name)
    codes = [[rng.choice([c for c in range(256) if c & 0x7F != 0x7F]) for _ in range(k)] for _ in range(n)]
    rows, columns = {"block": block, "channel": (1, k), "tensor": (n, k)}[scales]
    grid = [[ROUND[dtype](rng.uniform(0.001, 0.1)) for _ in range(-(-k // columns))] for _ in range(-(-n // rows))]
    values = [
        [grid[r // rows][c // columns] * pack.e4m3(code) for c, code in enumerate(row)] for r, row in enumerate(codes)
    ]
    suffix = "weight_scale_inv" if scales == "block" and family == "fp8" else "weight_scale"
    shape = [1] if scales == "tensor" else None
    tensors = {"weight": pack.raw(codes), suffix: pack.floats(grid, dtype, shape)}
    if family == "fp8":
        header = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        return header | ({"weight_block_size": list(block)} if block else {}), tensors, values
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scales, "dynamic": False}
    weights |= {"block_structure": list(block)} if block else {}
    return compressed_header(family, weights), tensors, values


def times(codes, scales):
    """E2M1 codes times the scales of their groups, in f32."""
    size = len(codes[0]) // len(scales[0])
    return [
        [scale[column // size] * pack.e2m1(code) for column, code in enumerate(row)]
        for row, scale in zip(codes, scales)
    ]


def nvfp4(name, n, k, modelopt):
    rng = random.Random(name)
    codes = [[rng.randrange(16) for _ in range(k)] for _ in range(n)]
    # Every code but NaN; a scale may be 0 where it was too small for its dtype.
    scales = [[rng.choice([0, rng.randrange(0x7F)]) for _ in range(k // 16)] for _ in range(n)]
    factor = f32(rng.uniform(1e-5, 1e-3))
    tensors = pack.nvfp4(codes, scales, factor, modelopt)
    if not modelopt:
        # The file holds the reciprocal, rounded, and readers invert it again.
        factor = f32(1 / f32(1 / factor))
    meant = [[f32(pack.e4m3(scale) * factor) for scale in row] for row in scales]
    if modelopt:
        header = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        return header | {"producer": {"name": "modelopt"}}, tensors, times(codes, meant)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return compressed_header("nvfp4-pack-quantized", weights | {"dynamic": False}), tensors, times(codes, meant)


def quark_mxfp4(name, n, k):
    rng = random.Random(name)
    codes = [[rng.randrange(16) for _ in range(k)] for _ in range(n)]
    exponents = [[rng.choice([0, rng.randrange(100, 140)]) for _ in range(k // 32)] for _ in range(n)]
    weights = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
    header = {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": weights}}
    header["export"] = {"pack_method": "reorder", "weight_format": "real_quantized"}
    meant = [[2.0 ** (exponent - 127) for exponent in row] for row in exponents]
    return header, pack.quark_mxfp4(codes, exponents), times(codes, meant)


def modelopt_fp8(name, n, k):
    rng = random.Random(name)
    codes = [[rng.choice([c for c in range(256) if c & 0x7F != 0x7F]) for _ in range(k)] for _ in range(n)]
    scale = f32(rng.uniform(0.001, 0.1))
    tensors = {"weight": pack.raw(codes), "weight_scale": pack.floats([[scale]], "F32", [])}
    values = [[scale * pack.e4m3(code) for code in row] for row in codes]
    return {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, tensors, values


def cases():
    made = {}

    def case(make, name, *args, **options):
        made[name] = make(name, *args, **options)

    case(gptq, "gptq_int4_g32", 16, 64, 4, 32)
    case(gptq, "gptq_int4_g128", 8, 256, 4, 128, dtype="BF16")
    case(gptq, "gptq_int4_channel", 8, 64, 4, -1)
    case(gptq, "gptq_int4_g16_f32", 8, 48, 4, 16, dtype="F32")
    case(gptq, "gptq_int4_asym", 24, 64, 4, 32, asymmetric=True)
    case(gptq, "gptq_int4_asym_v2", 24, 128, 4, 64, version=2, asymmetric=True)
    case(gptq, "gptq_int8_g32", 12, 64, 8, 32)
    case(gptq, "gptq_int8_channel_asym", 12, 64, 8, -1, asymmetric=True)
    case(gptq, "gptq_int8_asym_v2", 12, 64, 8, 32, version=2, asymmetric=True)
    case(gptq, "gptq_int4_act_order", 16, 128, 4, 32, act_order=True)
    case(gptq, "gptq_int4_act_order_g64_asym", 16, 256, 4, 64, version=2, asymmetric=True, act_order=True)
    case(gptq, "gptq_int8_act_order", 8, 96, 8, 16, act_order=True)
    case(awq, "awq_g32", 16, 64, 32, asymmetric=True)
    case(awq, "awq_g128", 8, 256, 128, asymmetric=True, dtype="BF16")
    case(awq, "awq_channel", 24, 40, -1, asymmetric=True)
    case(awq, "awq_symmetric", 8, 64, 64)
    case(compressed, "ct_int4_g32", 10, 64, 4, 32, dtype="BF16")
    case(compressed, "ct_int4_g128_asym", 12, 256, 4, 128, asymmetric=True, dtype="BF16")
    case(compressed, "ct_int4_channel_odd", 10, 61, 4, -1, asymmetric=True, dtype="F32")
    case(compressed, "ct_int8_channel", 9, 66, 8, -1, dtype="F16")
    case(compressed, "ct_int8_g32_asym", 7, 64, 8, 32, asymmetric=True, dtype="BF16")
    case(compressed, "ct_int4_actorder_group", 12, 128, 4, 32, actorder="group", dtype="BF16")
    case(compressed, "ct_int4_actorder_weight", 12, 64, 4, 32, actorder="weight", asymmetric=True, dtype="BF16")
    case(compressed, "ct_int4_actorder_static", 12, 64, 4, 32, actorder="static", dtype="BF16")
    case(fp8, "fp8_block", 40, 72, "block", block=(16, 32))
    case(fp8, "fp8_block_128", 130, 3, "block", block=(128, 128), dtype="BF16")
    case(fp8, "fp8_tensor", 8, 24, "tensor")
    case(fp8, "ct_fp8_tensor", 8, 24, "tensor", family="float-quantized")
    case(fp8, "ct_fp8_channel", 8, 24, "channel", family="float-quantized", dtype="BF16")
    case(fp8, "ct_fp8_channel_naive", 8, 24, "channel", family="naive-quantized", dtype="F16")
    case(fp8, "ct_fp8_block", 24, 40, "block", block=(16, 16), family="float-quantized", dtype="BF16")
    case(nvfp4, "modelopt_nvfp4", 9, 48, modelopt=True)
    case(nvfp4, "ct_nvfp4", 9, 80, modelopt=False)
    case(modelopt_fp8, "modelopt_fp8", 8, 24)
    case(quark_mxfp4, "quark_mxfp4", 7, 96)
    case(auto_round, "auto_round_gptq", 16, 64, 4, 32, "auto_round:auto_gptq")
    case(auto_round, "auto_round_gptq_int8_asym", 8, 64, 8, 32, "auto_round:auto_gptq", asymmetric=True)
    case(auto_round, "auto_round_awq", 16, 64, 4, 32, "auto_round:auto_awq", asymmetric=True)
    case(auto_round, "auto_round_plain", 16, 64, 4, 32, "auto_round", asymmetric=True)
    return made


def main():
    tensors, metadata = {}, {}
    for name, (header, packed, weights) in cases().items():
        metadata[name] = json.dumps(header)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in packed.items()}
        tensors[f"{name}.dequantised"] = pack.floats(weights, "F32")
    pack.write(OUT, tensors, metadata)
    print(f"{OUT}: {len(metadata)} cases, {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
