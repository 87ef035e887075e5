#!/usr/bin/env bash
# Parts of ranks.sh, which sources this: experts that move between GPUs.

# Texts while experts move whenever a plan can be made: of one GPU, with copies of experts and without, and every layer
# has moved.
moves() {
  local label flags
  requests "$out/requests.jsonl" 24 32
  [ -f "$out/one.jsonl" ] || generate one
  while read -r label flags; do
    # Without peer memory NCCL carries experts.
    # shellcheck disable=SC2086
    NCCL_P2P_DISABLE=$([[ $label == *nccl ]] && echo 1 || echo 0) generate "moves-$label" $flags --enable-eplb --eplb-window 4 --eplb-interval 1 --eplb-plan-steps 1 --eplb-min-gain 0 \
      --eplb-any-cost --stats
    same "moves-$label"
    if grep -qE "expert moves: .* [1-9][0-9]* layers, .* 0 rolled back" "$out/moves-$label.log"; then
      grep -E "^(expert (moves|balance)|waits)" "$out/moves-$label.log"
    else
      echo "FAILED  moves-$label: no experts moved, or a move was rolled back"
      grep -E "^expert" "$out/moves-$label.log"
      failed=1
    fi
  done <<END
dp-allgather --dp $n $ep allgather_reducescatter
dp-deepep --dp $n $ep deepep
dp-copies --dp $n $ep deepep --num-redundant-experts $n
dp-eager --dp $n $ep allgather_reducescatter --eplb-bytes-per-step 300000 --enforce-eager
dp-nccl --dp $n $ep allgather_reducescatter
tp-local_allreduce --tp $n $ep local_allreduce --num-redundant-experts $n --expert-replicas local_first
END
}

# What balancing gains: 128 sequences a rank whose experts come from a recording: popular by Zipf's law, each layer
# in an order of its own; the same with the popular ones on the first rank; all alike. `best` are places balanced for
# the whole recording, which nobody knows before. PROMPT and OUTPUT are their tokens, COUNT the requests, STEP the rows
# of a step; WINDOW, INTERVAL and BYTES say when plans are made and what moves per step.
skew_row() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2086
  check "skew-$name" "$seconds" "$qwen" bench --config "$config" --dummy-weights --dtype bf16 --device cuda --workload \
    "$out/requests-skew.json" --replay-routed-experts "$out/${name%-*}.safetensors" --repeat "${REPEAT:-3}" --log warn \
    --max-num-seqs 128 ${STEP:+--max-num-batched-tokens $STEP} --profile "$out/profile-$name.json" --json "$out/skew-$name.json" "$@"
  grep -E "^(expert|waits)" "$out/skew-$name.log"
}

skew() {
  local recording flags base="--dp $n $ep ${BACKEND:-allgather_reducescatter}" window=${WINDOW:-64}
  local balance="--enable-eplb --eplb-window $window --eplb-interval ${INTERVAL:-128} --eplb-plan-steps $((window / 4)) \
    --eplb-bytes-per-step ${BYTES:-256MiB}"
  while read -r recording flags; do
    # shellcheck disable=SC2086
    python3 "$root/tests/bench/skewed_routing.py" --out "$out/$recording.safetensors" --requests "$out/requests-skew.json" \
      --count "${COUNT:-$((128 * n))}" --prompt "${PROMPT:-128}" --output "${OUTPUT:-256}" --ranks "$n" \
      --expert-map "$out/$recording-map.json" $flags || failed=1
  done <<END
zipf --alpha 1
sorted --alpha 1 --sorted
uniform --alpha 0
END
  rows skew_row 90 <<END
zipf-static $base
zipf-best $base --expert-map $out/zipf-map.json
zipf-eplb $base $balance --eplb-any-cost
zipf-copies $base --num-redundant-experts 16
zipf-both $base --num-redundant-experts 16 $balance --eplb-any-cost
sorted-static $base
sorted-best $base --expert-map $out/sorted-map.json
sorted-eplb $base $balance --eplb-any-cost
sorted-both $base --num-redundant-experts 16 $balance --eplb-any-cost
uniform-static $base
uniform-eplb $base $balance
uniform-copies $base --num-redundant-experts 16
END
}

# The same where experts compute rather than wait for weights: prompts of 2,048 tokens in steps of 2,048 rows a rank.
# Plans are made every 16 steps, so that the later runs of a row show balanced experts.
skew_prompts() {
  COUNT=${COUNT:-$((64 * n))} PROMPT=${PROMPT:-2048} OUTPUT=${OUTPUT:-2} STEP=${STEP:-2048} REPEAT=${REPEAT:-4} WINDOW=${WINDOW:-16} \
    INTERVAL=${INTERVAL:-16} BYTES=${BYTES:-1GiB} skew
}

