#!/usr/bin/env bash
# `make gpu-check`: everything that only a GPU can show. STEPS, of which all are done unless it says otherwise:
#
#   build      the programs, with nvcc for this GPU
#   tests      the model and its operations in both precisions, a golden case, the largest micro-batch
#   ranks      NCCL, where there are two GPUs: losses as of one rank, the same bits again, and a rank that is killed
#   sanitize   compute-sanitizer on a subset of the tests
#   bench      the benchmark
#   torch      the same model and attention in PyTorch, if python3 has one that sees the GPU; it compiles the model for
#              each shape
#
# for example STEPS=tests,bench. Each step has a time limit; LIMIT=seconds is another for all of them. Results go to
# dev/bench/results/<gpu>.{md,json}: a row as soon as its step has ended, so that a run that is killed leaves what it
# has found out. Rows of other STEPS stay from earlier runs of the same commit. The report's last line says whether
# everything passed. Logs are in build/gpu_check, that of the running step too.
#
# To build it needs the CUDA toolkit (12.3 or later), a C++ compiler, and the headers of CLI11, nlohmann/json, toml++
# and GoogleTest. Where those are not installed: make gpu-check INCLUDES="folder ...", with GoogleTest's sources in it.
# Programs of make gpu-bundle are taken as they are: then there is a file `prebuilt` beside them.
#
# BUILD and RESULTS are the folders of the programs and of the report, if they are to be others than build and
# dev/bench/results. dev/test/test_gpu_check.cpp runs this script so, with the emulated GPU's programs in place of what
# nvcc builds.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
build=${BUILD:-build} results=${RESULTS:-dev/bench/results}
die() { echo "error: gpu-check: $*" >&2; exit 1; }
all_parts=(build tests ranks sanitize bench torch)
IFS=, read -ra parts <<<"${STEPS:-build,tests,ranks,sanitize,bench,torch}"
for part in "${parts[@]}"; do
  [[ " ${all_parts[*]} " = *" $part "* ]] || die "STEPS=$STEPS: $part is none of ${all_parts[*]}"
done
[[ ${LIMIT:-1} =~ ^[1-9][0-9]*$ ]] || die "LIMIT=$LIMIT: it must be a number of seconds"
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$name" ] || die "nvidia-smi shows no GPU; make test runs the same kernels on an emulated one"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
if [ -e "$build/prebuilt" ]; then
  source_of=$(<"$build/prebuilt")
else
  PRECISION=BF16 GPU_ARCH='' source scripts/gpu.sh
  [ -z "$gpu_problem" ] || die "$gpu_problem"
  source_of="$(git rev-parse --short HEAD 2>/dev/null || echo 'no git'), CUDA $cuda"
fi
beside_nvcc=$(dirname "$(command -v "${nvcc:-nvcc}")")
sanitizer=$(command -v compute-sanitizer || ls "$beside_nvcc/compute-sanitizer" 2>/dev/null ||
  ls -d /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)
