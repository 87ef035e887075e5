#!/usr/bin/env bash
# Is structured output always valid, and what does it cost? See structured.py, which does the work.
#
#   tests/cli/structured.sh [PROGRAM [OPTION..]]     default: target/release/moe
set -euo pipefail
program=$(realpath "${1:-target/release/moe}")
exec python3 "$(dirname "$0")/structured.py" "$program" "${@:2}"
