#!/usr/bin/env bash
# Ranks on GPUs, a process each, from the bundle that `cargo xtask dist` packs: ranks.sh [short | long | PART...]
#   short (default)          parity, tokens, death, hosts and bench, below 4 minutes on 4 GPUs
#   long                     as short with backends instead of bench: each one at every batch size, below 7 minutes
#   prompts                  parity of long prompts of a mid-size model (2 minutes; needs torch and transformers)
#   prefill                  the rate of prompts of 8,192 and 32,768 tokens, below 2 minutes
#   mixed                    tests/bench/mixed_workload.py with weights once, by replicas and on one GPU, 5 minutes
#   moves                    the texts while experts move all the time, below a minute
#   skew, skew-prompts       what balancing gains on skewed routing, in decode steps and in prompts (need numpy)
#   drift, drift-prompts     the same where the skew changes, below 3 minutes (need numpy)
#   deepseek, ..-bench       DeepSeek-V2, a minute each on 2 GPUs; quantised, ..-bench: int4 and FP8 (needs torch)
# ROWS names the rows of backends, prefill and mixed to run ("dp-allgather dp-deepep"), BATCHES their batch sizes,
# REQUESTS how many mixed has, DEATHS how many ranks death kills by each geometry, GPUS the number of ranks (default:
# all GPUs, at most 4), MOE_PROGRAM the program. Logs and JSON go to $OUT (default: results); tables come last.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
. "$(dirname "$0")/check.sh"
out=${OUT:-$root/results}/ranks
mkdir -p "$out"
program=${MOE_PROGRAM:-$root/bin/moe}
visible=$(nvidia-smi -L | wc -l)
n=${GPUS:-$((visible < 4 ? visible : 4))}
[ "$n" -ge 2 ] || { echo "ranks.sh needs at least 2 GPUs, found $visible" && exit 1; }
half=$((n / 2))
# A rank that hangs is no reason to wait five minutes here.
export MOE_COLLECTIVE_TIMEOUT=${MOE_COLLECTIVE_TIMEOUT:-45} MOE_RENDEZVOUS_TIMEOUT=${MOE_RENDEZVOUS_TIMEOUT:-45}
ep="--enable-expert-parallel --moe-ep-backend"
config=$root/tests/bench/configs/qwen3-30b-a3b.json
# What answers requests, and the name of the answers of one GPU.
answers=("$program" batch) one=one
failed=0

# Parity with transformers over tensor-parallel ranks, by every backend and with copies of experts: f32 and bf16, and a
# model of the fast kernels' sizes where midsize.py has left one.
parity() {
  local label flags fixture dtype
  while read -r label flags; do
    for fixture in base narrow-experts; do
      for dtype in f32 bf16; do
        [ $fixture-$dtype = narrow-experts-bf16 ] && continue
        # shellcheck disable=SC2086
        check "parity-$label-$fixture-$dtype" 40 "$program" parity --model "$root/tests/fixtures/$fixture" --reference \
          "$root/tests/fixtures/$fixture/reference.safetensors" --device cuda --dtype $dtype --tp $n --log error $flags \
          --json "$out/parity-$label-$fixture-$dtype.json"
      done
    done
    [ -f /tmp/midsize/reference.safetensors ] || continue
    # shellcheck disable=SC2086
    check "parity-$label-midsize-bf16" 60 "$program" parity --model /tmp/midsize --reference \
      /tmp/midsize/reference.safetensors --device cuda --dtype bf16 --tp $n --log error $flags
  done <<END
disabled
local_allreduce $ep local_allreduce
allgather $ep allgather_reducescatter
high_throughput $ep deepep --deepep-mode high_throughput
low_latency $ep deepep --deepep-mode low_latency
copies_local $ep local_allreduce --num-redundant-experts 3 --expert-replicas local_first
copies_high_throughput $ep deepep --deepep-mode high_throughput --num-redundant-experts 5 --expert-replicas hash
END
}