slug=$(tr 'A-Z ' 'a-z-' <<<"$name" | tr -cd 'a-z0-9-')
report=$results/$slug.md ours=$results/$slug.json
# Here are the logs, and for each part its rows and what it prints below them.
state=$build/gpu_check
mkdir -p "$results" "$state"
[ "$(cat "$state/of" 2>/dev/null)" = "$name, $source_of" ] || rm -f "$state"/*
echo "$name, $source_of" >"$state/of"
export build sanitizer state ours

# The report, of all rows that there are. It is green once every part is done and none of its rows is RED.
write_report() {
  local part missing=()
  for part in "${all_parts[@]}"; do [ -e "$state/$part.done" ] || missing+=("$part"); done
  {
    printf '# %s\n\n`make gpu-check`, %s,\ndriver %s, %s.\n\n' "$name" "$source_of" "$driver" "$(date -u +%Y-%m-%d)"
    printf '| step | | time | |\n| --- | --- | --: | --- |\n'
    for part in "${all_parts[@]}"; do cat "$state/$part.rows" 2>/dev/null; done
    echo
    for part in bench torch; do cat "$state/$part.tables" 2>/dev/null; done
    echo
    if grep -qs '^|[^|]*| RED |' "$state"/*.rows; then
      echo "Not all green."
    elif [ ${#missing[@]} -gt 0 ]; then
      echo "Green so far; not done: ${missing[*]}."
    else
      echo "All green."
    fi
  } >"$report.part"
  mv "$report.part" "$report"
}

trap 'for step in "${begun[@]}"; do read -r _ child _ <<<"$step"; kill "$child" 2>/dev/null; done; exit 1' INT TERM HUP
failed=0
row() {  # row <a row of the table>
  [[ $1 != *"| RED |"* ]] || failed=1
  echo "$1" | tee -a "$state/$part.rows"
  write_report
}

# begin <limit in seconds> <what> <command...>: starts it, with its output in a log.
begun=()  # what has been started: "<limit> <process> <what>"
begin() {
  local limit=${LIMIT:-$1} what=$2 log
  shift 2
  log=$state/${what//[^A-Za-z0-9]/_}.log
  rm -f "$log.seconds"
  echo "== $what"
  timeout --kill-after=10 "$limit" bash -c '"$@"; status=$?; echo $SECONDS >"$0"; exit $status' "$log.seconds" "$@" \
    >"$log" 2>&1 &
  begun+=("$limit $! $what")
}

# finish: waits for all that has begun, and adds a row of each to the table. If it failed, was a test program in which
# no test ran, or took too long, the end of its output is printed.
finish() {
  local step limit what log verdict note status seconds is_green=true
  for step in "${begun[@]}"; do
    read -r limit child what <<<"$step"
    log=$state/${what//[^A-Za-z0-9]/_}.log verdict=green
    wait "$child"
    status=$?
    seconds=$(cat "$log.seconds" 2>/dev/null || echo "$limit")
    note=$(grep -E '^\[  PASSED  \]|^ *[0-9]+ FAILED TESTS?$|^=+ (ERROR|RACECHECK) SUMMARY' "$log" | tail -n 1 |
      sed 's/^\[  PASSED  \] //; s/^[= ]*//')
    if [ $status = 124 ] || [ $status = 137 ]; then note="stopped after $limit s"; fi
    if [ $status != 0 ] || grep -qF '[  PASSED  ] 0 tests.' "$log"; then verdict=RED; tail -n 60 "$log"; fi
    row "| $what | $verdict | $seconds s | $note |"
    [ $verdict = green ] || is_green=false
  done
  begun=()
  $is_green
}
step() { begin "$@"; finish; }

# Whether attention can be computed by wgmma, too: on an H100 or H200.
has_wgmma() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | grep -qx '9\.0'; }

build_programs() {
  if [ -e "$build/prebuilt" ]; then echo "taken as they are"; return; fi
  make --no-print-directory -j"$(nproc)" BUILD="$build" gpu-checked
}
part_build() { step 1200 "build for $name" build_programs || die "the build failed"; }

