#!/usr/bin/env bash
# Profiles of decode steps of Qwen3-30B-A3B's shape, for B = 1 and 64: timeline.sh [CONFIG]. One line each; the profiles,
# to be opened in Perfetto, go to $OUT (default: results).
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
config=${1:-$root/tests/bench/configs/qwen3-30b-a3b.json}
out=${OUT:-$root/results}
mkdir -p "$out"
# NCCL, where it came by pip.
nccl=$(python3 -c 'import nvidia.nccl; print(*nvidia.nccl.__path__)' 2>/dev/null) &&
  export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0
for batch in 1 64; do
  profile="$out/timeline-$batch.json"
  timeout 60 "$root/bin/model-qwen3moe" bench --config "$config" --dummy-weights --dtype bf16 --device cuda \
    --batches "$batch" --lengths 128 --output 128 --repeat 1 --profile "$profile" --json "$out/timeline-bench-$batch.json" \
    >"$out/timeline-$batch.log" 2>&1 && python3 "$root/tests/gpu/timeline.py" "$profile" "$batch" && continue
  failed=1
  echo "FAILED  timeline of B=$batch"
  tail -n 5 "$out/timeline-$batch.log"
done
exit $failed