# Parity of long prompts over tensor-parallel ranks that share their rows, or whose experts get rows and return sums.
prompts() {
  check prompts 170 python3 "$root/tests/gpu/midsize.py" "$program" --dir /tmp/midsize-ranks --prompts 300,1023,4097,20000 \
    --flags="--tp $n --log error" --flags="--tp $n --log error $ep allgather_reducescatter" \
    --flags="--tp $n --log error $ep deepep --deepep-mode high_throughput"
  grep -E "prompt of|tokens" "$out/prompts.log" | cut -c1-250
}

# requests FILE COUNT TOKENS: greedy completions of the embedded checkpoint.
requests() {
  python3 - "$@" <<'END'
import json, sys
path, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = ["ROMEO:", "JULIET:", "First Citizen:", "KING RICHARD III:", "What", "O, ", "The", "MENENIUS:"]
with open(path, "w") as out:
    for i in range(count):
        body = {"prompt": names[i % 8] + "\n" * (i % 3), "max_tokens": tokens, "temperature": 0}
        out.write(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
END
}

# generate NAME FLAGS...: answers of the requests in $out/NAME.jsonl.
generate() {
  local name=$1
  shift
  rm -f "$out/$name.jsonl"
  check "$name" 60 "${answers[@]}" --input "$out/requests.jsonl" --output "$out/$name.jsonl" --device cuda --dtype f32 \
    --ignore-eos --log error "$@"
}

# same NAME: whether its answers are the same as on one GPU. A tie may flip, because f32 sums round by their order.
same() {
  python3 - "$out/$one.jsonl" "$out/$1.jsonl" <<'END' || failed=1
import json, sys
def texts(path):
    lines = [json.loads(line) for line in open(path)]
    return {l["custom_id"]: l["response"]["body"]["choices"][0]["text"] for l in lines}
try:
    want, got = map(texts, sys.argv[1:])
except (OSError, KeyError, TypeError) as e:
    sys.exit(f"FAILED  {sys.argv[2]}: {e!r}")
equal = sum(got.get(key) == text for key, text in want.items())
name, least = sys.argv[2].split("/")[-1], 0.9 * max(len(want), 1)
print(f"{'ok     ' if equal >= least else 'FAILED '} {name}: {equal} of {len(want)} texts equal one GPU's")
sys.exit(equal < least)
END
}

# The engine over ranks: greedy tokens of every geometry, with graphs and without, against one GPU's.
tokens() {
  local label flags mode
  requests "$out/requests.jsonl" 24 32
  generate one
  while read -r label flags; do
    [ -n "$label" ] || continue
    for mode in graph eager; do
      # shellcheck disable=SC2086
      generate "tokens-$label-$mode" $flags $([ $mode = eager ] && echo --enforce-eager)
      same "tokens-$label-$mode"
    done
  done <<END
tp-disabled --tp $n
tp-local_allreduce --tp $n $ep local_allreduce
dp-allgather --dp $n $ep allgather_reducescatter
dp-deepep --dp $n $ep deepep
dp-high_throughput --dp $n $ep deepep --deepep-mode high_throughput
tp-chunks --tp $n --enable-chunked-moe --chunked-moe-size 8
dp-chunks --dp $n $ep allgather_reducescatter --enable-chunked-moe --chunked-moe-size 8
$([ "$half" -ge 2 ] && echo "tp-dp-allgather --tp $half --dp 2 $ep allgather_reducescatter")
END
}

. "$(dirname "$0")/ranks_moves.sh"     # moves, skew, drift, skew_table
. "$(dirname "$0")/ranks_quantised.sh" # quantised, quantised_bench

# A killed rank ends all others soon, with an error that names it: each rank but the first in turn, DEATHS times by each
# geometry, as soon as answers are written.
death() {
  local label flags number
  requests "$out/long.jsonl" 20000 400 # more than a minute of work
  while read -r label flags; do
    # shellcheck disable=SC2086
    for number in $(seq "${DEATHS:-1}"); do death_of "$label" "$number" $flags </dev/null; done
  done <<END
tp --tp $n
dp --dp $n $ep allgather_reducescatter
END
}

# death_of LABEL NUMBER FLAGS...: starts ranks and kills one.
death_of() {
  local label=$1 rank=$((($2 - 1) % (n - 1) + 1)) log=$out/death-$1-$2.log driver victim start code
  shift 2
  rm -f "$out/death.jsonl"
  "$program" batch --input "$out/long.jsonl" --output "$out/death.jsonl" --device cuda --ignore-eos --log error "$@" \
    >"$log" 2>&1 &
  driver=$!
  for _ in $(seq 300); do [ -s "$out/death.jsonl" ] || ! kill -0 $driver 2>/dev/null || sleep 0.1; done
  # Rank 0 is the process that was started.
  victim=$(pgrep -P $driver | sort -n | sed -n "${rank}p")
  if [ -z "$victim" ] || [ ! -s "$out/death.jsonl" ]; then
    echo "FAILED  death-$label: the run ended, or wrote nothing in 30 s, before rank $rank could be killed" && failed=1
    kill -KILL $driver 2>/dev/null
    return
  fi
  kill -KILL "$victim"
  start=$SECONDS
  for _ in $(seq 300); do kill -0 $driver 2>/dev/null && sleep 0.1; done
  kill -KILL $driver 2>/dev/null && echo "FAILED  death-$label: still running after 30 s" && failed=1
  wait $driver
  code=$?
  if [ $code -eq 1 ] && grep -qE "rank [0-9]+ (died|cannot be reached)" "$log"; then
    echo "ok      death-$label: exit code 1 after $((SECONDS - start)) s, $(grep -oE "rank [0-9]+ (died|cannot)[^,]*" "$log" | head -n 1 | cut -c1-80)"
  else
    echo "FAILED  death-$label: exit code $code" && failed=1
    tail -n 5 "$log" | cut -c1-300
  fi
}

# Two simulated hosts of half the GPUs each, that NCCL joins by sockets; the ranks are started as a launcher does it.
hosts() {
  local label flags rank pids=() code=0 port=$((20000 + RANDOM % 10000))
  requests "$out/requests.jsonl" 24 32
  [ -f "$out/one.jsonl" ] || generate one
  while read -r label flags; do
    rm -f "$out/hosts-$label.jsonl"
    pids=() code=0 port=$((port + 1))
    for rank in $(seq 0 $((2 * half - 1))); do
      local host=$((rank / half)) first=$((rank / half * half))
      # shellcheck disable=SC2086
      env RANK=$rank WORLD_SIZE=$((2 * half)) LOCAL_RANK=$((rank % half)) LOCAL_WORLD_SIZE=$half MASTER_ADDR=127.0.0.1 \
        MASTER_PORT=$port NCCL_HOSTID=host$host NCCL_NET=Socket NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} \
        CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + half - 1))) timeout -k 5 60 "$program" batch \
        --input "$out/requests.jsonl" --output "$out/hosts-$label.jsonl" --device cuda --dtype f32 --ignore-eos \
        --log error $flags \
        >"$out/hosts-$label-$rank.log" 2>&1 &
      pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    [ $code -eq 0 ] || { failed=1 && tail -n 3 "$out/hosts-$label-"*.log | cut -c1-300; }
    same "hosts-$label"
  done <<END
