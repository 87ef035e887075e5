#!/usr/bin/env bash
# Runs compute-sanitizer over the kernel tests, from the bundle of `cargo xtask dist --sanitizer`: sanitize.sh [TOOL...]
# with the tools memcheck, racecheck and synccheck (default: racecheck memcheck). Every kernel test of bin/gpu, on few
# and small shapes (TINY), and every check of tests/cuda/peers.py is a job. JOBS jobs at a time share each visible GPU
# (default 4). A job ends after LIMIT seconds (default 240), all of them after TOTAL (default 540). Only kernels of this
# project are watched. The script prints a line per job and, for one that fails, its first distinct reports.
# ONLY=PATTERN chooses jobs by name. Lines and logs go to $OUT (default: results), as sanitize.txt and sanitize.tar.gz.
set -uo pipefail
. "$(dirname "$0")/environment.sh"
out=${OUT:-$root/results}
logs=$(mktemp -d)
mkdir -p "$out"
devices=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
gpus=$(tr ',' '\n' <<<"$devices" | grep -c .)
[ "$gpus" -ge 1 ] || { echo "sanitize.sh needs a GPU" && exit 2; }
limit=${LIMIT:-240} deadline=$(($(date +%s) + ${TOTAL:-540}))
tools=("$@")
[ ${#tools[@]} -eq 0 ] && tools=(racecheck memcheck)

# The first compute-sanitizer that works on this machine: the bundle's, then the machine's.
sanitizer=
for candidate in "${COMPUTE_SANITIZER:-}" "$root/compute-sanitizer/compute-sanitizer" "$(command -v compute-sanitizer)" \
  /usr/local/cuda*/bin/compute-sanitizer; do
  [ -x "$candidate" ] || continue
  if timeout 60 "$candidate" --tool racecheck --error-exitcode 99 "$root/bin/gpu" --exact \
    rows::gathered_rows_are_those_of_the_table >"$logs/probe.log" 2>&1; then
    sanitizer=$candidate
    break
  fi
  echo "cannot use $candidate: $(grep -E '^========= ' "$logs/probe.log" | sed -n '2,3p' | tr '\n' ' ' | cut -c1-200)"
done
[ -n "$sanitizer" ] || { tail -n 5 "$logs/probe.log" 2>/dev/null && echo "no compute-sanitizer works here" && exit 2; }

# job TOOL KIND NAME: runs a test under a tool and prints its result.
job() {
  local tool=$1 kind=$2 name=$3 left=$((deadline - $(date +%s))) start code log options command
  log=$logs/$tool-$kind-${name//:/_}.log
  command=("$root/bin/gpu" --exact "$name" --test-threads 1)
  [ "$kind" = peers ] && command=(python3 "$root/tests/cuda/peers.py" "$name")
  if [ "$left" -lt 10 ]; then
    echo "NOT RUN $tool $kind $name: no time is left"
    return 1
  fi
  options=(--tool "$tool" --error-exitcode 99 --kernel-name kernel_substring=3moe --show-backtrace device --print-limit 200)
  # Jobs that run at the same time use different ports.
  options+=(--port $((49152 + SLOT * 16)) --launch-timeout 120)
  # The compiler counts an array of barriers as one barrier, and the tool reserves memory for the compiler's number. For
  # API calls only the errors that they return are reported.
  case $tool in racecheck | synccheck) options+=(--num-cuda-barriers 128) ;; memcheck) options+=(--report-api-errors explicit) ;; esac
  # With torch's cache, the memory next to a tensor is allocated too, so reads beyond the tensor would not be reported.
  [ "$tool" = memcheck ] && export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  start=$(date +%s)
  CUDA_VISIBLE_DEVICES=$(cut -d, -f$((SLOT % gpus + 1)) <<<"$devices") timeout -k 5 $((left < limit ? left : limit)) \
    "$sanitizer" "${options[@]}" "${command[@]}" >"$log" 2>&1
  code=$?
  python3 "$root/tests/gpu/sanitize.py" "$tool $kind $name" $code $(($(date +%s) - start)) "$log"
}

list() {
  "$root/bin/gpu" --list | sed -nE "s/^(($modules)::.*): test$/rust \1/p"
  (cd "$root/tests/cuda" && python3 -c 'import peers; print(*(f"peers {check.__name__}" for check in peers.CHECKS), sep="\n")')
}

run() {
  local tool
  "$sanitizer" --version | tail -n 1
  echo "$gpus GPUs, $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), ${JOBS:-4} jobs on each"
  for tool in "${tools[@]}"; do sed "s/^/$tool /" "$logs/jobs"; done | grep -E "${ONLY:-.}" |
    xargs -P $((gpus * ${JOBS:-4})) -n 3 --process-slot-var=SLOT bash -c 'job "$@"' job
}

# The modules of bin/gpu whose tests run kernels directly.
modules='align|attention|attention_forms|checksum|experts|fused|gates|layer|mla|mla_rows|products|quant|route|routed|rows|sampling|step'
export MOE_KERNELS_SO=$root/lib/libmoe_kernels.so TINY=1 PYTHONDONTWRITEBYTECODE=1
export root logs devices gpus sanitizer limit deadline
export -f job
list >"$logs/jobs" || { echo "cannot list the checks" && exit 2; }
run | tee "$out/sanitize.txt"
code=${PIPESTATUS[0]}
echo "$(grep -c '^ok' "$out/sanitize.txt") clean, $(grep -cE '^(ERRORS|FAILED|TIMEOUT|NOT RUN)' "$out/sanitize.txt") not"
tar czf "$out/sanitize.tar.gz" -C "$logs" .
rm -rf "$logs"
exit "$code"
