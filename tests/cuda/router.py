"""Times the router kernel (gate product, scoring, top-k in one launch): python tests/cuda/router.py LIBRARY"""
import argparse
import ctypes

import torch

from library import UNCOPIED, UNWATCHED, Copies, Library, graph_us


def bench(lib):
    gates = [torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(512)]
    spread = torch.full((128, 17), -1, dtype=torch.int32)
    spread[:, 0], spread[:16, 1] = torch.arange(128), torch.arange(128, 144)
    tables = dict(none=UNCOPIED, sole=Copies(spread[:, :1].contiguous().cuda()), shared=Copies(spread.cuda(), hashed=True))
    ids_of_copies = lambda t, ids, out: lib.launch("moe_any_physical_ids", ids, t.log2phy, ctypes.c_int64(ids.numel()), 8, 128, t.width, ctypes.c_uint32(0), t.hashed, out)
    print(f"{'router, T':<12}" + "".join(f" {name:>8}" for name in tables) + f" {'2 launches':>10} us")
    for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 8192, 32768):
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        logits = torch.empty(tokens, 128, device="cuda")
        ids, weights = torch.empty(tokens, 8, device="cuda", dtype=torch.int32), torch.empty(tokens, 8, device="cuda")
        physical = torch.empty_like(ids)

        def call(g, copies=UNCOPIED, then=None):
            lib.launch("moe_gate_route", x, g, None, None, None, logits, ids, weights, tokens, 2048, 128, 8, 0, 0, 1, 1.0, 0.0, None, None, None, 0, 0, 1.0, 0, 0, UNWATCHED, copies)
            if then is not None:
                ids_of_copies(then, ids, physical)

        times = [graph_us([lambda g=g: call(g, copies) for g in gates]) for copies in tables.values()]
        times.append(graph_us([lambda g=g: call(g, then=tables["shared"]) for g in gates]))
        print(f"{tokens:<12}" + "".join(f" {us:>8.2f}" for us in times))


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("so", help="the kernels, libmoe_kernels.so")
    bench(Library(ap.parse_args().so))


if __name__ == "__main__":
    main()