tp --tp $((2 * half))
dp --dp 2 --tp $half $ep allgather_reducescatter
END
}

# bench_row NAME SECONDS BATCHES FLAGS...: the model of $config with random weights, and prompts of $LENGTHS.
bench_row() {
  local name=$1 seconds=$2 batches=$3
  shift 3
  check "bench-$name" "$seconds" "$program" bench --config "$config" --dummy-weights --dtype bf16 --device cuda --batches \
    "$batches" --lengths "${LENGTHS:-8192}" --repeat "${REPEAT:-1}" --log warn --json "$out/bench-$name.json" "$@"
}

# rows COMMAND ARGUMENT...: calls COMMAND LABEL ARGUMENT... FLAGS for each line "label flags" of the standard input that
# ROWS names, which are all by default.
rows() {
  local known=" " label flags
  while read -r label flags; do
    [ -n "$label" ] || continue
    known+="$label "
    [[ -z ${ROWS:-} || " $ROWS " == *" $label "* ]] || continue
    # shellcheck disable=SC2086
    "$1" "$label" "${@:2}" $flags </dev/null
  done
  for label in ${ROWS:-}; do
    [[ $known == *" $label "* ]] || { echo "FAILED  unknown row $label; expected some of$known" && failed=1; }
  done
}

bench() {
  bench_row tp-disabled 75 1,8,64,256 --tp "$n" --output 128
  # shellcheck disable=SC2086
  bench_row tp-local_allreduce 75 1,8,64,256 --tp "$n" --output 128 $ep local_allreduce
}