# Three updates of as many sequences as the program says fit: the first runs eagerly, the second is captured as a graph,
# the third replays it. Does the plan, with what it keeps free, hold on this GPU? All tokens are 1.
largest_micro_batch() {
  local tokens=$state/tokens.bin plan b trainer=$build/bf16/train_gpt2_sla
  local model=(-e d12 -i "$tokens" -t 1024 -v 0)
  yes $'\001' | tr '\n' '\0' | head -c 8000000 >"$tokens"
  plan=$("$trainer" "${model[@]}" -b 1 --dry-run) || return
  b=$(sed -n 's/.*the largest micro-batch that fits is //p' <<<"$plan")
  echo "$b sequences"
  "$trainer" "${model[@]}" -b "$b" -x 3
}
test_model() {  # test_model <precision> <what follows in its name>
  local shard
  for shard in 0 1 2; do
    GTEST_TOTAL_SHARDS=3 GTEST_SHARD_INDEX=$shard begin 300 "test_gpt2_sla, $1$2, $((shard + 1)) of 3" \
      "$build/$1/test_gpt2_sla"
  done
}
# The test programs at once: they wait for the GPU and for what the CPU computes.
part_tests() {
  local p
  local -x OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$((($(nproc) + 7) / 8))
  begin 90 "test_tile, bf16" "$build/bf16/test_tile"
  for p in bf16 fp32; do
    begin 300 "test_ops, $p" "$build/$p/test_ops"
    begin 300 "test_attention, $p" "$build/$p/test_attention"
    test_model $p ""
  done
  if has_wgmma; then
    SLA_ATTENTION=wgmma begin 300 "test_attention, bf16, wgmma" "$build/bf16/test_attention"
    SLA_ATTENTION=wgmma test_model bf16 ", wgmma"
  fi
  finish
  step 60 "train_gpt2_sla, a golden case" "$build/bf16/train_gpt2_sla" -e dev/test/golden/paper_default \
    -i dev/test/golden/paper_default/tokens.bin -b 2 -t 32 -x 10 -k constant -l 1e-4 -v 0
  step 120 "train_gpt2_sla, the largest micro-batch" largest_micro_batch
}

# train_ranks <name> <ranks> <options...>: a small model, to $state/ranks/<name>; the ranks' pids are in <name>.pid.*.
train_ranks() {
  local out=$state/ranks/$1 trainer=$build/nccl/bf16/train_gpt2_sla
  [ -x "$trainer" ] || trainer=$build/bf16/train_gpt2_sla
  rm -rf "$out"*
  scripts/launch.sh "$2" bash -c 'echo $$ >"$0.pid.${RANK-0}"; exec "$@"' "$out" "$trainer" \
    -e dev/test/golden/paper_default -i dev/test/golden/paper_default/tokens.bin \
    -b 1 -t 32 -d 128 -x 3 -k constant -l 1e-3 -v 0 -o "$out" "${@:3}"
}
losses() { sed -n 's/.*"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2/p' "$state/ranks/$1/log.jsonl"; }
# Twice, with the same bits, and one rank's losses and norms but for the order of sums, which bf16's rounding enlarges.
two_ranks() {
  local folder=$state/ranks file
  train_ranks "zero_$1" 2 --zero "$1" && train_ranks again 2 --zero "$1" || return
  for file in model optimizer; do
    cmp "$folder"/{"zero_$1",again}/step_00000003/$file.safetensors || return
  done
  paste <(losses one) <(losses "zero_$1") | tee /dev/stderr | awk '
    function differ(a, b, share) { return !(a - b <= share * b && b - a <= share * b) }
    differ($1, $3, 1e-4) || differ($2, $4, 1e-3) { bad = 1 } END { exit bad || NR != 3 }'
}
killed_rank() {
  local out=$state/ranks/killed launch
  train_ranks killed 2 -x 1000000 2>"$state/ranks/errors" &
  launch=$!
  until grep -qs '"step":3,' "$out/log.jsonl"; do
    kill -0 $launch || { cat "$state/ranks/errors"; return 1; }
    sleep 0.1
  done
  kill -9 "$(<"$out.pid.1")"
  wait $launch
  [ $? = 137 ] && grep 'error: rank 1 (pid .* has died' "$state/ranks/errors" && ! kill -0 "$(<"$out.pid.0")"
}
part_ranks() {
  local why=
  mkdir -p "$state/ranks"
  if [ "$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)" -lt 2 ]; then
    why="it takes two GPUs, and there is one"
  else
    why=$(train_ranks dry 2 --dry-run 2>&1 | grep -om 1 'built without NCCL\|libnccl[^:]*: cannot open')
  fi
  if [ -n "$why" ]; then row "| NCCL | not tested | | $why |"; return; fi
  step 120 "one rank" train_ranks one 1
  for zero in 0 1; do step 120 "two ranks, --zero $zero" two_ranks $zero; done
  step 120 "a rank that is killed" killed_rank
}

