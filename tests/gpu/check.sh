# The scripts in this folder source this file. It runs a step of a script and prints one line. Logs go to $out; a
# failure sets $failed.

# check NAME SECONDS COMMAND...: prints one line, and the end of the log if the command fails.
check() {
  local name=$1 seconds=$2 start=$SECONDS
  shift 2
  if timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - start)) s)"
  else
    echo "FAILED  $name (exit code $?, $((SECONDS - start)) s)"
    failed=1
    grep -vE '^ *$' "$out/$name.log" | tail -n 12 | cut -c1-300
  fi
}