# Ranks in two dimensions, half of them tensor-parallel, where there are enough for that: grid LABEL FLAGS...
grid() {
  [ "$half" -lt 2 ] || echo "$1 --tp $half --dp 2 ${*:2}"
}

# Each backend at every batch size (BATCHES), with graphs if it has them. A row takes a minute: 64 tokens, one run.
# ROWS names the rows to run, all by default.
backends() {
  rows bench_row 200 "${BATCHES:-1,2,4,8,16,32,64,128,256,512,1024}" --output 64 <<END
tp-disabled --tp $n
tp-local_allreduce --tp $n $ep local_allreduce
tp-allgather --tp $n $ep allgather_reducescatter
dp-allgather --dp $n $ep allgather_reducescatter
dp-deepep --dp $n $ep deepep
dp-high_throughput --dp $n $ep deepep --deepep-mode high_throughput
$(grid tp-dp-allgather $ep allgather_reducescatter)
replicas --dp $n
END
}

# Prompts in steps of 8,192 tokens. Data-parallel ranks have a prompt each.
prefill() {
  LENGTHS=8192,32768 rows bench_row 120 256 --output 32 <<END
prefill-tp --tp $n
prefill-dp-allgather --dp $n $ep allgather_reducescatter
prefill-dp-high_throughput --dp $n $ep deepep --deepep-mode high_throughput
$(grid prefill-tp-dp $ep allgather_reducescatter)
prefill-replicas --dp $n
END
}

# mixed_row NAME SECONDS FLAGS...: the mixed set of requests.
mixed_row() {
  local name=$1 seconds=$2
  shift 2
  check "mixed-$name" "$seconds" "$program" bench --config "$config" --dummy-weights --dtype bf16 --device cuda --workload \
    "$out/requests-mixed.json" --repeat "${REPEAT:-1}" --log warn --json "$out/mixed-$name.json" "$@"
}

mixed() {
  python3 "$root/tests/bench/mixed_workload.py" --out "$out/requests-mixed.json" --requests "${REQUESTS:-1000}" >/dev/null || failed=1
  rows mixed_row 100 <<END
one-256 --max-num-seqs 256
tp-512 --tp $n --max-num-seqs 512
dp-allgather-256 --dp $n $ep allgather_reducescatter --max-num-seqs 256
dp-allgather-256-eplb --dp $n $ep allgather_reducescatter --max-num-seqs 256 --enable-eplb
dp-allgather-512 --dp $n $ep allgather_reducescatter --max-num-seqs 512
dp-deepep-256 --dp $n $ep deepep --max-num-seqs 256
$(grid tp-dp-allgather-512 $ep allgather_reducescatter --max-num-seqs 512)
replicas-256 --dp $n --max-num-seqs 256
END
}

# Total and output tok/s of the mixed set, and of replicas the ratio to one GPU.
mixed_table() {
  python3 - "$out"/mixed-*.json <<'END'
import json, sys
runs = {}
for path in sys.argv[1:]:
    try:
        run = json.load(open(path))
        runs[path.split("/mixed-")[-1][:-5]] = run.get("best") or run["runs"][0]
    except (OSError, ValueError, KeyError, IndexError):
        pass
for name, run in sorted(runs.items()):
    print(f"mixed {name:20} total {run['total_tok_s']:9.0f}  output {run['output_tok_s']:8.0f}  steps {run['steps']}")
if {"one-256", "replicas-256"} <= runs.keys():
    print(f"replicas over one GPU: {runs['replicas-256']['total_tok_s'] / runs['one-256']['total_tok_s']:.2f}")
END
}

