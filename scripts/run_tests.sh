#!/usr/bin/env bash
# Runs GoogleTest programs one after the other and adds up their tests. The last line is `N passed, N failed`; the exit status says
# the same. A program that dies counts its unfinished test as failed.
set -uo pipefail
cd "$(dirname "$0")/.."
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for program in "$@"; do
  echo "== $program"
  start=$SECONDS
  GTEST_COLOR=no "$program" >"$log" 2>&1
  status=$?
  ok=$(grep -c '^\[       OK \]' "$log")
  bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log")
  if [ $status -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi  # crashed, or could not start
  if [ $status -ne 0 ]; then cat "$log"; fi
  echo "   $ok passed, $bad failed, $((SECONDS - start)) s"
  passed=$((passed + ok)) failed=$((failed + bad))
done
if [ $passed -eq 0 ]; then failed=$((failed + 1)); fi  # nothing ran: that is no success
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
