#!/usr/bin/env bash
# Tests and measures experts in host memory. It uses the bundle that `cargo xtask dist` packs: offload.sh [PART...]
#   check   the tests of offloading, and the texts of 24 prompts (needs torch and transformers)
#   bf16    Qwen3-30B-A3B with half of its experts in host memory (27 GiB) and half on the device, and with all on the
#           device. It runs 1 and 8 sequences with uniform and with skewed routing (Zipf 1). Then it runs with a limit
#           of 44 GB of device memory, in which the model does not fit without offloading.
#   int4    the same model quantised, with half of its experts in host memory (7 GiB)
#   ranks   bf16 with the experts split over 2 GPUs and half of each part in host memory (13.5 GiB per rank)
#   large   Qwen3-235B-A22B in FP8 (236 GB) on one GPU of 141 GB, with 96 GiB of its experts in host memory
# The default is check, bf16 and int4. It takes less than four minutes on one GPU with 64 GiB of host memory. All parts
# except check need numpy. MOE_PROGRAM and GPU_TESTS name the binaries. Logs and JSON go to $OUT (default: results). The
# table is printed last.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
. "$(dirname "$0")/check.sh"
out=${OUT:-$root/results}/offload
mkdir -p "$out"
program=${MOE_PROGRAM:-$root/bin/moe}
configs=$root/tests/bench/configs
failed=0

# recordings LAYERS: rows of uniform and of skewed routing, and the requests that replay them.
recordings() {
  local recording alpha
  while read -r recording alpha; do
    python3 "$root/tests/bench/skewed_routing.py" --out "$out/$recording.safetensors" --requests "$out/requests.json" --count 8 \
      --layers "$1" --prompt 32 --output "${OUTPUT:-64}" --alpha "$alpha" >"$out/$recording.log" || failed=1
  done <<END
zipf 1
uniform 0
END
}

# bench NAME SECONDS COUNT RECORDING CONFIG FLAGS...
bench() {
  local name=$1 seconds=$2 count=$3 recording=$4 config=$configs/$5.json
  shift 5
  check "$name" "$seconds" "$program" bench --config "$config" --dummy-weights --dtype bf16 --device cuda \
    --workload "$out/requests.json" --limit "$count" --replay-routed-experts "$out/$recording.safetensors" --repeat 1 \
    --kv-cache-memory 1GiB --json "$out/run-$name.json" "$@"
  grep -hoE "experts of each of .*" "$out/$name.log" | head -n 1 | cut -c1-300
}

# half NAME CONFIG FLAGS...: 1 and 8 sequences, uniform and skewed.
half() {
  local count recording
  for count in 1 8; do
    for recording in uniform zipf; do
      bench "$1-$recording-$count" 60 "$count" "$recording" "${@:2}"
    done
  done
}

check_part() {
  check tests 120 "${GPU_TESTS:-$root/bin/gpu}" offload:: --skip nccl:: --test-threads 1
  check texts 90 python3 "$root/tests/gpu/offload_texts.py" "$program"
  grep -E "texts," "$out/texts.log"
}

bf16() {
  local config=qwen3-30b-a3b
  recordings 48
  half bf16 $config --expert-offload 27
  bench bf16-device-1 60 1 uniform $config
  bench bf16-device-8 60 8 uniform $config
  bench bf16-small-card-8 60 8 zipf $config --expert-offload 27 --gpu-memory 44GB
  if timeout 60 "$program" bench --config "$configs/$config.json" --dummy-weights --dtype bf16 --device cuda --workload \
    "$out/requests.json" --limit 1 --repeat 1 --gpu-memory 44GB >"$out/refused.log" 2>&1; then
    echo "FAILED  refused: a model larger than the card runs without --expert-offload"
    failed=1
  else
    echo "ok      refused: $(grep -oE "the weights need .*" "$out/refused.log" | head -n 1 | cut -c1-160)"
  fi
}

int4() {
  recordings 48
  half int4 qwen3-30b-a3b-gptq-int4 --expert-offload 7.05
  bench int4-device-1 60 1 uniform qwen3-30b-a3b-gptq-int4
  bench int4-device-8 60 8 uniform qwen3-30b-a3b-gptq-int4
}

ranks() {
  recordings 48
  half tp2 qwen3-30b-a3b --tp 2 --expert-offload 13.5
}

large() {
  local recording
  recordings 94
  for recording in zipf uniform; do
    bench "large-$recording-1" 200 1 "$recording" qwen3-235b-a22b-fp8-block --expert-offload 96
  done
}

parts=("$@")
[ $# -gt 0 ] || parts=(check bf16 int4)
for part in "${parts[@]}"; do
  case $part in
    check) check_part ;;
    bf16 | int4 | ranks | large) "$part" ;;
    *) echo "unknown part $part" && exit 2 ;;
  esac
done
python3 - "$out"/run-*.json <<'END'
import json, sys
print(f"{'run':18} {'tok/s':>8} {'ms/step p50':>12} {'hit rate':>9} {'GB/step':>8} {'GB/s':>6}   (the last three of prompts, too)")
for path in sys.argv[1:]:
    try:
        result = json.load(open(path))
    except (OSError, ValueError):
        continue
    run = result["runs"][0]
    traffic = run["expert_traffic"]
    count, p50 = result["workload"]["requests"], run["inter_token_latency_ms"]["p50"]
    line = f"{path.split('/run-')[-1][:-5]:18} {1e3 * count / p50:8.1f} {p50:12.2f}"
    if traffic:
        gigabytes = traffic["fetched"] * traffic["expert_bytes"] / 1e9
        line += f" {1 - traffic['fetched'] / traffic['needed']:9.3f} {gigabytes / run['steps']:8.2f} {gigabytes / run['seconds']:6.1f}"
    print(line)
END
exit $failed
