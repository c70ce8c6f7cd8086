#!/usr/bin/env bash
# Can the tests fail? Plants one bug after another of dev/test/planted_bugs.txt in a copy of the tree, builds the test that should notice
# and runs it: it must fail. `make planted-bugs`, some hours on two cores; an argument picks the bugs whose line contains it.
set -euo pipefail
cd "$(dirname "$0")/../.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -z | xargs -0 cp --parents -p -t "$copy"
cd "$copy"
# Quick to build is what counts here.
compile() { make -s -j"$(nproc)" OPTIMIZE='-O1 -march=native -ffp-contract=fast' EMU_OPTIMIZE=-O1 "$@"; }

export FAULTS_KILLS=5  # enough to see a run that does not go on where it was
caught=0 missed=0
while IFS='|' read -r file old new program filter; do
  case "$file|$old|$new|$program|$filter" in *"${1:-}"*) ;; *) continue ;; esac
  old=$(printf '%b' "$old") new=$(printf '%b' "$new")
  original=$(cat "$file"; echo x)
  original=${original%x}
  planted=${original/"$old"/"$new"}
  if [ "$planted" = "$original" ]; then echo "error: $file: no longer holds: $old" >&2; exit 1; fi
  cp -p "$file" "$copy/kept"
  printf '%s' "$planted" >"$file"
  programs=("build/$program")
  case $program in test_cli | test_scripts) programs+=(train_gpt2_sla_cpu) ;; esac  # what these plants concern needs no GPU
  case $program in test_data|test_corpus) programs+=(data/tokenize) ;; esac
  case "$program $filter" in
    test_dist\ EmulatedNccl* | test_dist\ CollectivesOfTheTrainer*) programs+=(build/emu_ranks) ;;
    test_dist\ Training.InABuildWithoutNccl*) programs+=(train_gpt2_sla_cpu) ;;
    test_dist* | test_faults* | *UnderSlurm*) programs+=(build/fp32/train_gpt2_sla_emu) ;;
  esac
  if ! compile "${programs[@]}" >"$copy/log" 2>&1; then echo "error: the planted bug does not compile: $file: $new" >&2; tail -n 5 "$copy/log" >&2; exit 1; fi
  timeout 300 "build/$program" --gtest_filter="$filter" >"$copy/log" 2>&1 && status=0 || status=$?
  if [ $status = 124 ]; then echo "error: five minutes were not enough for $program $filter with $file: $new" >&2; exit 1; fi
  if [ $status = 0 ]; then
    echo "MISSED  $file: $old -> $new ($program $filter)"
    missed=$((missed + 1))
  else
    echo "caught  $file: $old -> $new: $(grep -m 1 -o '^\[  FAILED  \] [^ ,]*' "$copy/log" | cut -c 14- || echo "$program died")"
    caught=$((caught + 1))
  fi
  cp "$copy/kept" "$file"  # with a new time, so that make builds it again
done < <(grep -v "^#" dev/test/planted_bugs.txt)
echo "$caught caught, $missed missed"
[ $missed -eq 0 ]
