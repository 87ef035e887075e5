#!/usr/bin/env bash
# Profiles decode steps of Qwen3-30B-A3B's shape, for B = 1, 64 and 256: timeline.sh [CONFIG]. It prints a table of host
# and device; figures and a picture go to $OUT (default: results) as timeline.json and timeline.svg. The profiles
# themselves, tens of MB that Perfetto can open, stay in $PROFILES, or else in a folder that is removed.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
config=${1:-$root/tests/bench/configs/qwen3-30b-a3b.json}
out=${OUT:-$root/results}
if [ -z "${PROFILES:-}" ]; then
  PROFILES=$(mktemp -d)
  trap 'rm -rf "$PROFILES"' EXIT
fi
mkdir -p "$out" "$PROFILES"
failed=0 profiles=()
for batch in 1 64 256; do
  if timeout 60 "$root/bin/moe" bench --config "$config" --dummy-weights --dtype bf16 --device cuda \
    --batches "$batch" --lengths 128 --output 128 --repeat 1 --profile "$PROFILES/$batch.json" \
    --json "$PROFILES/bench-$batch.json" >"$PROFILES/$batch.log" 2>&1; then
    profiles+=("$batch=$PROFILES/$batch.json")
  else
    failed=1
    echo "FAILED  profile of B=$batch"
    tail -n 5 "$PROFILES/$batch.log"
  fi
done
if [ ${#profiles[@]} -gt 0 ]; then
  python3 "$root/tests/gpu/timeline.py" "$out" "${profiles[@]}" || failed=1
fi
exit $failed
