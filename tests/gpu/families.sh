#!/usr/bin/env bash
# Shapes of published models of other families than Qwen3-MoE, with random weights on one card, and the same in
# vLLM where it is given: decode at 1, 8, 64 and 256 sequences and a prompt of 8,192 tokens; what the plans say of each
# shape; routers and layers of these rules against their definition.
#   families.sh [SHAPE...]      SHAPE: a file of tests/bench/configs without .json (default: those in $all below)
# $VLLM: a folder with vLLM and its torch, unpacked for the machine's python3. PARTS chooses parts: checks, plans, ours,
# vllm. $OUT (default: results) gets families.txt with the table that is printed last, families.json, and the output of
# each part. A shape takes about 60 s here and 300 s with vLLM, most of which is its start.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
all=(glm-4.7-flash moonlight-16b-a3b gpt-oss-20b gpt-oss-20b-mxfp4)
shapes=("${@:-${all[@]}}")
out=${OUT:-$root/results}/families
mkdir -p "$out"
failed=0
# part NAME LOG SECONDS COMMAND...
part() {
  local name=$1 log=$out/$2.log seconds=$3 start=$SECONDS
  shift 3
  [[ " ${PARTS:-checks plans ours vllm} " == *" $name "* ]] || return 0
  timeout -k 5 "$seconds" "$@" >"$log" 2>&1
  local code=$?
  if [ $code -eq 0 ]; then
    echo "ok      $(basename "$log" .log) ($((SECONDS - start)) s)"
  else
    echo "FAILED  $(basename "$log" .log) (exit code $code, $((SECONDS - start)) s)"
    failed=1
    grep -vE '^ *$' "$log" | tail -n 6 | cut -c1-300
  fi
}
# vLLM with its own NCCL and the machine's libraries of CUDA.
vllm() {
  local libraries
  libraries=$(python3 -c 'import nvidia, pathlib; print(":".join(map(str, pathlib.Path(list(nvidia.__path__)[0]).glob("*/lib"))))')
  env LD_PRELOAD="$VLLM/nv/libnccl.so.2" LD_LIBRARY_PATH="$VLLM/nv:$libraries:${LD_LIBRARY_PATH:-}" PYTHONPATH="$VLLM" PYTHONUNBUFFERED=1 \
    VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_WORKER_MULTIPROC_METHOD=spawn \
    CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" CPATH="${CUDA_HOME:-/usr/local/cuda}/include" python3 "$@"
}
export -f vllm
export VLLM=${VLLM:-}

part checks routing 240 "$root/bin/gpu" --test-threads 1 grouped gates::routers_choose gates::equal_experts layer::one_launch
found=()
for shape in "${shapes[@]}"; do
  config=$out/$shape.config.json
  # A prompt of 8,192 tokens and what it generates have to fit.
  if ! python3 -c "
import json, pathlib, sys
if not pathlib.Path(sys.argv[1]).exists():
    sys.exit(1)
config = json.load(open(sys.argv[1]))
config['max_position_embeddings'] = max(config['max_position_embeddings'], 16384)
json.dump(config, open(sys.argv[2], 'w'))" "$root/tests/bench/configs/$shape.json" "$config"; then
    echo "FAILED  $shape: no such config in tests/bench/configs"
    failed=1
    continue
  fi
  found+=("$shape")
  bench=("$root/bin/moe" bench --config "$config" --dummy-weights --dtype bf16 --device cuda --log warn)
  part plans "$shape.plans" 60 "${bench[@]}" --batches 1 --output 2 --lengths 16 --repeat 1 --explain-backends="$out/$shape.plans.json"
  part ours "$shape.ours" 150 "${bench[@]}" --batches 1,8,64,256 --lengths 8192 --json="$out/$shape.ours.json"
  if [ -n "$VLLM" ]; then
    part vllm "$shape.vllm" 420 bash -c 'vllm "$@"' vllm "$root/tests/bench/peers/vllm_offline.py" --config "$config" --batches 1,8,64,256 \
      --lengths 8192 --long-context 0 --repeat 2 --max-model-len 9216 --out "$out/$shape.vllm.json"
  fi
done
echo "== $SECONDS s"
python3 "$root/tests/gpu/families.py" "$out" "${found[@]}" | tee "$out/families.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
exit $failed
