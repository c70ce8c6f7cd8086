#!/usr/bin/env bash
# `make gpu-check`: everything that only a GPU can show. STEPS; all but `tune` are done unless STEPS names some:
#
#   build      the programs, with nvcc for this GPU
#   tests      the model and its operations in both precisions, a golden case, the largest micro-batch
#   nccl       2 and 4 ranks, on a GPU each or, by NCCL 2.30 or later, on fewer: losses as of one rank, the same bits
#              again, resumed by more and by fewer, and a rank that is killed or stopped
#   sanitize   compute-sanitizer on a subset of the tests
#   bench      the benchmark
#   torch      the same model and attention in PyTorch, if python3 has one that sees the GPU; it compiles the model for
#              each shape
#   tune       what is fastest where there is a choice: algorithms of matmuls, and attention's kernels beside each other
#              and beside PyTorch's; and what ncu says of an update's kernels
#
# for example STEPS=tests,bench. Each step has a time limit; LIMIT=seconds is another for all of them. Results go to
# dev/bench/results/<gpu>.{md,json}: a row as soon as its step has ended, so that a run that is killed leaves what it
# has found out. Rows of other STEPS stay from earlier runs of the same commit. The report's last line says whether
# everything passed. Logs are in build/gpu_check, the running step's too.
#
# To build it needs the CUDA toolkit (12.3 or later), a C++ compiler, and the headers of CLI11, nlohmann/json, toml++
# and GoogleTest. Where those are not installed: make gpu-check INCLUDES="folder ...", with GoogleTest's sources in it.
# Programs of make gpu-bundle are taken as they are: then there is a file `prebuilt` beside them.
#
# BUILD and RESULTS are the folders of the programs and of the report, if they are to be others than build and
# dev/bench/results. dev/test/test_gpu_check.cpp runs this script so, with the emulated GPU's programs in place of what
# nvcc builds. NCCL_LIB=folder has libnccl, if it is to be another than the one that the loader finds.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
build=${BUILD:-build} results=${RESULTS:-dev/bench/results}
die() { echo "error: gpu-check: $*" >&2; exit 1; }
all_parts=(build tests nccl sanitize bench torch)
IFS=, read -ra parts <<<"${STEPS:-build,tests,nccl,sanitize,bench,torch}"
for part in "${parts[@]}"; do
  [[ " ${all_parts[*]} tune " = *" $part "* ]] || die "STEPS=$STEPS: $part is none of ${all_parts[*]} tune"
done
[[ ${LIMIT:-1} =~ ^[1-9][0-9]*$ ]] || die "LIMIT=$LIMIT: it must be a number of seconds"
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || name=
name=${name%%$'\n'*}
[ -n "$name" ] || die "nvidia-smi shows no GPU; make test runs the same kernels on an emulated one"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
if [ -e "$build/prebuilt" ]; then
  source_of=$(<"$build/prebuilt")
else
  PRECISION=BF16 GPU_ARCH='' source scripts/gpu.sh
  [ -z "$gpu_problem" ] || die "$gpu_problem"
  source_of="$(git rev-parse --short HEAD 2>/dev/null || echo 'no git'), CUDA $cuda"
