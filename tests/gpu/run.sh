#!/usr/bin/env bash
# Runs every check of a GPU machine, from the bundle of `cargo xtask dist`: the ops against the CPU, the engine, unit
# tests of CUDA code, parity on the fixtures and with a mid-size model, and a card whose memory the cache fills; then
# the decode table, the speed of a load and the timeline of steps. $OUT (default: results) gets bench.json,
# timeline.json, timeline.svg and all logs as run.tar.gz.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
out=${OUT:-$root/results}
logs=$(mktemp -d)
mkdir -p "$out"
failed=0
check() {
  local name=$1
  shift
  if "$@" >"$logs/$name.log" 2>&1; then echo "ok      $name: $(tail -n 1 "$logs/$name.log" | cut -c1-150)"; else
    failed=1
    echo "FAILED  $name"
    grep -E "panicked|FAILED|error" -A 6 "$logs/$name.log" | tail -n 40 | cut -c1-300
  fi
}
# Runs unit tests of code that is only compiled with the feature `cuda`: units PROGRAM PART-OF-THEIR-NAMES
units() {
  [ "$("$root/bin/$1" --list "$2" | grep -c ': test$')" -gt 0 ] || { echo "error: $1 has no tests named $2" && return 1; }
  timeout 60 "$root/bin/$1" "$2"
}
program="$root/bin/moe"
check ops timeout 560 "$root/bin/gpu" --skip nccl:: --test-threads 1
check units-engine units moe_engine engine::slots::
check units-kernels units moe_kernels cuda::
check peers timeout 90 env MOE_KERNELS_SO="$root/lib/libmoe_kernels.so" python3 "$root/tests/cuda/peers.py"
check parity timeout 360 "$root/tests/gpu/parity.sh" "$program"
check midsize timeout 120 python3 "$root/tests/gpu/midsize.py" "$program"
check full-card timeout 120 python3 "$root/tests/gpu/full_card.py" "$program"
for model in deepseek-v2-lite deepseek-v2; do
  check "midsize-$model" timeout 120 python3 "$root/tests/gpu/midsize.py" "$program" --model "$model" \
    --prompts 1,1023,4097
done
check midsize-families timeout 200 python3 "$root/tests/gpu/midsize.py" "$program" --model deepseek-v3,glm-4.5-air,gpt-oss \
  --prompts 1,17,1023,4097 --jobs 3
check bench timeout 200 "$program" bench --config "$root/tests/bench/configs/qwen3-30b-a3b.json" --dummy-weights \
  --dtype bf16 --device cuda --batches 1,8,32,64,128,256 --lengths 2048,8192 --long-context 8192 --json "$out/bench.json"
check load "$root/tests/gpu/load.sh"
check timeline env OUT="$out" "$root/tests/gpu/timeline.sh"
grep -E "^(decode|prefill)" "$logs/bench.log"
grep -hE "^(page cache|load|us a step|B=)" "$logs/load.log" "$logs/timeline.log"
tar czf "$out/run.tar.gz" -C "$logs" .
rm -rf "$logs"
exit $failed
