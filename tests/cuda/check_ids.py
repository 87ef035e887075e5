"""Checks of logical ids that become physical ones, against the definition in Python: python tests/cuda/check_ids.py"""

import ctypes
import os

import torch
from library import NO_EXPERT, Library, copy_of_row, ids_tensor, sized

LIB = Library(os.environ.get("MOE_KERNELS_SO", "target/kernels/libmoe_kernels.so"))
WORD = 0xFFFFFFFF
GUARD = 4096  # elements behind the output that must not change


def physical_ids():
    cases = sized([(0, 1, 3, 1), (1, 1, 1, 4), (40, 4, 6, 2), (1100, 8, 128, 17), (33, 8, 512, 3), (5000, 8, 256, 9)],
                  [(0, 1, 3, 1), (40, 4, 6, 2)])
    for tokens, top_k, experts, width in cases:
        counts = torch.randint(1, width + 1, (experts,)).tolist()
        table = torch.full((experts, width), -1, dtype=torch.int32)
        for expert, count in enumerate(counts):
            table[expert, :count] = torch.randperm(experts * width)[:count].int()
        ids = torch.randint(0, experts, (tokens * top_k,)).tolist()
        # No expert, and ids that there are not.
        ids = [(NO_EXPERT, experts, WORD - 1)[i % 3] if i % 7 == 3 else id for i, id in enumerate(ids)]
        for hashed, first in ((0, 0), (1, 0), (1, 12345), (0, WORD - 2)):
            out = torch.full((tokens * top_k + GUARD,), 0x5A5A5A5A, dtype=torch.int32, device="cuda")
            LIB.launch("moe_any_physical_ids", ids_tensor(ids), table.cuda(), ctypes.c_int64(tokens * top_k), top_k, experts, width,
                       ctypes.c_uint32(first), hashed, out)
            got = [x & WORD for x in out.tolist()]
            rows = [first + i // top_k & WORD for i in range(len(ids))]
            want = [
                int(table[id, copy_of_row(row, id, counts[id], hashed)]) if id < experts else NO_EXPERT
                for id, row in zip(ids, rows)
            ]
            assert got[: len(ids)] == want, (tokens, top_k, experts, width, hashed, first)
            assert all(x == 0x5A5A5A5A for x in got[len(ids):]), "wrote behind the output"


CHECKS = [physical_ids]

if __name__ == "__main__":
    for check in CHECKS:
        check()
        torch.cuda.synchronize()
        print(f"ok    {check.__name__}")