fi
[ -z "${NCCL_LIB-}" ] || export LD_LIBRARY_PATH=$NCCL_LIB${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
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
export build sanitizer state ours gpus

# The report with all rows that there are. It is green once every part is done and none of its rows is RED.
write_report() {
  local part missing=()
  for part in "${all_parts[@]}"; do [ -e "$state/$part.done" ] || missing+=("$part"); done
  {
    printf '# %s\n\n`make gpu-check`, %s,\ndriver %s, %s.\n\n' "$name" "$source_of" "$driver" "$(date -u +%Y-%m-%d)"
    printf '| step | | time | |\n| --- | --- | --: | --- |\n'
    for part in "${all_parts[@]}" tune; do cat "$state/$part.rows" 2>/dev/null; done
    echo
    for part in bench torch tune; do cat "$state/$part.tables" 2>/dev/null; done
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
    note=$(grep -E '^\[  PASSED  \]|^ *[0-9]+ FAILED TESTS?$|^=+ (ERROR|RACECHECK) SUMMARY|^note: ' "$log" |
      tail -n 1 | sed 's/^\[  PASSED  \] //; s/^[= ]*//; s/^note: //')
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
  plan=$("$trainer" "${model[@]}" -b 1 --json --dry-run) || return
  b=$(sed -n '1s/.*"largest_micro_batch":\([0-9]*\).*/\1/p' <<<"$plan")
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
    for p in wgmma candidates candidates-ds; do
      SLA_ATTENTION=$p begin 300 "test_attention, bf16, $p" "$build/bf16/test_attention"
    done
    SLA_ATTENTION=wgmma test_model bf16 ", wgmma"
  fi
  finish
  step 60 "train_gpt2_sla, a golden case" "$build/bf16/train_gpt2_sla" -e dev/test/golden/paper_default \
    -i dev/test/golden/paper_default/tokens.bin -b 2 -t 32 -x 10 -k constant -l 1e-4 -v 0
  step 120 "train_gpt2_sla, the largest micro-batch" largest_micro_batch
}

# train_ranks <name> <ranks> <options...>: a small model, to $state/nccl/<name>; the ranks' pids are in <name>.pid.*.
# Each rank has at least four micro-batches: the first and the last run beside NCCL, the others as a graph. Ranks
# that outnumber the GPUs share them, where NCCL may lock: then the run ends in a minute.
train_ranks() {
  local out=$state/nccl/$1 trainer=$build/nccl/bf16/train_gpt2_sla
  [ -x "$trainer" ] || trainer=$build/bf16/train_gpt2_sla
  [ "$2" -le "$gpus" ] || local -x NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4
  scripts/launch.sh "$2" bash -c 'echo $$ >"$0.pid.${RANK-0}"; exec "$@"' "$out" "$trainer" \
    -e dev/test/golden/paper_default -i dev/test/golden/paper_default/tokens.bin -b 1 -t 32 -d 512 -x 20 \
    -k constant -l 1e-3 -v 0 -n 10 --hang-timeout 60 -o "$out" "${@:3}"
}
# steps <name>: the run's updates, with loss and norm.
steps() { sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9][^,]*\),"grad_norm":\([0-9][^,]*\),.*/\1 \2 \3/p' \
  "$state/nccl/$1/log.jsonl"; }
# as_one_rank <name> <updates>: whether the run made the last so many of one rank's, with its losses and norms but for
# the order of sums, which bf16's rounding enlarges.
as_one_rank() {
  paste <(steps one | tail -n "$2") <(steps "$1") | awk -v updates="$2" '
    function share(a, b) { return (a > b ? a - b : b - a) / b }
    function greater(a, b) { return a > b ? a : b }
    { print; loss = greater(loss, share($5, $2)); norm = greater(norm, share($6, $3)) }
    END {
      printf "note: losses differ by %.0e, norms by %.0e\n", loss, norm
      exit NR != updates || loss > 1e-4 || norm > 1e-3
    }'
}
several_ranks() { train_ranks "$1_zero_$2" "$1" --zero "$2" && as_one_rank "$1_zero_$2" 20; }
same_bits() {
  local file
  train_ranks "again_$1" 2 --zero "$1" || return
  for file in model optimizer; do
    cmp "$state/nccl"/{"2_zero_$1","again_$1"}/step_00000020/$file.safetensors || return
  done
}
# resumed <ranks> <name>: from the middle of that run.
resumed() {
  local out=$state/nccl/resumed_by_$1
  mkdir "$out" && cp -r "$state/nccl/$2/step_00000010" "$out" && train_ranks "resumed_by_$1" "$1" -y || return
  as_one_rank "resumed_by_$1" 10
}
# lost_rank <signal> <status> <message>: whether a run without end ends so when its rank 1 gets the signal.
lost_rank() {
  local out=$state/nccl/$1 errors=$state/nccl/$1.errors launch begin status tenths rank
  train_ranks "$1" 2 -x 1000000 --hang-timeout 20 2>"$errors" &
  launch=$!
  until grep -qs '"step":3,' "$out/log.jsonl"; do
    kill -0 $launch || { cat "$errors"; return 1; }
    sleep 0.1
  done
  begin=$(date +%s%N)
  kill "-$1" "$(<"$out.pid.1")"
  wait $launch
  status=$? tenths=$((($(date +%s%N) - begin) / 100000000))
  echo "note: ended after $((tenths / 10)).$((tenths % 10)) s: $(grep -m 1 '^error: ' "$errors")"
  for rank in 0 1; do ! kill -0 "$(<"$out.pid.$rank")" || return; done
  [ $status = "$2" ] && grep -q "^error: $3" "$errors"
}
part_nccl() {
  local ranks zero why
  rm -rf "$state/nccl"
  mkdir "$state/nccl"
  for ranks in 2 4; do
    why=$(train_ranks dry $ranks --dry-run 2>&1 |
      grep -om 1 'built without NCCL\|libnccl[^:]*: cannot open\|NCCL takes one rank on a GPU')
    if [ -n "$why" ]; then row "| NCCL, $ranks ranks | not tested | | $why |"; return; fi
    [ $ranks = 4 ] || step 120 "one rank" train_ranks one 1
    for zero in 0 1; do step 240 "$ranks ranks, --zero $zero" several_ranks $ranks $zero; done
    [ $ranks = 2 ] || continue
    for zero in 0 1; do step 120 "2 ranks, --zero $zero, again: the same bits" same_bits $zero; done
    step 120 "2 ranks' checkpoint, resumed by one" resumed 1 2_zero_1
    step 120 "one rank's checkpoint, resumed by 2" resumed 2 one
    step 120 "a rank that is killed" lost_rank KILL 137 'launch.sh: rank 1 of 2 was ended by SIGKILL'
    step 120 "a rank that is stopped" lost_rank STOP 1 'rank 0 of 2 (.* rank 1 of 2 (.* does not answer since'
  done
}

# sanitized <tool> <program> <filter>: the program's tests that match, under the tool, which must have found nothing.
# racecheck looks at this project's kernels alone, whose names end in _kernel: libraries' kernels take most of the time.
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

# torch <arguments>: a table of PyTorch's figures beside the benchmark's.
torch() { echo && python3 dev/bench/torch_sla.py "$@" --ours "$ours"; }
torch_attention() { torch attention --heads 12 --head-size 64 "$@" && torch attention --heads 6 --head-size 128 "$@"; }
to_tables() { "${@:2}" >>"$state/$1.tables"; }
has_torch() {
  python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null && return
  row "| PyTorch | not timed | | python3 has no PyTorch that sees the GPU |"
  false
}
part_torch() {
  has_torch || return
  step 120 "PyTorch computes the same function" python3 dev/bench/torch_sla.py check dev/test/golden
  if [ ! -e "$ours" ]; then
    row "| PyTorch | RED | | there are no figures of the benchmark to compare with: STEPS=bench,torch |"
    return
  fi
  step 240 "PyTorch, attention" to_tables torch torch_attention --seq-lens 1024,4096,8192,16384 --tokens 32768
  step 540 "PyTorch, training" to_tables torch torch train --model d12 --wiring plain --wiring 'sla(9,9)' \
    --seq-len 1024,4096,8192,16384 --micro-batch 32,8,4,2
}

part_tune() {
  local -x ours=$state/tune.json
  step 300 "tuning" to_tables tune "$build/bf16/bench_gpu" --tune --json "$ours" || return
  if command -v ncu >/dev/null; then
    step 120 "an update's kernels" to_tables tune python3 dev/bench/kernel_times.py "$build/bf16/train_gpt2_sla" \
      -e d12 -b 32 -t 1024
  else
    row "| an update's kernels | not timed | | there is no ncu |"
  fi
  has_torch || return
  step 150 "PyTorch, attention, beside the fastest" to_tables tune torch_attention --seq-lens 1024,4096,16384 \
    --tokens 32768
}

export -f build_programs largest_micro_batch sanitized has_tests
export -f train_ranks steps as_one_rank several_ranks same_bits resumed lost_rank
export -f benchmark torch torch_attention to_tables
for part in "${parts[@]}"; do
  rm -f "$state/$part".{rows,tables,done}
  "part_$part"
  touch "$state/$part.done"
done
write_report
cat "$report"
[ $failed = 0 ]
