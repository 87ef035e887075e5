#!/usr/bin/env bash
# Runs model-qwen3moe as a new user would and prints a line for each habit of the command line: pass or fail.
#
#   tests/cli/manners.sh [PROGRAM]     default: target/release/model-qwen3moe
set -uo pipefail
program=$(realpath "${1:-target/release/model-qwen3moe}")
fixtures=$(realpath "$(dirname "$0")/../fixtures")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
failed=0

# row NAME EXIT-CODE TEXT COMMAND..: the command ends with this code, and stdout or stderr holds the text.
row() {
  local name=$1 code=$2 text=$3
  shift 3
  "$@" >out 2>err </dev/null
  local got=$?
  if [ "$got" = "$code" ] && { [ -z "$text" ] || grep -qF -- "$text" out err; }; then
    echo "pass  $name"
  else
    echo "fail  $name: exit code $got, expected $code and \"$text\""
    head -n 5 err | sed 's/^/        /'
    failed=1
  fi
}
# As row, with text on stdin.
piped() {
  local name=$1 code=$2 text=$3 input=$4
  shift 4
  row "$name" "$code" "$text" bash -c 'printf %b "$0" | "$@"' "$input" "$@"
}
q() { "$program" "$@"; }
short=(--max-new-tokens 8 --temperature 0)

echo "-- before weights"
cp -r "$fixtures/text" awq && sed -i '0,/{/s//{"quantization_config": {"quant_method": "awq"},/' awq/config.json
rm -f awq/*.safetensors
row "a quantised checkpoint is refused by its config" 1 awq q --model awq --prompt x
cp -r "$fixtures/text" bare && rm -f bare/tokenizer.json bare/*.safetensors
row "a missing tokenizer is named before weights" 1 tokenizer.json q --model bare --prompt x
row "temperature" 2 temperature q --prompt x --temperature -1
row "no new tokens" 2 max-new-tokens q --prompt x --max-new-tokens 0
row "empty stop" 2 '--stop ""' q --prompt x --stop ""
row "unknown backend" 2 warp q --prompt x --moe-backend warp

echo "-- prompts"
piped "a pipe is the prompt" 0 "" 'ROMEO:' "$program" "${short[@]}"
piped "an empty pipe is an error" 1 "prompt is empty" '' "$program" "${short[@]}"
row "several texts are told apart" 0 "=== text 2 of 2" q --prompt x --num-sequences 2 "${short[@]}"
row "-n is refused and says why" 2 "--num-sequences" q --prompt x -n 2
row "stop escapes" 0 "" q --prompt ROMEO: --stop '\n' "${short[@]}"
row "seed -1" 0 "" q --prompt x --seed -1 --max-new-tokens 4
row "JSON" 0 '"finish_reason":"length"' q --prompt x --json "${short[@]}"
row "the context is announced" 0 "context of 512" q --prompt x --max-new-tokens 100000000 --temperature 0

echo "-- names"
row "a misspelt command" 2 "'generate'" q gnerate
row "a word that is no command" 2 "unrecognized subcommand 'list'" q list
row "flags before the command" 0 "" q --prompt x generate "${short[@]}"
for flag in "--dtype bfloat16" "--dtype float32" "--dtype auto" "--max-tokens 4" "--temp 0" \
  "--tensor-parallel-size 2" "--data-parallel-size 1" "-t 2"; do
  # shellcheck disable=SC2086  # a flag and its value
  row "$flag" 0 "" q -p x --seed 3 $flag
done
row "version" 0 "features:" q --version
row "short help" 0 "Examples:" q generate -h
row "long help lists values" 0 "possible values" q generate --help

echo "-- logs"
row "--log of no level" 2 "expected a level" q --prompt x --log bla
row "RUST_LOG of no level" 2 "RUST_LOG bla" env RUST_LOG=bla "$program" --prompt x
row "a log file" 0 "" q --prompt x --log-file log "${short[@]}"
row "too many threads" 0 "--num-threads 1000" q --prompt x --num-threads 1000 "${short[@]}"

echo "-- chat, batch, bench"
printf '{{ messages[-1].content }}' >template.jinja
piped "a piped chat that fails" 1 "no answer" "$(printf 'word %.0s' {1..2000})\n" "$program" chat --chat-template template.jinja
printf '\xef\xbb\xbf{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"x"}],"max_tokens":4}}\n' >in.jsonl
row "errors of a batch set the exit code on request" 1 error q batch --input in.jsonl --output a.jsonl --fail-on-error
row "and are answered again on request" 0 "" q batch --input in.jsonl --output a.jsonl --retry-errors --chat-template template.jinja
row "a rerun with other settings is refused" 2 temperature q batch --input in.jsonl --output a.jsonl --chat-template template.jinja --temperature 0.5
row "bench of the embedded model" 0 tok_s q bench --batches 1 --repeat 1 --prompt 8 --output 4 --lengths 16
row "a config without weights" 2 "--dummy-weights" q bench --config "$fixtures/base/config.json"
row "devices" 0 cpu q list-devices
exit $failed
