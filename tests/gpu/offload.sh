#!/usr/bin/env bash
# Experts in host memory, from the bundle that `cargo xtask dist` packs: their tests, texts of 24 prompts, then Qwen3-30B-A3B with half of its experts in
# host memory (27 GiB, beside as much on the device) at 1 and 8 sequences, on uniform and on skewed routing (Zipf 1), and the same
# with all experts on the device; then a device of 44 GB, on which the model does not fit without. Below three minutes on one GPU
# with 64 GiB of host memory; needs numpy, torch and transformers. MOE_PROGRAM and GPU_TESTS name the binaries. Logs and JSON go to $OUT (default: results);
# the table comes last.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
. "$(dirname "$0")/check.sh"
out=${OUT:-$root/results}/offload
mkdir -p "$out"
qwen=${MOE_PROGRAM:-$root/bin/model-qwen3moe}
config=$root/tests/bench/configs/qwen3-30b-a3b.json
failed=0

# bench NAME SECONDS COUNT RECORDING FLAGS...
bench() {
  local name=$1 seconds=$2 count=$3 recording=$4
  shift 4
  check "$name" "$seconds" "$qwen" bench --config "$config" --dummy-weights --dtype bf16 --device cuda \
    --workload "$out/requests.json" --limit "$count" --replay-routed-experts "$out/$recording.safetensors" --repeat 1 \
    --kv-cache-memory 1GiB --json "$out/$name.json" "$@"
  grep -hoE "experts of each of .*" "$out/$name.log" | head -n 1 | cut -c1-300 >"$out/$name.cost"
}

check tests 120 "${GPU_TESTS:-$root/bin/gpu}" offload:: --test-threads 1
check texts 90 python3 "$root/tests/gpu/offload_texts.py" "$qwen"
grep -E "texts," "$out/texts.log"
for row in "zipf 1" "uniform 0"; do
  read -r recording alpha <<<"$row"
  python3 "$root/tests/bench/skewed_routing.py" --out "$out/$recording.safetensors" --requests "$out/requests.json" --count 8 \
    --prompt 32 --output "${OUTPUT:-64}" --alpha "$alpha" >"$out/$recording.log" || failed=1
done
for count in 1 8; do
  for recording in uniform zipf; do
    bench "half-$recording-$count" 60 "$count" "$recording" --expert-offload 27
  done
done
bench device-uniform-1 60 1 uniform
bench device-uniform-8 60 8 uniform
bench small-card-8 60 8 zipf --expert-offload 27 --gpu-memory 44GB
if timeout 60 "$qwen" bench --config "$config" --dummy-weights --dtype bf16 --device cuda --workload "$out/requests.json" --limit 1 \
  --repeat 1 --gpu-memory 44GB >"$out/refused.log" 2>&1; then
  echo "FAILED  refused: a model larger than the card runs without --expert-offload"
  failed=1
else
  echo "ok      refused: $(grep -oE "\-\-gpu-memory .*" "$out/refused.log" | head -n 1 | cut -c1-160)"
fi
cut -c1-300 "$out"/half-uniform-1.cost
python3 - "$out"/{half,device,small}-*.json <<'END'
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
    line = f"{path.split('/')[-1][:-5]:18} {1e3 * count / p50:8.1f} {p50:12.2f}"
    if traffic:
        gigabytes = traffic["fetched"] * traffic["expert_bytes"] / 1e9
        line += f" {1 - traffic['fetched'] / traffic['needed']:9.3f} {gigabytes / run['steps']:8.2f} {gigabytes / run['seconds']:6.1f}"
    print(line)
END
exit $failed
