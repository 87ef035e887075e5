#!/usr/bin/env bash
# Parity of every fixture on a GPU: parity.sh BINARY [DTYPE...]; one line per failure, a count last.
set -uo pipefail
binary=$1
shift
dtypes=("$@")
[ ${#dtypes[@]} -eq 0 ] && dtypes=(f32 bf16)
root=$(cd "$(dirname "$0")/../.." && pwd)
passed=0 failed=0
for reference in "$root"/tests/fixtures/*/reference.safetensors; do
  model=$(dirname "$reference")
  # DeepSeek-V2 has a program of its own, on the CPU so far.
  grep -q '"model_type": "deepseek_v2"' "$model/config.json" && continue
  for dtype in "${dtypes[@]}"; do
    if message=$(timeout 60 "$binary" parity --model "$model" --reference "$reference" --device cuda --dtype "$dtype" \
      --log error --json /tmp/parity.json 2>&1 | tail -n 2) && [ "${PIPESTATUS[0]}" -eq 0 ]; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1))
      echo "FAILED $(basename "$model") $dtype: $message"
    fi
  done
done
echo "parity on cuda: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