# sanitized <tool> <program> <filter>: the program's tests that match, under the tool, which must have found nothing.
# racecheck looks at this project's kernels alone, whose names end in _kernel: those of libraries take most of the time.
sanitized() {
  local log=$state/sanitizer_output.$BASHPID options=(--tool "$1" --error-exitcode 1)
  [ "$1" = memcheck ] || options+=(--kernel-name kernel_substring=_kernel)
  "$sanitizer" "${options[@]}" "$2" --gtest_filter="$3" | tee "$log"
  [ "${PIPESTATUS[0]}" = 0 ] && grep -qE '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log"
}
has_tests() {  # has_tests <program> <filter...>: each matches a test
  for filter in "${@:2}"; do "$1" --gtest_list_tests --gtest_filter="$filter" | grep '^  ' || return; done
}
# sanitize <tool> <what> <program> <filter>
sanitize() { begin 300 "compute-sanitizer $1, $2" sanitized "$1" "$3" "$4"; }
# The subset: one wiring with accumulation, with and without recomputation, generation, and each operation once, without
# the tests that go through every length. racecheck of CUDA 13.0 ends with an internal error where cuBLASLt's kernels
# for an H200 run, also if it is not to look at them: it leaves out what calls them.
part_sanitize() {
  local short=('*HasTheLosses*/nine_of_twelve' '*HasThemWhenBlocks*/nine_of_twelve' 'Generation.Continues*') p t tool
  local long='-*Every*Length*'
  if [ -z "$sanitizer" ]; then
    row "| compute-sanitizer | RED | | not found beside nvcc |"
    return
  fi
  step 60 "the subset's tests exist" has_tests "$build/bf16/test_gpt2_sla" "${short[@]}"
  for p in bf16 fp32; do sanitize memcheck "model, $p" "$build/$p/test_gpt2_sla" "$(IFS=:; echo "${short[*]}")"; done
  sanitize memcheck "test_ops, bf16" "$build/bf16/test_ops" "$long"
  sanitize racecheck "test_ops, bf16" "$build/bf16/test_ops" "$long:*Matmul*:*BatchedGemm*:*Muon*"
  for tool in memcheck racecheck; do
    for t in test_tile test_attention; do sanitize $tool "$t, bf16" "$build/bf16/$t" "$long"; done
    if has_wgmma; then
      SLA_ATTENTION=wgmma sanitize $tool "test_attention, bf16, wgmma" "$build/bf16/test_attention" 'Attention.*'
    fi
  done
  finish
}

benchmark() { "$build/bf16/bench_gpu" --json "$ours" >"$state/bench.tables"; }
part_bench() { step 400 "benchmark" benchmark; }

# torch <arguments>: a table of PyTorch's figures beside those of the benchmark.
torch() { echo && python3 dev/bench/torch_sla.py "$@" --ours "$ours"; }
torch_attention() { torch attention --heads 12 --head-size 64 "$@" && torch attention --heads 6 --head-size 128 "$@"; }
to_tables() { "$@" >>"$state/torch.tables"; }
part_torch() {
  if ! python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    row "| PyTorch | not timed | | python3 has no PyTorch that sees the GPU |"
    return
  fi
  step 120 "PyTorch computes the same function" python3 dev/bench/torch_sla.py check dev/test/golden
  if [ ! -e "$ours" ]; then
    row "| PyTorch | RED | | there are no figures of the benchmark to compare with: STEPS=bench,torch |"
    return
  fi
  step 240 "PyTorch, attention" to_tables torch_attention --seq-lens 1024,4096,8192,16384 --tokens 32768
  step 540 "PyTorch, training" to_tables torch train --model d12 --wiring plain --wiring 'sla(9,9)' \
    --seq-len 1024,4096,8192,16384 --micro-batch 32,8,4,2
}

export -f build_programs largest_micro_batch train_ranks losses two_ranks killed_rank sanitized has_tests
export -f benchmark torch torch_attention to_tables
for part in "${parts[@]}"; do
  rm -f "$state/$part".{rows,tables,done}
  "part_$part"
  touch "$state/$part.done"
done
write_report
cat "$report"
[ $failed = 0 ]
