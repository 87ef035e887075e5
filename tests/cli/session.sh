#!/usr/bin/env bash
# Records target/a-session.md: the screens of a new user of `moe` in a terminal of 100 columns, with a model from a hub
# on this machine (hub.py). Each screen must contain the words that are given next to its command. It needs tmux and
# python3.
#
#   tests/cli/session.sh [PROGRAM [PAGE]]     default: target/release/moe target/a-session.md
set -euo pipefail
program=$(realpath "${1:-target/release/moe}")
page=$(realpath -m "${2:-target/a-session.md}")
here=$(realpath "$(dirname "$0")")
# The folder is fixed, because the screens show its name.
work=/tmp/moe-session
mkdir "$work" || { echo "$work: expected no such folder; delete it" >&2; exit 1; }
hub=
terminal() { tmux -L moe-session "$@"; }
finish() {
  terminal kill-server 2>/dev/null || true
  [ -z "$hub" ] || kill "$hub"
  rm -rf "$work"
}
trap finish EXIT

# The play model of the program as a repository with a chat template, in three shards, over a slow connection.
mkdir "$work/bin" "$work/play" "$work/here"
ln -s "$program" "$work/bin/moe"
cp "$here"/../../models/families/checkpoint/{config,generation_config,tokenizer,tokenizer_config}.json \
  "$here/../../models/families/checkpoint/model.safetensors" "$work/play"
cat >"$work/play/chat_template.jinja" <<'END'
{% for m in messages %}{{ 'First Citizen' if m.role == 'user' else 'MENENIUS' }}:
{{ m.content }}

{% endfor %}{% if add_generation_prompt %}MENENIUS:
{% endif %}
END
python3 "$here/hub.py" org/play="$work/play" --shards 3 --speed 2500000 >"$work/url" &
hub=$!
until [ -s "$work/url" ]; do sleep 0.1; done
for i in {1..300}; do
  tokens=64
  [ "$i" != 8 ] || tokens='"many"'
  echo '{"custom_id": "'"$i"'", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ROMEO:\n", "max_tokens": '"$tokens"'}}'
done >"$work/here/in.jsonl"
: >"$work/empty"
terminal -f "$work/empty" new-session -d -x 100 -y 45 -c "$work/here" env -i PATH="$work/bin:/usr/bin:/bin" TERM="$TERM" LANG=C.UTF-8 \
  HOME="$work" HF_ENDPOINT="$(cat "$work/url")" PS1='$ ' bash --norc

shown() { terminal capture-pane -p -S - | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'; }
# Prints the screen once it contains the words and, unless the third argument says otherwise, its last line is a prompt.
await() {
  local words=$1 prompt=${2-[$>]}
  for _ in {1..200}; do
    if shown | grep -qF -- "$words" && { [ -z "$prompt" ] || shown | tail -n 1 | grep -qx "$prompt"; }; then return; fi
    sleep 0.1
  done
  echo "expected \"$words\" on this screen:" >&2
  shown >&2
  exit 1
}
keys() { terminal send-keys -l -- "$1" && terminal send-keys Enter; }
# An empty screen with a prompt.
fresh() {
  keys clear && sleep 0.4
  terminal clear-history
  await '$'
}
# screen WORDS COMMAND [WORDS COMMAND]..: types commands, and adds the screen to the page.
screen() {
  fresh
  while [ $# -gt 0 ]; do
    keys "$2"
    await "$1"
    shift 2
  done
  put
}
# halfway WORDS COMMAND: adds the screen while the command runs, as soon as it contains the words.
halfway() {
  fresh
  keys "$2"
  await "$1" ''
  put
}
put() { printf '```text\n%s\n```\n\n' "$(shown | sed '$ { /^[$>]$/d }')"; }
say() { printf '%s\n\n' "$1"; }

record() {
  say '# A session'
  say "A new user at a terminal of 100 columns, recorded by \`tests/cli/session.sh\`: every line is what the terminal showed, keys included. The script checks
each screen. The hub is \`tests/cli/hub.py\` on the same machine, slowed to 2.5 MB/s; its one repository, \`org/play\`, is the embedded model with a chat
template. Program: $("$program" --version | head -n 1)."
  say '## Text'
  screen 'finish reason' 'moe --prompt "First Citizen:" --max-new-tokens 48 --seed 5' \
    '"usage"' 'moe --prompt ROMEO: --max-new-tokens 8 --temperature 0 --json --log warn'
  say '## A model of the hub'
  say 'Before the weights are downloaded, `inspect` shows what the config says; `download` shows the progress of each file and of all.'
  screen 'not here' 'moe inspect org/play'
  halfway 'model-00002-of' 'moe download org/play'
  await snapshots
  say 'At its end, and what can be asked then:'
  put
  screen 'are whole' 'moe download org/play --check' 'fits memory' 'moe inspect org/play'
  say '## A conversation'
  screen leaves "moe chat --model org/play --stop '\\n\\n' --max-new-tokens 60 --seed 1" '>' 'What news from the senate?' \
    'tok/s' /stats '>' '/set temperature 0.3' '>' /regenerate 'Did you mean' /histry 'talk.json' '/save talk.json' '$' /quit
  say '## A file of requests'
  say 'Three hundred requests, one of them faulty. While it runs:'
  halfway ' left ' 'moe batch --model org/play --input in.jsonl --output out.jsonl'
  await '300 requests, '
  say 'At its end; a rerun finds all answered, and one with other settings is refused:'
  put
  screen 'done before' 'moe batch --model org/play --input in.jsonl --output out.jsonl' \
    'temperature was' 'moe batch --model org/play --input in.jsonl --output out.jsonl --temperature 0' \
    BadRequestError "grep '\"status_code\":400' out.jsonl"
  say '## Mistakes'
  screen "'generate'" 'moe gnerate' 'at least 1' 'moe --prompt x --max-new-tokens 0' \
    'there is no model org/plya' 'moe --model org/plya --prompt x' 'has no revision' 'moe inspect org/play@v2'
}
record >"$work/page.md"
# One empty line at the end.
sed -e '${/^$/d}' "$work/page.md" >"$page"
echo "$page: $(wc -l <"$page") lines"
