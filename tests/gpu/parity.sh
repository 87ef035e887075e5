#!/usr/bin/env bash
# Parity of every fixture of a program's model on a GPU: parity.sh BINARY [DTYPE...]; one line per failure, a count last.
# DeepSeek-V2's run on both paths of experts and in both forms of attention. $JOBS (default: 4) run at a time.
set -uo pipefail
export binary=$1
shift
dtypes=("$@")
[ ${#dtypes[@]} -eq 0 ] && dtypes=(f32 bf16)
root=$(cd "$(dirname "$0")/../.." && pwd)
case $(basename "$binary") in
  *deepseek*) type=deepseek_v2 variants=("--moe-path fused" "--moe-path legacy" "--moe-path fused --mla naive" "--moe-path legacy --mla naive") ;;
  *) type=qwen3_moe variants=("") ;;
esac
scratch=$(mktemp -d)
export scratch
trap 'rm -rf "$scratch"' EXIT
# one MODEL DTYPE VARIANT: nothing, or a line that says what failed
one() {
  local message
  # shellcheck disable=SC2086  # a variant is several words
  message=$(timeout 60 "$binary" parity --model "$1" --reference "$1/reference.safetensors" --device cuda --dtype "$2" \
    $3 --log error --json "$scratch/$BASHPID.json" 2>&1) || echo "FAILED $(basename "$1") $2 $3: $(tail -n 2 <<<"$message")"
}
export -f one
for reference in "$root"/tests/fixtures/*/reference.safetensors; do
  model=$(dirname "$reference")
  grep -q "\"model_type\": \"$type\"" "$model/config.json" || continue
  for dtype in "${dtypes[@]}"; do
    for variant in "${variants[@]}"; do printf '%s\0%s\0%s\0' "$model" "$dtype" "$variant"; done
  done
done >"$scratch/runs"
all=$(($(tr -cd '\0' <"$scratch/runs" | wc -c) / 3))
xargs -0 -n 3 -P "${JOBS:-4}" bash -c 'one "$@"' _ <"$scratch/runs" | tee "$scratch/failures"
failed=$(grep -c '^FAILED' "$scratch/failures")
echo "parity on cuda: $((all - failed)) passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$all" -gt 0 ]
