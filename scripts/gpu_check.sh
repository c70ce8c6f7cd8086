#!/usr/bin/env bash
# `make gpu-check`: everything that only a GPU can show, in under ten minutes: builds natively, tests the model and its
# operations in both precisions, runs compute-sanitizer on a subset of the tests, and benchmarks. The results go to
# dev/bench/results/<gpu>.{md,json}; the last line of the former says whether everything passed. If python3 has a
# PyTorch that sees the GPU, the same model and attention are timed with it, too, which takes some minutes more: it
# compiles the model for each shape.
#
# Needs the CUDA toolkit (12.3 or later), a C++ compiler, and the headers of CLI11, nlohmann/json, toml++ and
# GoogleTest. Where those are not installed: make gpu-check INCLUDES="folder ...", with GoogleTest's sources among them.
#
# BUILD and RESULTS are the folders of the programs and of the report, if they are to be others than build and
# dev/bench/results. dev/test/test_scripts.cpp runs this script so, with the emulated GPU's programs in place of what
# nvcc builds.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build} results=${RESULTS:-dev/bench/results}
die() { echo "error: $*" >&2; exit 1; }
command -v nvcc >/dev/null || die "gpu-check: nvcc is not on the PATH; install the CUDA toolkit, or add its bin folder"
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
[ -n "$name" ] || die "gpu-check: nvidia-smi shows no GPU; make test runs the same kernels on an emulated one"
sanitizer=$(command -v compute-sanitizer || ls "$(dirname "$(command -v nvcc)")/compute-sanitizer" 2>/dev/null)
slug=$(tr 'A-Z ' 'a-z-' <<<"$name" | tr -cd 'a-z0-9-')
mkdir -p "$results"
report=$results/$slug.md
table=$(mktemp) steps=$(mktemp) peer=$(mktemp) tokens=$(mktemp)
trap 'rm -f "$table" "$steps" "$peer" "$tokens"' EXIT
failed=0 start=$SECONDS

# step <what> <command...>: runs it and adds a row to the table; if it failed, or was a test program in which no test
# ran, the end of its output is printed.
step() {
  local what=$1 log begin=$SECONDS verdict=green
  shift
  log=$(mktemp)
  echo "== $what"
  if ! "$@" >"$log" 2>&1 || grep -qF '[  PASSED  ] 0 tests.' "$log"; then verdict=RED; failed=1; tail -n 60 "$log"; fi
  local tests
  tests=$(grep -E '^\[  PASSED  \]|^ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1 | sed 's/=* *//')
  echo "| $what | $verdict | $((SECONDS - begin)) s | ${tests#\[  PASSED  \] } |" | tee -a "$steps"
  rm -f "$log"
}

tests="test_gpt2_sla test_ops test_attention"
targets=("$build"/bf16/{bench_gpu,train_gpt2_sla,test_tile})
for p in bf16 fp32; do for t in $tests; do targets+=("$build/$p/$t"); done; done
step "build for $name" make --no-print-directory -j"$(nproc)" BUILD="$build" "${targets[@]}"
[ $failed = 0 ] || die "gpu-check: the build failed"
step "test_tile, bf16" "$build/bf16/test_tile"
for p in bf16 fp32; do for t in $tests; do step "$t, $p" "$build/$p/$t"; done; done

trainer=$build/bf16/train_gpt2_sla
step "train_gpt2_sla, a golden case" "$trainer" -e dev/test/golden/paper_default \
  -i dev/test/golden/paper_default/tokens.bin -b 2 -t 32 -x 10 -k constant -l 1e-4 -v 0

# Three updates of as many sequences as the program says fit: the first runs eagerly, the second is captured as a graph,
# the third replays it. Does the plan, with what it keeps free, hold on this GPU? All tokens are 1.
largest_micro_batch() {
  local model=(-e d12 -i "$tokens" -t 1024 -v 0) plan b
  yes $'\001' | tr '\n' '\0' | head -c 8000000 >"$tokens"
  plan=$("$trainer" "${model[@]}" -b 1 --dry-run) || return
  b=$(sed -n 's/.*the largest micro-batch that fits is //p' <<<"$plan")
  echo "$b sequences"
  "$trainer" "${model[@]}" -b "$b" -x 3
}
step "train_gpt2_sla, the largest micro-batch" largest_micro_batch

# The subset: one wiring with accumulation, with and without recomputation, generation, and each operation once.
short=('*HasTheLosses*/nine_of_twelve' '*HasThemWhenBlocks*/nine_of_twelve' 'Generation.Continues*')
# sanitize <what> <program> <filter>: the program's tests that match, under each tool.
sanitize() {
  for tool in memcheck racecheck; do
    step "compute-sanitizer $tool, $1" "$sanitizer" --tool "$tool" --error-exitcode 1 "$2" --gtest_filter="$3"
  done
}
has_tests() { for filter in "${@:2}"; do "$1" --gtest_list_tests --gtest_filter="$filter" | grep '^  ' || return; done }
if [ -n "$sanitizer" ]; then
  step "the subset's tests exist" has_tests "$build/bf16/test_gpt2_sla" "${short[@]}"
  for p in bf16 fp32; do sanitize "model, $p" "$build/$p/test_gpt2_sla" "$(IFS=:; echo "${short[*]}")"; done
  for t in test_ops test_tile test_attention; do sanitize "$t, bf16" "$build/bf16/$t" '-*EveryLength*'; done
else
  echo "| compute-sanitizer | RED | | not found beside nvcc |" | tee -a "$steps"
  failed=1
fi

ours=$results/$slug.json
benchmark() { "$build/bf16/bench_gpu" --json "$ours" >"$table"; }
step "benchmark" benchmark

# torch <arguments>: a table of PyTorch's figures beside those that were just measured.
torch() { echo && python3 dev/bench/torch_sla.py "$@" --ours "$ours"; }
torch_attention() { torch attention --heads 12 --head-size 64 "$@" && torch attention --heads 6 --head-size 128 "$@"; }
to_peer() { "$@" >>"$peer"; }
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  step "PyTorch computes the same function" python3 dev/bench/torch_sla.py check dev/test/golden
  step "PyTorch, attention" to_peer torch_attention --seq-lens 1024,4096,8192,16384 --tokens 32768
  step "PyTorch, training" to_peer torch train --model d12 --wiring plain --wiring 'sla(9,9)' \
    --seq-len 1024,4096,8192,16384 --micro-batch 32,8,4,2
else
  echo "| PyTorch | not timed | | python3 has no PyTorch that sees the GPU |" | tee -a "$steps"
fi
{
  echo "# $name"
  echo
  echo "\`make gpu-check\`, $((SECONDS - start)) s, $(date -u +%Y-%m-%d)," \
    "$(git rev-parse --short HEAD 2>/dev/null || echo 'no git'),"
  echo "CUDA $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')," \
    "driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)."
  echo
  echo "| step | | time | |"
  echo "| --- | --- | --: | --- |"
  cat "$steps"
  echo
  cat "$table" "$peer"
  echo
  if [ $failed = 0 ]; then echo "All green."; else echo "Not all green."; fi
} >"$report"
cat "$report"
[ $failed = 0 ]
