"""Checks of the sum of hashed words in a checksum, against the definition in Python, and its rate: python tests/cuda/check_checksum.py"""

import ctypes
import os

import torch
from library import Library, graph_us, sized

LIB = Library(os.environ.get("MOE_KERNELS_SO", "target/kernels/libmoe_kernels.so"))
WORD = (1 << 64) - 1
PLACE, FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def hashed(index, word):
    x = word ^ (index + 1) * PLACE & WORD
    x = (x ^ x >> 32) * FACTOR & WORD
    return x ^ x >> 29


def word_sum(data):
    words = (int.from_bytes(data[at:at + 8], "little") for at in range(0, len(data), 8))
    return sum(hashed(i, word) for i, word in enumerate(words)) & WORD


def device_sum(data, length):
    """The sum of the first bytes of a tensor. Something else was where it goes, and what is behind stays."""
    out = torch.tensor([-3, 12345], dtype=torch.int64, device="cuda")
    LIB.launch("moe_any_word_sum", data, ctypes.c_int64(length), out)
    got, behind = out.tolist()
    assert behind == 12345, "wrote behind the sum"
    return got & WORD


def sums():
    for length in sized([0, 1, 7, 8, 9, 15, 16, 17, 31, 4096, 65_537, 600_011], [0, 1, 9, 17, 4096]):
        data = torch.randint(0, 256, (length + 64,), dtype=torch.uint8, device="cuda")
        want = word_sum(bytes(data[:length].tolist()))
        for _ in range(2):
            assert device_sum(data, length) == want, length
        if length > 0:
            data[length // 2] ^= 1
            assert device_sum(data, length) != want, length
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    assert LIB.refused("moe_any_word_sum", data[8:], ctypes.c_int64(8), out)
    assert LIB.refused("moe_any_word_sum", data, ctypes.c_int64(-1), out)


CHECKS = [sums]


def rate():
    """Experts of Qwen3-30B-A3B in bf16, one after the other, so that none is in the L2 cache."""
    length, count = 3 * 2048 * 768 * 2, 64
    data = torch.randint(0, 256, (count, length), dtype=torch.uint8, device="cuda")
    out = torch.zeros(count, dtype=torch.int64, device="cuda")
    call = lambda i: LIB.launch("moe_any_word_sum", data[i], ctypes.c_int64(length), out[i:])
    us = graph_us([lambda i=i: call(i) for i in range(count)])
    print(f"word_sum of {length} bytes: {us:.2f} us, {length / us / 1e3:.0f} GB/s (predicted 6 us)")


if __name__ == "__main__":
    for check in CHECKS:
        check()
        torch.cuda.synchronize()
        print(f"ok    {check.__name__}")
    rate()
