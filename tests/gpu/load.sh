#!/usr/bin/env bash
# How fast a checkpoint loads, from the bundle that `cargo xtask dist` packs: writes 8.5 GB like Qwen3-30B-A3B's shards to
# $LOAD_DIR (default: the temporary directory), measures the page cache and the bus alone, then the load, in GB/s.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# NCCL, where it came by pip.
nccl=$(python3 -c 'import nvidia.nccl; print(*nvidia.nccl.__path__)' 2>/dev/null) &&
  export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
timeout 120 "$root/bin/gpu" --ignored --exact load_bench::a_load_runs_at_the_speed_of_disk_and_bus --nocapture
