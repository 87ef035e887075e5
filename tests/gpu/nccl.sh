#!/usr/bin/env bash
# Runs every check of a machine with several GPUs, from the bundle of `cargo xtask dist`: the collectives of NCCL
# against CPU ranks, groups, graphs, products, faults, sums and gathers over peer memory, experts that move or are in
# host memory, then the tables of latencies. Results go to $OUT (default: results).
set -uo pipefail
. "$(dirname "$0")/environment.sh"
out=${OUT:-$root/results}
mkdir -p "$out"
failed=0
check() {
  local name=$1 seconds=$2
  shift 2
  if timeout "$seconds" "$root/bin/gpu" "nccl::$name" --test-threads 1 --nocapture "$@" >"$out/nccl-$name.log" 2>&1; then
    echo "ok      $name: $(grep '^test result' "$out/nccl-$name.log" | cut -c1-100)"
  else
    echo "FAILED  $name (exit code $?)"
    failed=1
    grep -E "panicked|FAILED|error|NCCL" -A 4 "$out/nccl-$name.log" | tail -n 30 | cut -c1-300
  fi
}
check collectives 150
check graphs 60
check products 60
check faults 120
check peers 60
check peer_runs 60
check peer_gather 60
check peer_needs 60
check peer_share 90
check peer_combine 60
check peer_dispatch 60
check window 60
check moves 120
check killed 120
check rebalance 60
check offload 60
check chunks 60
check explained 90
check processes 60
check timing 90
grep -E "^(all_reduce|gather|sums|\||64 MiB)" "$out/nccl-timing.log"
exit $failed
