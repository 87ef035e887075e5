"""Random blocks of every ggml type that moe-quant reads, with what the reference decoders of the package `gguf` make of
them.

    python tests/reference/make_gguf_fixtures.py

writes crates/moe-quant/tests/fixtures/ggml.safetensors: for each type a tensor NAME.weight [N, bytes of a row] and
NAME.dequantised [N, K].
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

ROWS = 5
COLUMNS = 512
OUT = Path(__file__).parents[2] / "crates/moe-quant/tests/fixtures/ggml.safetensors"

# Where a block keeps numbers in f16.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def blocks(name, rng):
    size, bytes_ = gguf.GGML_QUANT_SIZES[Type[name]]
    data = rng.integers(0, 256, (ROWS, COLUMNS // size, bytes_), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.normal(0, 0.02, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = halves.view(np.uint8).reshape(*data.shape[:2], 2)
    if name == "MXFP4":
        data[..., 0] = rng.integers(1, 200, data.shape[:2])
    return data.reshape(ROWS, -1)


def main():
    rng = np.random.default_rng(20)
    tensors = {}
    for name in HALVES:
        data = blocks(name, rng)
        tensors[f"{name}.weight"] = data
        tensors[f"{name}.dequantised"] = np.ascontiguousarray(gguf.dequantize(data, Type[name]).astype(np.float32))
    save_file(tensors, OUT)


if __name__ == "__main__":
    main()
