#!/usr/bin/env bash
# Runs model-qwen3moe as a new user would, and prints pass or fail for each rule of the command line.
#
#   tests/cli/manners.sh [PROGRAM]     default: target/release/model-qwen3moe
set -uo pipefail
program=$(realpath "${1:-target/release/model-qwen3moe}")
here=$(realpath "$(dirname "$0")")
fixtures=$(realpath "$here/../fixtures")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
failed=0

# row NAME EXIT-CODE TEXT COMMAND..: checks that the command ends with this code and that stdout or stderr contains the
# text.
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
# Like row, with text on stdin.
piped() {
  local name=$1 code=$2 text=$3 input=$4
  shift 4
  row "$name" "$code" "$text" bash -c 'printf %b "$0" | "$@"' "$input" "$@"
}
q() { "$program" "$@"; }
short=(--max-new-tokens 8 --temperature 0)

echo "-- before weights"
cp -r "$fixtures/text" unread && rm -f unread/*.safetensors
sed -i '0,/{/s//{"quantization_config": {"quant_method": "bitsandbytes"},/' unread/config.json
row "a method of quantisation that is not read is refused by its config" 1 bitsandbytes q --model unread --prompt x
cp -r unread headless && sed -i 's/"bitsandbytes"/"awq"/' headless/config.json
row "so is a header without the number of bits" 1 quantization_config.bits q --model headless --prompt x
cp -r "$fixtures/text" bare && rm -f bare/tokenizer.json bare/*.safetensors
row "a missing tokenizer is named before weights" 1 tokenizer.json q --model bare --prompt x
row "temperature" 2 temperature q --prompt x --temperature -1
row "no new tokens" 2 max-new-tokens q --prompt x --max-new-tokens 0
row "empty stop" 2 '--stop ""' q --prompt x --stop ""
row "unknown backend" 2 warp q --prompt x --moe-backend warp
row "unknown device" 2 "gpu" q --prompt x --device gpu
row "a device that is not here" 2 cuda q --prompt x --device cuda:99
cp -r "$fixtures/text" tied
sed -i 's/"tie_word_embeddings": false/"tie_word_embeddings": true/; s/"num_hidden_layers": 2/"num_hidden_layers": 1/' tied/config.json
row "a projection that the config ties but the file does not is used, and told" 0 "lm_head of other values" q --model tied --prompt x "${short[@]}"
row "a layer after the last one is left out, with a warning" 0 "model.layers.1.* (" q --model tied --prompt x "${short[@]}"
row "inspect tells of both" 0 "lm_head of other values" q inspect tied
cp -r unread huge && cp "$fixtures/text/config.json" huge/config.json
sed -i 's/"hidden_size": 40/"hidden_size": 131072/; s/"moe_intermediate_size": 20/"moe_intermediate_size": 1048576/' huge/config.json
row "weights without room are refused before they are read" 2 "the weights need 7680.24 GiB of memory" q --model huge --prompt x
row "random ones, too" 2 "the weights need 7680.24 GiB" q bench --config huge/config.json --dummy-weights
row "unless it is wanted" 1 "model.safetensors" q --model huge --prompt x --skip-memory-check
for flag in --enforce-eager "--fp8-activations on" "--shared-experts-stream on" "--gpu-memory 24GB" "--expert-offload 1"; do
  row "${flag%% *} is for GPUs" 2 "--device cuda" q --prompt x $flag
done
cp -r "$fixtures/deepseek-text" deepseek && rm -f deepseek/*.safetensors
row "another program's checkpoint" 1 'the program `moe` runs' q --model deepseek --prompt x
cp -r "$fixtures/text" keyless && sed -i '/"hidden_size"/d' keyless/config.json && rm -f keyless/*.safetensors
row "a config without a required key" 1 hidden_size q --model keyless --prompt x
printf GGUF >tiny.gguf
row "a GGUF file is named as one" 2 "GGUF" q --model tiny.gguf --prompt x
# The weights of this checkpoint cannot be read, so an error that appears here comes before the weights are read.
cp -r "$fixtures/text" unfinished && printf 'cut' >unfinished/model.safetensors
cp -r "$fixtures/text" weightless && printf '' >weightless/model.safetensors
row "a prompt that the context cannot hold" 2 "longer than the context" q --model weightless --prompt "$(printf 'x %.0s' {1..700})"
row "an id that the vocabulary does not have" 2 "token id 99999 at position 1" q --model weightless --skip-tokenizer-init --prompt "5, 99999"
row "words where there is no tokenizer" 2 '"ROMEO:"' q --model weightless --skip-tokenizer-init --prompt ROMEO:
row "bench of more sequences than there can be" 2 "--batches 70000" q bench --model weightless --batches 70000
row "bench of a prompt that fills the context" 2 "context is 512" q bench --model weightless --lengths 512
row "bench of no config" 2 "no-such.json" q bench --config no-such.json --dummy-weights
row "the reference of another model" 1 "not a usable reference" q parity --model weightless --reference "$fixtures/base/reference.safetensors"

echo "-- tokenizers"
# Changes the JSON of a checkpoint's file: json FILE 'PYTHON on t'.
json() { python3 -c "import json,sys; t=json.load(open('$1')); $2; json.dump(t,open('$1','w'))"; }
cp -r "$fixtures/text" odd && json odd/tokenizer.json 't["pre_tokenizer"]={"type":"FixedLength","length":0}'
row "a step that the tokenizer's library panics on is named" 1 "at least 1 character" q --model odd --prompt x
cp -r "$fixtures/text" huge && json huge/tokenizer.json 't["normalizer"]={"type":"Precompiled","precompiled_charsmap":"/////w=="}'
row "so is a table that is smaller than it says" 1 "states a trie" q --model huge --prompt x
cp -r "$fixtures/text" double
json double/tokenizer.json 't["normalizer"]={"type":"Sequence","normalizers":[{"type":"Replace","pattern":{"String":"a"},"content":"aa"}]*40}'
row "a normalizer that doubles forty times refuses the prompt" 1 "more than 16777216 bytes" q --model double --prompt a
cp -r "$fixtures/text" torn && truncate -s 1000 torn/tokenizer.json
row "a tokenizer that was cut is named" 1 "tokenizer.json is not a tokenizer" q --model torn --prompt x
cp -r "$fixtures/text" conflict && json conflict/tokenizer_config.json 't["added_tokens_decoder"]={"9": {"content": "<x>", "special": True}}'
row "a token with two ids is an error" 1 'gives the token "<x>" the id 9' q --model conflict --prompt x
cp -r "$fixtures/text" ends && json ends/generation_config.json 't["eos_token_id"]=5'
row "another end token than the tokenizer's is told" 0 "texts end at each of them" q --model ends --prompt x "${short[@]}"
row "texts that are the same are told" 0 "the texts of a prompt are the same" q --prompt x --num-sequences 2 "${short[@]}"
cp -r "$fixtures/text" all && json all/generation_config.json 't.update(top_k=-1, do_sample=True)'
row "a top-k of -1 keeps all" 0 "" q --model all --prompt x --max-new-tokens 2
echo "-- ranks of a launcher"
launched() { env RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=29977 MOE_RENDEZVOUS_TIMEOUT=1 "$@"; }
row "a secret that could be guessed" 2 "expected at least 16" launched MASTER_ADDR=127.0.0.1 MOE_WORLD_SECRET=short "$program" --tp 2 --prompt x
row "an address of another host" 1 "no address of this host" launched MASTER_ADDR=192.0.2.1 "$program" --tp 2 --prompt x
row "a rank that does not come" 1 "rank 1 did not appear within 1s" launched MASTER_ADDR=127.0.0.1 "$program" --tp 2 --prompt x

echo "-- prompts"
piped "a pipe is the prompt" 0 "" 'ROMEO:' "$program" "${short[@]}"
piped "an empty pipe is an error" 1 "prompt is empty" '' "$program" "${short[@]}"
row "several texts are told apart" 0 "=== text 2 of 2" q --prompt x --num-sequences 2 "${short[@]}"
head -c 4194304 /dev/zero | tr '\0' x >long.txt
row "megabytes are refused by their bytes" 2 "4194304 bytes" timeout 5 "$program" --prompt-file long.txt
cp -r "$fixtures/text" ids && rm -f ids/tokenizer.json
row "token ids need no tokenizer" 0 "" q --model ids --skip-tokenizer-init --prompt "5, 6 7" "${short[@]}"
row "and words are none" 2 '"ROMEO:"' q --model ids --skip-tokenizer --prompt ROMEO: "${short[@]}"
row "-n is refused and says why" 2 "--num-sequences" q --prompt x -n 2
row "stop escapes" 0 "" q --prompt ROMEO: --stop '\n' "${short[@]}"
row "seed -1" 0 "" q --prompt x --seed -1 --max-new-tokens 4
row "JSON" 0 '"finish_reason":"length"' q --prompt x --json "${short[@]}"
row "with token ids" 0 '"token_ids":[' q --prompt x --json "${short[@]}"
row "and log-probabilities" 0 '"top_logprobs":[' q --prompt x --json --logprobs 2 "${short[@]}"
row "several prompts" 0 "=== prompt 2 of 2" q --prompt x --prompt y "${short[@]}"
printf '{%% for m in messages %%}{{ m.role }}: {{ m.content }}\n{%% endfor %%}' >roles.jinja
row "one question through a template" 0 "" q --chat --system "Be kind." --prompt hi --chat-template roles.jinja "${short[@]}"
row "no template to ask through" 1 "no chat template" q --chat --prompt hi
row "no escapes on request" 0 "" q --prompt ROMEO: --stop '\n' --no-escape "${short[@]}"
if script --version >/dev/null 2>&1; then
  terminal() { env "$@" script -qec "'$program' ${flags[*]}" /dev/null; }
  flags=(--max-new-tokens 4)
  row "at a terminal the built-in prompt says so" 0 "No prompt is given" terminal TERM=xterm
  flags=(--prompt x "${short[@]}")
  row "and the last line how it went" 0 "8 new tokens" terminal TERM=xterm
  row "with the finish reason" 0 "finish reason: length" terminal TERM=xterm
  row "colours" 0 $'\e[' terminal TERM=xterm
  plain() { ! terminal "$@" | grep -q $'\e\['; }
  row "none with NO_COLOR" 0 "" plain TERM=xterm NO_COLOR=1
  row "none on a dumb terminal" 0 "" plain TERM=dumb
  row "which silences nothing" 0 "running on the CPU" terminal TERM=dumb
fi
row "the context is announced" 0 "context of 512" q --prompt x --max-new-tokens 100000000 --temperature 0

echo "-- names"
row "a misspelt command" 2 "'generate'" q gnerate
row "a word that is no command" 2 "unrecognized subcommand 'list'" q list
row "flags before the command" 0 "" q --model "$fixtures/text" generate --prompt x "${short[@]}"
for flag in "--dtype bfloat16" "--dtype float32" "--dtype float16" "--dtype auto" "--max-tokens 4" "--temp 0" \
  "--tensor-parallel-size 2" "--data-parallel-size 1" "-t 2"; do
  # shellcheck disable=SC2086  # a flag and its value
  row "$flag" 0 "" q -p x --seed 3 $flag
done
row "a prompt that begins with a dash" 0 "" q -p '- apples' "${short[@]}"
row "and a stop text" 0 "" q -p x --stop '---' "${short[@]}"
row "a flag is no prompt" 2 "a value is required for '--prompt" q --prompt --stats
row "a prompt without a flag" 0 "" q 'The sea is' "${short[@]}"
row "quiet" 0 "" bash -c '[ -z "$("$0" -p x -q --max-new-tokens 2 2>&1 >/dev/null)" ]' "$program"
for flag in "-m $fixtures/text" "-c 64" "--no-enable-prefix-caching" "-hf $fixtures/text"; do
  # shellcheck disable=SC2086  # a flag and its value
  row "${flag%% *}" 0 "" q -p x "${short[@]}" $flag
done
row "--revision of what is here" 2 "is on this disk" q -m "$fixtures/text" --revision main -p x
row "JSON in a file" 0 "" q -p x --json=said.json "${short[@]}"
row "holds the same" 0 '"finish_reason":"length"' cat said.json
printf 'root ::= "a"\n' >gbnf
row "llama.cpp's grammar is named" 2 "GBNF" q -p x --grammar-file gbnf
row "--version names what runs" 0 "runs by default: " q --version
row "version" 0 "$(basename "$program") 0." q --version
row "features" 0 "features:" q --version
row "instruction sets" 0 "instruction sets of this CPU:" q --version
for shell in bash zsh fish powershell elvish; do row "completions for $shell" 0 retry-errors q completions $shell; done
row "a shell that is none" 2 "possible values" q completions tcsh
q completions bash >complete.bash
row "bash reads its completions" 0 "" bash -n complete.bash
row "and offers the commands" 0 "batch" bash -c 'source ./complete.bash; f=$(complete -p "$0" | grep -o "_model[^ ]*" | head -n 1); COMP_WORDS=(m ba); COMP_CWORD=1; "$f" m ba m; echo "${COMPREPLY[@]}"' "$(basename "$program")"
row "bash offers a command's flags" 0 "--retry-errors" bash -c 'source ./complete.bash; f=$(complete -p "$0" | grep -o "_model[^ ]*" | head -n 1); COMP_WORDS=("$0" batch --re); COMP_CWORD=2; "$f" "$0" --re batch; echo "${COMPREPLY[@]}"' "$(basename "$program")"
row "man pages" 0 "" q man pages
row "say what flags do" 0 "Keep the k likeliest" cat "pages/$(basename "$program")-chat.1"
row "of a command" 0 "temperature" cat "pages/$(basename "$program")-chat.1"
if command -v mandoc >/dev/null; then
  row "which mandoc reads" 0 "" mandoc -T lint -W error "pages/$(basename "$program")-chat.1"
elif command -v man >/dev/null && man --version >/dev/null 2>&1; then
  row "which man renders" 0 "temperature" man -l "pages/$(basename "$program")-chat.1"
fi
row "short help" 0 "Examples:" q generate -h
row "long help lists values" 0 "possible values" q generate --help
wide() { "$program" "$@" | awk 'length > 100 { wide = 1; print } END { exit wide }'; }
for command in "" generate chat batch bench download inspect; do
  # shellcheck disable=SC2086  # no command is no word
  row "help of ${command:-the program} stays within 100 columns" 0 "" wide $command --help
done
for flag in --chat --json --json-schema; do row "short help shows $flag" 0 "$flag" q generate -h; done
lines() { [ "$("$program" generate -h | wc -l)" -lt 60 ]; }
row "short help fits a screen" 0 "" lines
row "batch's help says what its temperature is" 0 "batch: else" q batch --help

echo "-- structured output"
row "a choice" 0 "Nay" q --prompt ROMEO: --guided-choice Nay
row "a regular expression" 0 "7-7" q --prompt x --guided-regex '7-7'
row "a schema" 0 '5' q --prompt x --json-schema '{"const": 5}'
row "a schema that is not JSON" 2 "--json-schema: the JSON schema cannot be used" q --prompt x --json-schema '{'
row "a constant of more digits than a float has" 0 12345678901234567890123 q --prompt x --json-schema '{"const": 12345678901234567890123}'
row "a format that is not enforced, and look-ahead" 0 '"1"' q --prompt x --json-schema '{"format": "path", "type": "string", "pattern": "^(?!0)[01]$"}'
row "lists that cannot be kept distinct" 2 "uniqueItems is supported where" q --prompt x --json-schema '{"uniqueItems": true, "type": "array"}'
row "a keyword that is not understood" 2 '"not"' q --prompt x --json-schema '{"not": {}}'
row "a missing schema file" 2 "cannot read the file" q --prompt x -j no-such-file
row "two at once" 2 "cannot be used with" q --prompt x --json-object --guided-regex a
row "a faulty expression is told before the model is looked for" 2 "unclosed group" q --model /no/such --prompt x --guided-regex 'a('

echo "-- logs"
row "--log of no level" 2 "expected a level" q --prompt x --log bla
row "RUST_LOG of no level" 2 "RUST_LOG bla" env RUST_LOG=bla "$program" --prompt x
row "a log file" 0 "" q --prompt x --log-file log "${short[@]}"
row "holds the log" 0 "running on the CPU" cat log
quiet() { env RUST_LOG=warn "$program" --prompt x "${short[@]}" 2>&1 >/dev/null | wc -c | grep -qx 0; }
row "RUST_LOG is followed" 0 "" quiet
row "backends are explained in a file" 0 "" q --prompt x --explain-backends=why.json "${short[@]}"
row "as JSON" 0 "" python3 -m json.tool why.json
row "too many threads" 0 "--num-threads 1000" q --prompt x --num-threads 1000 "${short[@]}"

echo "-- chat, batch, bench"
printf '{{ messages[-1].content }}' >template.jinja
piped "a piped chat that fails" 1 "no answer" "$(printf 'word %.0s' {1..2000})\n" "$program" chat --chat-template template.jinja
printf '\xef\xbb\xbf{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"x"}],"max_tokens":4}}\n' >in.jsonl
chat=("$program" chat --model "$fixtures/text" "${short[@]}")
piped "the bundled model talks" 0 "" 'What news?\n' "$program" chat --max-new-tokens 8
piped "what cut an answer is named" 0 "[cut: --max-new-tokens 8]" 'hi\n' "${chat[@]}" --ignore-eos
piped "/set checks as the command line does" 0 "--max-new-tokens 0: expected at least 1" '/set max-new-tokens 0\n' "${chat[@]}"
piped "a misspelt chat command" 0 "Did you mean /regenerate?" '/regenrate\n' "${chat[@]}"
piped "an unknown sampling value" 0 "did you mean temperature?" '/set temprature 1\n' "${chat[@]}"
piped "another answer" 0 "2 messages are in" 'hi\n/set temperature 1\n/regenerate\n/save talk.json\n' "${chat[@]}"
piped "commands are listed" 0 "/regenerate" '/help\n' "${chat[@]}"
piped "a conversation is forgotten" 0 "[0 messages" 'hi\n/clear\n/stats\n' "${chat[@]}"
piped "a saved conversation is not replaced" 0 "/save! talk.json" 'hi\n/save talk.json\n' "${chat[@]}"
piped "and is loaded" 0 "of the context of" '/load talk.json\n/stats\n' "${chat[@]}"
# With this template the prompt begins the reasoning, which then never ends.
printf '{{ messages[-1].content }}<think>\n' >think.jinja
asked=(--chat --prompt hi --chat-template think.jinja --reasoning-parser qwen3 "${short[@]}")
row "reasoning is a field of its own" 0 '"content":null,"reasoning":"' q "${asked[@]}" --json
row "an unknown parser of tool calls" 2 "hermes" q --prompt x --tool-call-parser json
row "and of reasoning, with the list" 2 "openai_gptoss" q --prompt x --reasoning-parser thoughts
row "parsers of different models" 2 "openai belong together" q "${asked[@]}" --tool-call-parser openai
printf '{{ messages[0].content }}<|channel|>analysis<|message|>' >channels.jinja
row "a template shows the parser" 0 '"content":null,"reasoning":"' q --chat --prompt hi --chat-template channels.jinja "${short[@]}" --json
if script --version >/dev/null 2>&1; then
  shown() { env "$@" script -qec "'$program' ${asked[*]}" /dev/null; }
  row "and dimmed at a terminal" 0 $'\e[2m' shown TERM=xterm
  row "or tagged where there are no colours" 0 "<think>" shown TERM=xterm NO_COLOR=1
  # Simulates a user who types at a terminal; TERM says that it has no colours.
  typed() { printf 'hi\n/quit\n' | env "$@" TERM=dumb script -qec "'$program' chat --model '$fixtures/text' --max-new-tokens 8 --temperature 0 $no_history" /dev/null; }
  no_history= row "a terminal keeps its history" 0 "" typed XDG_STATE_HOME="$work/state"
  row "in a file" 0 '"hi"' cat state/moe/chat_history
  row "that only its owner reads" 0 600 stat -c %a state/moe/chat_history
  no_history=--no-history row "or none" 0 "" typed XDG_STATE_HOME="$work/none"
  row "and then no file" 1 "" test -e none
  pasted() { { sleep 2; printf 'one\ntwo\n'; sleep 3; printf '/stats\n'; sleep 1; printf '/quit\n'; } | env TERM="$1" script -qec "'$program' chat --model '$fixtures/text' --max-new-tokens 8 --no-history" /dev/null; }
  for term in xterm dumb; do row "lines that are pasted at once are one message ($term)" 0 "[2 messages" pasted $term; done
  touch state/file
  no_history= row "where none can be, a warning says so" 0 "no history is kept" typed XDG_STATE_HOME="$work/state/file"
fi
printf 'ROMEO:\n\nJULIET:\n' >lines.txt
row "lines of text are prompts" 0 "" q batch --input-format text --input lines.txt --output lines.jsonl "${short[@]}"
row "and are named by their numbers" 0 '"custom_id":"line-3"' cat lines.jsonl
row "--chat is for lines of text" 2 "--input-format text" q batch --chat --input lines.txt --output no.jsonl
printf '{"custom_id":"ids","url":"/v1/completions","body":{"prompt":[5,6],"max_tokens":2}}\n' >ids.jsonl
row "a batch of token ids" 0 '"token_ids":[' q batch --model ids --skip-tokenizer --input ids.jsonl --output -
row "errors of a batch set the exit code on request" 1 error q batch --input in.jsonl --output a.jsonl --fail-on-error
cp a.jsonl gone.jsonl
row "and are answered again on request" 0 "" q batch --input in.jsonl --output a.jsonl --retry-errors --chat-template template.jinja
row "another dtype is another setting" 2 dtype q batch --input in.jsonl --output a.jsonl --chat-template template.jinja --dtype f32
row "so is a context that would cut" 2 max_model_len q batch --input in.jsonl --output a.jsonl --chat-template template.jinja --max-model-len 4
sed 's/"content":"x"/"content":"y"/' in.jsonl >changed.jsonl
row "so is another prompt under the same id" 2 '"a"' q batch --input changed.jsonl --output a.jsonl --chat-template template.jinja
row "and another model" 2 "model was" q batch --model "$fixtures/text" --input in.jsonl --output a.jsonl --chat-template template.jinja
row "a rerun with other settings is refused" 2 temperature q batch --input in.jsonl --output a.jsonl --chat-template template.jinja --temperature 0.5
row "unless it may overwrite" 0 "1 request, " q batch --input changed.jsonl --output a.jsonl --chat-template template.jinja --temperature 0.5 --overwrite
printf '{"custom_id":"b","url":"/v1/completions","body":{"prompt":"x","max_tokens":2}}\n' >other.jsonl
row "an error whose line is gone stays" 0 "1 with errors of earlier runs" q batch --input other.jsonl --output gone.jsonl --retry-errors
row "with its record" 0 '"custom_id":"a"' cat gone.jsonl
row "errors are counted" 1 "1 with errors" q batch --input in.jsonl --output counted.jsonl
request() { printf '{"custom_id":"%s","url":"/v1/completions","body":{"prompt":"x","max_tokens":%s%s}}\n' "$@"; }
request m 2 ',"model":"gpt"' >model.jsonl
row "another model in a body" 1 '"status_code":404' q batch --input model.jsonl --output -
row "is let pass on request" 0 '"status_code":200' q batch --input model.jsonl --output - --any-model
request g 4 ',"guided_choice":["Nay"]' >guided.jsonl
request s 4 ',"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"not":{}}}}' >>guided.jsonl
row "structured output in bodies" 0 "2 requests" q batch --input guided.jsonl --output guided.out
row "a choice" 0 '"text":"Nay"' cat guided.out
row "a faulty schema is an error of its request" 0 '"status_code":400' cat guided.out
rules() { echo 'start: r0'; for i in $(seq 0 39999); do echo "r$i: r$((i + 1))"; done; echo 'r40000: "x"'; }
rules >rules.lark
row "a grammar that nests too deep is refused" 2 "at most 30000 are taken" q --model "$fixtures/text" --prompt x --guided-grammar rules.lark
row "answers are given for the other lines" 0 "2 requests" bash -c '
  python3 -c "import json
text = open(\"rules.lark\").read()
body = lambda **more: {\"prompt\": \"x\", \"max_tokens\": 2, **more}
for name, body in [(\"deep\", body(guided_grammar=text)), (\"plain\", body())]:
    print(json.dumps({\"custom_id\": name, \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": body}))" >deep.jsonl
  "$0" batch --input deep.jsonl --output deep.out' "$program"
for i in {1..300}; do request "$i" 64 ''; done >many.jsonl
{ request good 2 ''; echo "no JSON"; } >mixed.jsonl
row "errors are told by reason" 0 "1 as line 2: it is not JSON" q batch --input mixed.jsonl --output mixed.out
row "some errors have a code of their own" 3 "with errors" q batch --input mixed.jsonl --output mixed.out --fail-on-error
row "what a run costs is said" 0 "cost 0.0" q batch --input model.jsonl --output cost.out --any-model --price-input 1 --price-output 2
row "a price below zero" 2 "at least 0" q batch --input model.jsonl --output cost.out --price-input -1
row "counters are written for a scheduler" 0 "" q batch --input mixed.jsonl --output counted.out --metrics metrics.jsonl
row "as lines of JSON" 0 '"state":"finished"' cat metrics.jsonl
{ request one 8 ',"temperature":0'; request two 8 ',"temperature":0'; } >equal.jsonl
row "equal requests are computed once" 0 "1 answered as equal ones" q batch --input equal.jsonl --output equal.out
row "a batch without an answer fails" 1 "no line has an answer" q batch --input <(echo "no JSON") --output none.out
full() { "$program" "$@" 2>/dev/full; }
row "a full log disk ends no batch" 0 "" full batch --input many.jsonl --output full.out --progress-interval 0.01
row "and every line is answered" 0 300 grep -c custom_id full.out
headed() { "$program" "$@" 2>&1 | head -n 1; [ "$(wc -l <headed.out)" = 300 ]; }
row "nor does a reader that leaves" 0 "" headed batch --input many.jsonl --output headed.out --progress-interval 0.01
row "a full stdout is an error" 1 "cannot write to stdout" bash -c '"$0" --prompt x --max-new-tokens 2 >/dev/full' "$program"
gzip -k many.jsonl
row "a compressed input is read" 0 "300 requests" q batch --input many.jsonl.gz --output gz.out
iconv -f UTF-8 -t UTF-16 many.jsonl >wide.jsonl
row "UTF-16 is named" 2 "UTF-16" q batch --input wide.jsonl --output wide.out
row "progress in a log" 0 " / 300 requests, " q batch --input many.jsonl --output many.out --progress-interval 1
signalled() { "$program" batch --input long.jsonl --output "$1.out" --max-num-seqs 1 & sleep 2; kill "-$1" $!; wait $!; }
for signal in TERM HUP; do
  for i in {1..2000}; do request "$i" 500 ',"ignore_eos":true'; done >long.jsonl
  row "SIG$signal ends a batch as Ctrl-C does" 130 "run the same command again" signalled $signal
done
row "bench of the embedded model" 0 tok_s q bench --batches 1 --repeat 1 --prompt 8 --output 4 --lengths 16
printf '{"requests":[{"prompt_token_ids":[5,17],"max_tokens":4,"seed":1},{"prompt_token_ids":[9],"max_tokens":2,"seed":2}]}' >work.json
row "bench of a file of requests" 0 '"output_tokens": 6' q bench --workload work.json --repeat 1
printf '{"requests":[{"prompt_token_ids":[5,2048],"max_tokens":4,"seed":1}]}' >outside.json
row "an id outside of the vocabulary is named" 2 "requests[0]: prompt_token_ids[1]: expected an id below 2048" q bench --workload outside.json
row "a workload has its own sizes" 2 "cannot be used with" q bench --workload work.json --batches 2
row "a config without weights" 2 "--dummy-weights" q bench --config "$fixtures/base/config.json"
row "a prompt that fills the context" 2 "context is 512" q bench --model "$fixtures/text" --lengths 512
row "bench of a small checkpoint" 0 tok_s q bench --model "$fixtures/text" --batches 1 --repeat 1
row "devices" 0 cpu q list-devices
row "inspect says what runs" 0 '"runs_here": true' q inspect "$fixtures/text" --json
row "with keys without blanks" 0 '"available_memory_bytes"' q inspect "$fixtures/text" --json
row "and what does not" 1 "is truncated" q inspect unfinished
row "with another program's name" 1 'the program `moe` runs' q inspect deepseek

if command -v python3 >/dev/null; then
  echo "-- the hub"
  unset "${!HF_@}"
  cp "$fixtures/text/model.safetensors" unread/
  python3 "$here/hub.py" org/tiny="$fixtures/text" org/sharded="$fixtures/sharded" org/unread=unread \
    org/awq="$fixtures/quant-awq" --quantized org/awq=org/tiny org/unread=org/tiny org/lost=org/tiny --log asked --token hf_good >url &
  hub=$!
  until [ -s url ]; do sleep 0.1; done
  export HF_HOME="$work/hub" HF_ENDPOINT HF_TOKEN=hf_good
  HF_ENDPOINT=$(cat url)
  unasked() { ! grep -q 'storage\|safetensors' asked; }
  row "a model of the hub with a method that is not read is refused" 1 bitsandbytes q --model org/unread --prompt x
  row "so is a wrong value" 2 temperature q --model org/tiny --prompt x --temperature -1
  row "and a model of no such name" 1 "there is no model org/none" q --model org/none --prompt x
  row "and a revision that there is not" 1 "has no revision" q --model org/tiny@v2 --prompt x
  row "and a token that the hub does not know" 1 "does not accept the token" env HF_TOKEN=hf_bad "$program" --model org/tiny --prompt x
  row "all without asking for a weight" 0 "" unasked
  row "inspect shows what a model is that is not here" 0 "download org/tiny" q inspect org/tiny
  row "and that its tensors would load" 0 "runs here          yes" q inspect org/tiny
  row "with what it needs in fewer bits" 0 "weights in int4" q inspect org/tiny
  row "and the quantised variants that there are" 0 "org/awq: awq, " q inspect org/tiny
  row "of which one fits" 0 "variant that fits  org/awq" q inspect org/tiny
  row "one does not run" 0 "org/unread: does not run here: " q inspect org/tiny
  row "and one is gone" 0 "org/lost: does not run here: there is no model org/lost" q inspect org/tiny
  row "as fields of JSON" 0 '"variant_that_fits": "org/awq"' q inspect org/tiny --json
  row "an address in place of the name" 0 "models--org--sharded/snapshots/" q download https://huggingface.co/org/sharded/tree/main
  row "an address of a data set" 2 "not a model's" q download https://huggingface.co/datasets/org/sharded
  row "download prints the folder" 0 "$work/hub/hub/models--org--sharded/snapshots/" q download org/sharded
  row "and checks it" 0 "5 files are whole" q download org/sharded --check
  shard=$(echo "$work"/hub/hub/models--org--sharded/snapshots/*/model-00002-of-00003.safetensors)
  cp "$shard" whole.shard && head -c 1000 whole.shard >"$shard"
  row "a truncated file is found" 1 "damaged: expected SHA-256" q download org/sharded --check
  row "and repaired" 0 "downloading it again" q download org/sharded
  row "to the byte" 0 "" cmp "$shard" whole.shard
  row "everything comes again by force" 0 "downloading 3 files" q download org/sharded --force
  uncoloured() { ! "$program" download org/sharded --force 2>&1 | grep -q $'\e'; }
  row "without colours in a pipe" 0 "" uncoloured
  untold() { ! RUST_LOG=trace "$program" download org/sharded --force 2>&1 | grep -qE 'hf_good|Bearer|42 65 61 72'; }
  row "no log holds the token" 0 "" untold
  row "a download with a text" 0 "" q --model org/tiny --prompt the "${short[@]}"
  row "then inspect knows the weights" 0 "fits memory" q inspect org/tiny
  row "a quantised model is downloaded" 0 "models--org--awq" q download org/awq
  row "and its scheme is named" 1 "awq: int4 group 32 with zero points" q inspect org/awq
  row "as is what it lacks" 1 "tokenizer.json" q inspect org/awq
  if script --version >/dev/null 2>&1; then
    bars() { HF_HOME="$work/bars" script -qec "stty cols 90; '$program' download org/sharded" /dev/null; }
    row "at a terminal a download shows the whole" 0 "3 files" bars
  fi
  kill $hub
  wait $hub 2>/dev/null
  row "without the hub the copy is used" 0 "using the copy in the cache" q --model org/tiny --prompt the "${short[@]}"
fi
exit $failed
