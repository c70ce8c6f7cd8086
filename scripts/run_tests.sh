#!/usr/bin/env bash
# Runs GoogleTest programs, as many at a time as there are cores, and adds up their tests. The last line is `N passed, N failed`; the
# exit status says the same. A program that dies counts its unfinished test as failed.
set -uo pipefail
cd "$(dirname "$0")/.."
# Threads that wait for work sleep: spinning, they would take the cores from the other programs.
export OMP_WAIT_POLICY=passive
export results=$(mktemp)
trap 'rm -f "$results"' EXIT

run() {
  local program=$1 log start=$SECONDS status ok bad
  case $program in *_emu) export OMP_NUM_THREADS=1 ;; esac  # its matmuls are tiny
  log=$(mktemp)
  GTEST_COLOR=no "$program" >"$log" 2>&1
  status=$?
  ok=$(grep -c '^\[       OK \]' "$log")
  bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log")
  if [ $status -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi  # crashed, or could not start
  echo "$ok $bad" >>"$results"
  echo "== $program
$([ $status -eq 0 ] || cat "$log")
   $ok passed, $bad failed, $((SECONDS - start)) s" | sed '/^$/d'
  rm -f "$log"
}
export -f run

# Those that take long come last in the list, and are started first.
printf '%s\n' "$@" | tac | xargs -n 1 -P "$(nproc)" bash -c 'run "$0"'
awk '{ passed += $1; failed += $2 } END { if (NR != n || passed == 0) failed++
  print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 }' n=$# "$results"
