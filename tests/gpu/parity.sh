#!/usr/bin/env bash
# Checks the parity of every fixture on a GPU: parity.sh PROGRAM [DTYPE...]. It prints one line per failure and a count
# at the end. Models with latent attention run on both paths of experts and in both forms of this attention. Quantised
# models also run as floats (--dequantise). $JOBS (default: 4) run at a time.
set -uo pipefail
export binary=$1
shift
dtypes=("$@")
[ ${#dtypes[@]} -eq 0 ] && dtypes=(f32 bf16)
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
export scratch
trap 'rm -rf "$scratch"' EXIT
# one MODEL DTYPE VARIANT: prints nothing, or a line that says what failed
one() {
  local message code=0
  # shellcheck disable=SC2086  # a variant is several words
  message=$(timeout 60 "$binary" parity --model "$1" --reference "$1/reference.safetensors" --device cuda --dtype "$2" \
    $3 --log error --json "$scratch/$BASHPID.json" 2>&1) || code=$?
  if [ $code -ne 0 ]; then
    echo "FAILED $(basename "$1") $2 $3: $(tail -n 2 <<<"$message")"
  fi
}
export -f one
for reference in "$root"/tests/fixtures/*/reference.safetensors; do
  model=$(dirname "$reference")
  variants=("")
  if grep -q '"kv_lora_rank": [0-9]' "$model/config.json"; then
    variants=("--moe-path fused" "--moe-path legacy" "--moe-path fused --mla naive" "--moe-path legacy --mla naive")
  fi
  grep -q '"quantization_config"' "$model/config.json" && variants+=("--dequantise")
  for dtype in "${dtypes[@]}"; do
    for variant in "${variants[@]}"; do printf '%s\0%s\0%s\0' "$model" "$dtype" "$variant"; done
  done
done >"$scratch/runs"
all=$(($(tr -cd '\0' <"$scratch/runs" | wc -c) / 3))
xargs -0 -n 3 -P "${JOBS:-4}" bash -c 'one "$@"' _ <"$scratch/runs" | tee "$scratch/failures"
failed=$(grep -c '^FAILED' "$scratch/failures")
echo "parity on cuda: $((all - failed)) passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$all" -gt 0 ]
