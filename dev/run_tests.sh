#!/usr/bin/env bash
# Runs GoogleTest programs, one more at a time than there are cores, because some wait for what they have started, in
# the order given: longest first.
#   [SHARDED="PROGRAM..." PART=k/n] [LEAVE_OUT="WORD..."] [SKIP=FILTER] dev/run_tests.sh quick|rest|all PROGRAM...
# quick: all tests but those whose names begin with Long. rest: after `quick`, those that it has not run. all: all of
# them. A program in SHARDED runs every n-th test, from the k-th on, but none whose parameter is named
# after a word of LEAVE_OUT, such as fp32. No program runs a test that SKIP, a filter of GoogleTest's, matches.
# Prints what failing tests print; build/test_logs has the whole output. The last line is `N passed, N failed`; `rest`
# adds the counts of the `quick` before it; the exit status says the same. A test in which a program crashes has
# failed, as has a program that runs no test, unless `quick` has run all that it has.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
# Threads that wait for work sleep: spinning, they would take the cores from the other programs.
export OMP_WAIT_POLICY=passive
export mode=$1 counts=build/test_counts/$1 logs=build/test_logs/$1
shift
mkdir -p build/test_counts "$logs"
: >"$counts"

# The log of a program without its passing tests.
failures() {
  awk '/^\[ RUN      \] / { text = "" } { text = text $0 "\n" }
       /\[       OK \] .*ms\)$|\[  SKIPPED \] .*ms\)$/ { text = "" }
       /\[  FAILED  \] .*ms\)$/ { printf "%s", text; text = "" } END { printf "%s", text }' "$1"
}
export -f failures

run() {
  local program=$1 filter='*' without=- log start=$SECONDS status ran ok bad skipped tests shard=1/1
  case $mode in
    quick) filter='-Long*' without=: ;;  # all that follows a filter's dash is left out
    rest) grep -q "^$program " build/test_counts/quick && filter='Long*' ;;
  esac
  case " ${SHARDED:-} " in *" $program "*) shard=$PART ;; esac
  # A program without a test in this share has passed; one that cannot list them fails below. Not by
  # GTEST_TOTAL_SHARDS, which the programs that a test starts would see as well.
  if [ "$filter" = 'Long*' ] || [ $shard != 1/1 ] || [ -n "${SKIP:-}" ]; then
    local left_out=
    [ "$filter" != 'Long*' ] && [ $shard = 1/1 ] || left_out=$(printf '*/%s_*:' ${LEAVE_OUT:-none})
    left_out+=${SKIP:-}
    if tests=$("$program" --gtest_list_tests --gtest_filter="$filter$without$left_out"); then
      filter=$(awk -v part="${shard%/*}" -v parts="${shard#*/}" '/^[^ ]/ { suite = $1 }
        /^ / && i++ % parts == part - 1 { printf "%s%s%s", separator, suite, $1; separator = ":" }' <<<"$tests")
      if [ -z "$filter" ]; then echo "$program 0 0" >>"$counts"; return; fi
    fi
  fi
  case $program in *_emu) export OMP_NUM_THREADS=1 ;; esac  # its matmuls are tiny
  log=$logs/$(tr / _ <<<"${program#build/}")
  GTEST_COLOR=no "$program" --gtest_filter="$filter" >"$log" 2>&1
  status=$?
  ran=$(grep -c '^\[ RUN      \] ' "$log")
  ok=$(grep -c '\[       OK \] .*ms)$' "$log")
  bad=$(grep -c '\[  FAILED  \] .*ms)$' "$log")
  skipped=$(grep -c '\[  SKIPPED \] .*ms)$' "$log")
  bad=$((bad + ran - ok - bad - skipped))  # and those that did not end
  if [ "$bad" -eq 0 ] && { [ $status -ne 0 ] || [ "$ran" -eq 0 ]; }; then bad=1; fi
  echo "$program $ok $bad" >>"$counts"
  echo "== $program
$([ "$bad" -eq 0 ] || { failures "$log"; echo "   exit status $status"; })
   $ok passed, $bad failed, $([ "$skipped" -eq 0 ] || echo "$skipped skipped, ")$((SECONDS - start)) s" | sed '/^$/d'
}
export -f run

printf '%s\n' "$@" | xargs -n 1 -P "$(($(nproc) + 1))" bash -c 'run "$0"'
if [ "$mode" = rest ]; then
  [ -s build/test_counts/quick ] || echo "error: no counts of the quick tests; run make test first" >&2
  cat build/test_counts/quick >>"$counts" || echo "quick 0 1" >>"$counts"
fi
awk '{ passed += $2; failed += $3 } END { if (NR < n || passed == 0) failed++
  print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 }' n=$# "$counts"