# A load that drifts: eight times as many requests as run at once, and for every half of these (PERIOD requests a rank)
# other experts are popular. It compares no balancing, and places balanced for the whole run, which no engine can know
# before.
drift() {
  local base="--dp $n $ep ${BACKEND:-allgather_reducescatter}" prompt=${PROMPT:-64} output=${OUTPUT:-64} count=${COUNT:-$((1024 * n))}
  local window=${WINDOW:-32} period=$((${PERIOD:-64} * n))
  local balance="--enable-eplb --eplb-window $window --eplb-interval $window --eplb-plan-steps $((window / 4)) \
    --eplb-bytes-per-step ${BYTES:-256MiB} --eplb-any-cost"
  python3 "$root/tests/bench/skewed_routing.py" --out "$out/drift.safetensors" --requests "$out/requests-skew.json" --ranks "$n" \
    --expert-map "$out/drift-map.json" --json "$out/drift-pars.json" --alpha 1 --drift 32 --period $((61 * period)) \
    --rows $((61 * count + prompt + output)) --count "$count" --prompt "$prompt" --output "$output" || failed=1
  REPEAT=${REPEAT:-1} rows skew_row 120 <<END
drift-static $base
drift-best $base --expert-map $out/drift-map.json
drift-eplb $base $balance
drift-both $base --num-redundant-experts 16 $balance
END
}

# The same in prompts, as skew_prompts has them: a prompt is a step, and the load changes after every 128 of these.
drift_prompts() {
  COUNT=${COUNT:-$((384 * n))} PROMPT=${PROMPT:-2048} OUTPUT=${OUTPUT:-2} STEP=${STEP:-2048} PERIOD=${PERIOD:-128} WINDOW=${WINDOW:-16} \
    BYTES=${BYTES:-1GiB} drift
}

# Total tok/s of each run of the skewed and the drifting set, what the first rank's GPU takes for a step (the last half
# of them, by its profile) and how long it idles before the next, the peak over mean load, what plans expected, and the
# waits of moves.
skew_table() {
  python3 - "$out"/skew-*.json <<'END'
import json, statistics, sys
def device_steps(path):
    """What a step of the usual number of rows takes on the device, and how long that idles between two: milliseconds."""
    events = [e for e in json.load(open(path)) if e["ph"] == "X" and e["tid"] == 1000 and e["name"] == "step"]
    rows = statistics.mode(e["args"]["index"] for e in events)
    events = [e for e in sorted(events, key=lambda e: e["ts"])[len(events) // 2 :] if e["args"]["index"] == rows]
    steps = [e["dur"] / 1e3 for e in events]
    gaps = sorted((b["ts"] - a["ts"] - a["dur"]) / 1e3 for a, b in zip(events, events[1:]))
    return (f"{len(steps)} steps of {rows} rows: median {statistics.median(steps):.3f} ms, mean {statistics.mean(steps):.3f}; "
            f"between {statistics.median(gaps):.3f}, 95 % {gaps[len(gaps) * 95 // 100]:.3f}, longest {gaps[-1]:.3f}")
for path in sys.argv[1:]:
    try:
        result = json.load(open(path))
    except (OSError, ValueError):
        continue
    rates = " ".join(f"{run['total_tok_s']:8.0f}" for run in result["runs"])
    first = [run["time_to_first_token_ms"]["p50"] for run in result["runs"]]
    line = f"{path.split('/skew-')[-1][:-5]:16} total tok/s {rates}, first token {min(first):.0f} to {max(first):.0f} ms"
    try:
        line += ", " + device_steps(path.replace("/skew-", "/profile-"))
    except (OSError, ValueError, KeyError):
        pass
    if stats := result.get("eplb"):
        steps = max(stats["steps"], 1)
        before, expected = (par / max(stats["layers"], 1) for par in stats["planned_par_sums"])
        line += (f"  PAR {stats['par_sum'] / steps:.3f} (static {stats['static_par_sum'] / steps:.3f}; plans {before:.3f} to "
                 f"{expected:.3f}), {stats['experts']} experts, "
                 f"{stats['rounds']} rounds, ms {1e3 * stats['median_stall']:.2f} p99 {1e3 * stats['p99_stall']:.2f} "
                 f"max {1e3 * stats['longest_stall']:.2f}")
    print(line)
END
}