# DeepSeek-V2 over ranks: parity with transformers in both forms of attention, and the texts of one GPU. The latent
# cache is on every rank, its heads and experts are cut; with data parallelism the attention is whole on each.
deepseek() {
  local label flags fixture form
  while read -r label flags; do
    for form in v2-lite:absorbed v2:absorbed v2:naive; do
      fixture=$root/tests/fixtures/deepseek-${form%:*}
      # shellcheck disable=SC2086
      check "deepseek-parity-$label-${form/:/-}" 40 "$program" parity --model "$fixture" --device cuda --dtype f32 --tp $n \
        --reference "$fixture/reference.safetensors" --log error --mla "${form#*:}" $flags
    done
  done <<END
disabled
local_allreduce $ep local_allreduce
allgather $ep allgather_reducescatter
low_latency $ep deepep --deepep-mode low_latency
END
  requests "$out/requests.jsonl" 24 32
  answers=("$program" batch --model "$root/tests/fixtures/deepseek-text") one=deepseek-one
  generate deepseek-one
  while read -r label flags; do
    # shellcheck disable=SC2086
    generate "deepseek-$label" $flags
    same "deepseek-$label"
  done <<END
tp-disabled --tp $n
tp-disabled-eager --tp $n --enforce-eager
tp-local_allreduce --tp $n $ep local_allreduce
tp-local_allreduce-stream --tp $n $ep local_allreduce --shared-experts-stream on
tp-naive --tp $n --mla naive
dp-allgather --dp $n $ep allgather_reducescatter
dp-allgather-stream --dp $n $ep allgather_reducescatter --shared-experts-stream on
dp-deepep --dp $n $ep deepep
END
  answers=("$program" batch) one=one
}

# DeepSeek-V2-Lite over ranks, shared experts as slots, on the second stream and after the routed ones.
deepseek_bench() {
  local qwens=$config label flags
  config=$root/tests/bench/configs/deepseek-v2-lite.json
  while read -r label flags; do
    # shellcheck disable=SC2086
    bench_row "deepseek-$label" 60 1,8,64,256 --output 64 $flags
  done <<END
tp-slots --tp $n
tp-on --tp $n --shared-experts-stream on
tp-off --tp $n --shared-experts-stream off
dp-on --dp $n $ep allgather_reducescatter --shared-experts-stream on
dp-off --dp $n $ep allgather_reducescatter --shared-experts-stream off
END
  config=$qwens
}

table() {
  python3 - "$out"/bench-*.json <<'END'
import json, sys
runs = {}
for path in sys.argv[1:]:
    try:
        runs[path.split("/bench-")[-1][:-5]] = json.load(open(path))
    except (OSError, ValueError):
        pass
batches = sorted({int(b) for run in runs.values() for b in run["decode"]})
if runs:
    print(f"{'tok/s':28}" + "".join(f"{'B=' + str(b):>9}" for b in batches) + "  prefill 8192     32768  start s")
for name, run in sorted(runs.items()):
    cells = [run["decode"].get(str(b), {}).get("tok_s") for b in batches]
    row = "".join(f"{c:9.0f}" if c else f"{'-':>9}" for c in cells)
    prefill = [run["prefill"].get(length, 0) for length in ("8192", "32768")]
    print(f"{name:28}{row}  {prefill[0]:12.0f}  {prefill[1]:8.0f}  {run['start_s']:7.1f}")
END
}

parts=("${@:-short}")
case ${parts[0]} in
  short) parts=(parity tokens death hosts bench) ;;
  long) parts=(parity tokens death hosts backends) ;;
esac
for part in "${parts[@]}"; do
  case $part in
    parity | prompts | tokens | moves | death | hosts | bench | backends | prefill | mixed | skew | skew-prompts | drift | drift-prompts | quantised | quantised-bench | deepseek | deepseek-bench)
      echo "== $part on $n GPUs ($SECONDS s)" && "${part//-/_}" ;;
    *) echo "unknown part $part" && exit 2 ;;
  esac
done
echo "== $SECONDS s"
table
mixed_table
skew_table
exit $failed
