"""Times kernels and layers on a GPU: python tests/cuda/decode.py bench [NAME ..]

MOE_KERNELS_SO names the library. Fresh random inputs on each run, but times of layers with the same BENCH_SEED have the
same weights, rows and so routing, whatever the library; BENCH_BATCHES="8 64": these numbers of rows only. JSON goes to
$OUT/decode.json if OUT is set.
"""

import json
import os
import sys
import traceback

import torch


def bench(names):
    import bench_decode
    import bench_deepseek
    import bench_kernels
    import bench_latent
    import bench_layer
    import bench_mixed
    import bench_offload
    import bench_prefill
    import bench_quant
    import bench_rows

    rows = []
    print(f"{torch.cuda.get_device_name(0)}, seed {bench_decode.SEED}", flush=True)
    for run in bench_decode.BENCHES + bench_layer.BENCHES + bench_kernels.BENCHES + bench_prefill.BENCHES + bench_rows.BENCHES + bench_latent.BENCHES + bench_deepseek.BENCHES + bench_quant.BENCHES + bench_mixed.BENCHES + bench_offload.BENCHES:
        if not names or run.__name__ in names:
            try:
                run(rows)
            except Exception:
                traceback.print_exc()
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "decode.json"), "w") as f:
            json.dump({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] != ["bench"]:
        sys.exit("usage: decode.py bench [NAME ..]")
    bench(sys.argv[2:])
