#!/usr/bin/env bash
# How fast a checkpoint loads, from the bundle that `cargo xtask dist` packs: writes files like Qwen3-30B-A3B's of 6 layers
# (8.7 GB) and of 20 (26 GB), measures the page cache and the bus alone, then the load and its parts. $LOAD_LAYERS: other
# numbers of layers; $LOAD_DIR: where to write, by default in memory where that has room, else the temporary directory.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# NCCL, where it came by pip.
nccl=$(python3 -c 'import nvidia.nccl; print(*nvidia.nccl.__path__)' 2>/dev/null) &&
  export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
has_room() { [ "$(df --output=avail -B1000000000 "$1" 2>/dev/null | tail -n 1)" -ge "$2" ] 2>/dev/null; }
failed=0
for layers in ${LOAD_LAYERS:-6 20}; do
  dir=${LOAD_DIR:-}
  for place in /dev/shm "${TMPDIR:-/tmp}"; do
    [ -z "$dir" ] && has_room "$place" $((layers * 5 / 4 + 3)) && dir=$place
  done
  if [ -z "$dir" ]; then
    echo "no room for files of $layers layers: set LOAD_DIR"
    failed=1
    continue
  fi
  echo "in $dir:"
  LOAD_DIR=$dir LOAD_LAYERS=$layers timeout 120 "$root/bin/gpu" --ignored --exact --nocapture \
    load_bench::a_load_runs_at_the_speed_of_disk_and_bus || failed=1
done
exit $failed
