#!/usr/bin/env bash
# Trains the candidate configurations of the bundled checkpoint in parallel on one GPU and prints
# one table. Usage: train_sweep.sh TEXT OUT [extra train_tiny.py flags]
# Six small models share a GPU well: each alone leaves it idle between kernels. --max-seconds bounds
# the whole sweep, since a run that is cut short still exports its best average.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
text=$1 out=$2
shift 2
python=${PYTHON:-python3}
mkdir -p "$out"

# name | flags; all stay under 10,000,000 bytes in bf16
configs='
wide-k4      --hidden 192 --moe-intermediate 112 --topk 4 --dropout 0.2 --steps 2000
wide-k2      --hidden 192 --moe-intermediate 112 --topk 2 --dropout 0.3 --bpe-dropout 0.2 --steps 3000
wide-k4-drop --hidden 192 --moe-intermediate 112 --topk 4 --dropout 0.3 --steps 3000
h256-k2      --hidden 256 --heads 8 --moe-intermediate 72 --topk 2 --dropout 0.25 --steps 2500
h256-k4-drop --hidden 256 --heads 8 --moe-intermediate 72 --topk 4 --dropout 0.35 --token-dropout 0.03 --weight-decay 0.3 --steps 4000
deep-k4      --hidden 192 --layers 6 --moe-intermediate 64 --topk 4 --dropout 0.25 --steps 3000
'

pids=()
while read -r name flags; do
    [ -n "$name" ] || continue
    # shellcheck disable=SC2086 # the flags are words on purpose
    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=3 "$python" "$here/train_tiny.py" --text "$text" \
        --out "$out/$name" --last "$out/$name-last" --max-seconds 300 $flags "$@" \
        >"$out/$name.log" 2>&1 &
    pids+=("$!")
done <<<"$configs"
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done

"$python" - "$out" <<'PY'
import json, pathlib, sys

rows = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/training.json")):
    r = json.loads(path.read_text())
    rows.append((r["held_out_bits_per_byte"], path.parent.name, r))
print(f"{'config':20} bits/B nats/tok  step  sec    bytes  rep(T=0) rep(T=.8) min effective experts")
for bits, name, r in sorted(rows, key=lambda row: row[:2]):
    s = r["samples"]
    experts = min(layer["effective_experts"] for layer in r["expert_load"])
    step = r["steps"] if name.endswith("-last") else r["best_step"]
    print(f"{name:20} {bits:.4f} {r['held_out_nats_per_token']:.4f} {step:8} {r['seconds']:5.0f} "
          f"{r['weight_bytes']:8} {s['greedy_repetition']:.3f} {s['sampled_repetition']:9.3f} {experts:9.2f}")
for bits, name, r in sorted(rows, key=lambda row: row[:2]):
    s = r["samples"]
    print(f"\n==== {name} ({bits:.4f})\n[T=0]\n{s['greedy']}\n[T=0.8]\n{s['temperature_0.8'][0]}")
PY
if [ "$failed" != 0 ]; then
    echo "a run failed:" >&2
    tail -n 5 "$out"/*.log >&2
    exit 1
fi
