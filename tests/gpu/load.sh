#!/usr/bin/env bash
# Measures how fast a checkpoint loads, from the bundle of `cargo xtask dist`. It writes files like Qwen3-30B-A3B's with
# 6 layers (8.7 GB) and with 20 layers (26 GB) to memory, measures the page cache and the bus alone, then the load and
# its parts. Then it writes 6 layers to the disk of the temporary directory, and reads and loads them after the page
# cache has dropped them. $LOAD_LAYERS sets other numbers of layers; $LOAD_DIR is the folder to write to (default:
# memory if there is room, else the temporary directory). In between, a quantised checkpoint is packed by the device and
# by the host: the one in $LOAD_MODEL, by default a GPTQ checkpoint of Qwen3-30B-A3B's shape in memory.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
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
quantised=${LOAD_MODEL:-}
if [ -z "$quantised" ] && has_room /dev/shm 20; then
  quantised=/dev/shm/load-quantised
  python3 "$root/tests/gpu/load_quantised.py" "$root/tests/bench/configs/qwen3-30b-a3b-gptq-int4.json" "$quantised" || failed=1
fi
if [ -n "$quantised" ]; then
  LOAD_MODEL=$quantised timeout 120 "$root/bin/gpu" --ignored --exact --nocapture \
    load_quantised::a_quantised_load_runs_at_the_speed_of_the_bus || failed=1
  [ -n "${LOAD_MODEL:-}" ] || rm -rf "$quantised"
fi
echo "cold, in ${TMPDIR:-/tmp}:"
LOAD_COLD=1 LOAD_DIR=${TMPDIR:-/tmp} LOAD_LAYERS=${COLD_LAYERS:-6} timeout 150 "$root/bin/gpu" --ignored --exact --nocapture \
  load_bench::a_load_runs_at_the_speed_of_disk_and_bus || failed=1
exit $failed
