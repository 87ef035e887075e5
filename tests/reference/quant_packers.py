"""The quantised formats as their makers define them, in plain Python: codes, zero points and scales in, tensors out.

Written from the definitions (GPTQModel, AutoAWQ, compressed-tensors, ModelOpt, DeepSeek), independently of the crates
that read them. A matrix is a list of N rows of K integers; a tensor is (dtype, shape, bytes).
"""

import json
import struct

# Where AWQ's gemm packing puts outputs 0, 2, 4, 6, 1, 3, 5, 7 of each eight: nibble i holds the i-th of this list.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(rows):
    flat = [word for row in rows for word in row]
    return ("I32", [len(rows), len(rows[0])], struct.pack(f"<{len(flat)}I", *flat))


def int32(values):
    return ("I32", [len(values)], struct.pack(f"<{len(values)}i", *values))


def int64(values):
    return ("I64", [len(values)], struct.pack(f"<{len(values)}q", *values))


# The values of E2M1 codes without their sign bit.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bytes_of(tensor):
    return ("U8", list(tensor.shape), bytes(int(value) for value in tensor.flatten().tolist()))


def raw(rows):
    return ("F8_E4M3", [len(rows), len(rows[0])], bytes(code for row in rows for code in row))


def floats(rows, dtype="F16", shape=None):
    flat = [x for row in rows for x in row]
    if dtype == "BF16":
        data = b"".join(struct.pack("<f", x)[2:] for x in flat)
    else:
        data = struct.pack(f"<{len(flat)}{'e' if dtype == 'F16' else 'f'}", *flat)
    return (dtype, shape if shape is not None else [len(rows), len(rows[0])], data)


def transposed(rows):
    return [list(column) for column in zip(*rows)]


def along_rows(rows, bits):
    """Each row's integers in words, the first in the lowest bits; the last word is filled with zeros."""
    size = 32 // bits
    packed = []
    for row in rows:
        parts = [row[i : i + size] for i in range(0, len(row), size)]
        packed.append([sum(code << (bits * i) for i, code in enumerate(part)) for part in parts])
    return packed


def gptq(codes, zeros, scales, g_idx, bits, version, dtype="F16"):
    """zeros and scales are [N][groups]. Version 1 takes one from every integer of a word, borrows included."""
    ones = sum(1 << (bits * i) for i in range(32 // bits))
    qzeros = along_rows(transposed(zeros), bits)
    if version == 1:
        qzeros = [[(word - ones) % 2**32 for word in row] for row in qzeros]
    tensors = {
        "qweight": words(transposed(along_rows(codes, bits))),
        "qzeros": words(qzeros),
        "scales": floats(transposed(scales), dtype),
    }
    return tensors if g_idx is None else tensors | {"g_idx": int32(g_idx)}


def awq(codes, zeros, scales, dtype="F16"):
    def interleaved(rows):
        eights = [[row[i : i + 8] for i in range(0, len(row), 8)] for row in rows]
        return [[sum(eight[AWQ_ORDER[i]] << (4 * i) for i in range(8)) for eight in row] for row in eights]

    return {
        "qweight": words(interleaved(transposed(codes))),
        "qzeros": words(interleaved(transposed(zeros))),
        "scales": floats(transposed(scales), dtype),
    }


def pack_quantized(codes, zeros, scales, g_idx, bits, asymmetric, dtype="BF16"):
    """codes and zeros are unsigned; the format's own are signed, with 2^(bits - 1) added before packing."""
    tensors = {
        "weight_packed": words(along_rows(codes, bits)),
        "weight_scale": floats(scales, dtype),
        "weight_shape": int64([len(codes), len(codes[0])]),
    }
    if asymmetric:
        tensors["weight_zero_point"] = words(transposed(along_rows(transposed(zeros), bits)))
    return tensors if g_idx is None else tensors | {"weight_g_idx": int32(g_idx)}


def e2m1(code):
    """A 4-bit float: a sign and one of eight magnitudes."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def nibbles(rows):
    """Codes of 4 bits, two to a byte, the first in the lower half."""
    data = bytes(low + 16 * high for row in rows for low, high in zip(row[0::2], row[1::2]))
    return ("U8", [len(rows), len(rows[0]) // 2], data)


def nvfp4(codes, scales, factor, modelopt):
    """scales are E4M3 codes, [N][K / 16]; a weight is factor * scale * code. compressed-tensors stores 1 / factor."""
    if modelopt:
        names, stored = ("weight", "weight_scale_2"), floats([[factor]], "F32", [])
    else:
        names, stored = ("weight_packed", "weight_global_scale"), floats([[1 / factor]], "F32", [1])
    return {names[0]: nibbles(codes), "weight_scale": raw(scales), names[1]: stored}


def quark_mxfp4(codes, exponents):
    """exponents are E8M0 codes, [N][K / 32]."""
    data = bytes(code for row in exponents for code in row)
    return {"weight": nibbles(codes), "weight_scale": ("U8", [len(exponents), len(exponents[0])], data)}


def e4m3(code):
    """An 8-bit float: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 0:
        return sign * mantissa / 512.0
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def write(path, tensors, metadata):
    """A safetensors file."""
    header, data = {"__metadata__": metadata}, b""
    # Wider elements first, so that each tensor begins at a multiple of its element's size.
    width = {"I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    for name, (dtype, shape, content) in sorted(tensors.items(), key=lambda t: (-width[t[1][0]], t[0])):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
