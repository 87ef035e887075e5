#!/usr/bin/env bash
# Checks that structured output is always valid, and measures its cost. structured.py does the work.
#
#   tests/cli/structured.sh [PROGRAM [OPTION..]]     default: target/release/moe
set -euo pipefail
program=$(realpath "${1:-target/release/moe}")
exec python3 "$(dirname "$0")/structured.py" "$program" "${@:2}"
