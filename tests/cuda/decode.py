"""Checks, then times, the decode kernels on a GPU: python tests/cuda/decode.py [check|bench] [NAME ..]

MOE_KERNELS_SO names the library. Fresh random inputs on each run, but times of layers with the same BENCH_SEED have the same weights,
rows and so routing, whatever the library; BENCH_BATCHES="8 64": these numbers of rows only. JSON goes to $OUT/decode.json if OUT is set.
TINY=1: few and small shapes, for compute-sanitizer.
"""

import json
import os
import sys
import time
import traceback

import torch


def check(names):
    import bench_latent
    import check_attention
    import check_fp8_rows
    import check_ids
    import check_layer
    import check_mixed
    import check_offload
    import check_quant
    import check_rows
    import check_sampling

    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    failed = []
    for checks in (check_rows.CHECKS, check_ids.CHECKS, check_offload.CHECKS, check_attention.CHECKS, check_fp8_rows.CHECKS, check_sampling.CHECKS, check_layer.CHECKS, check_mixed.CHECKS, check_quant.CHECKS, [bench_latent.check_latent]):
        for run in checks:
            if names and run.__name__ not in names:
                continue
            began = time.time()
            try:
                run()
                torch.cuda.synchronize()
                print(f"ok    {run.__name__} ({time.time() - began:.1f} s)", flush=True)
            except Exception as e:
                failed.append(run.__name__)
                last = traceback.extract_tb(e.__traceback__)[-1]
                print(f"FAIL  {run.__name__} (seed {seed}): {type(e).__name__} {e} [{last.name}:{last.lineno} {last.line}]", flush=True)
    return failed


def bench(names):
    import bench_decode
    import bench_deepseek
    import bench_kernels
    import bench_latent
    import bench_layer
    import bench_mixed
    import bench_prefill
    import bench_quant
    import bench_rows

    rows = []
    print(f"{torch.cuda.get_device_name(0)}, seed {bench_decode.SEED}", flush=True)
    for run in bench_decode.BENCHES + bench_layer.BENCHES + bench_kernels.BENCHES + bench_prefill.BENCHES + bench_rows.BENCHES + bench_latent.BENCHES + bench_deepseek.BENCHES + bench_quant.BENCHES + bench_mixed.BENCHES:
        if not names or run.__name__ in names:
            try:
                run(rows)
            except Exception:
                traceback.print_exc()
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "decode.json"), "w") as f:
            json.dump({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    command, names = (sys.argv[1:] or ["all"])[0], sys.argv[2:]
    failed = check(names) if command in ("all", "check") else []
    if command in ("all", "bench"):
        bench(names)
    sys.exit(1 if failed else 0)
