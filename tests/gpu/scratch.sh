#!/usr/bin/env bash
# The program of moe-layer's README, built outside of the workspace as the README says (`cargo xtask dist --scratch`),
# must run its block on the GPU.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
program="$root/bin/scratch"
[ -x "$program" ] || { echo "error: the bundle has no bin/scratch; make it by: cargo xtask dist --scratch" && exit 1; }
said=$(timeout 60 "$program")
echo "$said"
case "$said" in *Cuda*) ;; *) echo "error: expected the block to run on a CUDA device" && exit 1 ;; esac
