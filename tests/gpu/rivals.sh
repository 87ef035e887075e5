#!/usr/bin/env bash
# Compares this project with other software on one card in one call of less than 300 s, from the bundle of `cargo xtask
# dist`: `bench` of Qwen3-30B-A3B with random weights, PyTorch's peak rates, transformers on the same shape, every
# kernel of a step, layers, dense products and cuBLASLt, experts and router. $OUT (default: results) gets rivals.json,
# rivals.txt with the tables that are printed last, and rivals.tar.gz with each part's own output. PARTS chooses parts.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
out=${OUT:-$root/results}
work=$(mktemp -d)
mkdir -p "$out"
config=$root/tests/bench/configs/qwen3-30b-a3b.json
export MOE_KERNELS_SO=$root/lib/libmoe_kernels.so PYTHONDONTWRITEBYTECODE=1
failed=0
# part NAME SECONDS COMMAND...
part() {
  local name=$1 seconds=$2 start=$SECONDS
  shift 2
  [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
  if timeout -k 5 "$seconds" "$@" >"$work/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - start)) s)"
  else
    echo "FAILED  $name (exit code $?, $((SECONDS - start)) s)"
    failed=1
    grep -vE '^ *$' "$work/$name.log" | tail -n 6 | cut -c1-300
  fi
}
part ours 150 "$root/bin/moe" bench --config "$config" --dummy-weights --dtype bf16 --device cuda \
  --batches 1,8,32,64,128,256 --lengths 2048,8192 --long-context 8192 --log warn --json "$work/ours.json"
part ceilings 40 python3 "$root/tests/bench/peers/ceilings.py" --out "$work/ceilings.json"
part transformers 100 python3 "$root/tests/bench/peers/transformers_offline.py" --config "$config" --out "$work/transformers.json" \
  --batches 1,8 --lengths 2048 --output 17
part kernels 80 env OUT="$work" BENCH_BATCHES="1 8 64 256" python3 "$root/tests/cuda/decode.py" bench kernels layers linears
part experts 60 python3 "$root/tests/cuda/experts.py" "$MOE_KERNELS_SO" --kernels "stream,one launch,tensor,router + one launch,router + tensor,router alone" \
  --tokens 1,2,4,8,16,32,64,128,256,512,1024 --skews 0,0.5,1 --out "$work/experts.json"
part router 40 python3 "$root/tests/cuda/router.py" "$MOE_KERNELS_SO"
echo "== $SECONDS s"
python3 "$root/tests/gpu/rivals.py" "$work" "$out/rivals.json" | tee "$out/rivals.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
tar czf "$out/rivals.tar.gz" -C "$work" .
rm -rf "$work"
exit $failed
