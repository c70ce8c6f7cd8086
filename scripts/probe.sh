#!/usr/bin/env bash
# Small models learn synthetic tasks with known answers (data/probe), each with several wirings and seeds, and a page
# shows as maps, wirings x tasks, what share of answers is right after equal updates, at equal FLOPs, which was the
# hardest form of a task that was solved, and after how many updates:
#
#   scripts/probe.sh [--wirings 'plain; sla(2,2)'] [--tasks 'recall --pairs 8 -t 32; ...'] [--seeds n] [--steps n]
#                    [--out runs/probe]
#
# Tasks are options of data/probe, with -x where a task takes other updates than --steps. Those that differ in nothing
# but the parameter that makes a task harder, in -t and in -x are levels of one. Seeds are 1, 2, ..., and five where
# the accuracies of a wiring's differ by more than 20 points; or with --seeds 6:15 those from 6 to 15. `--wirings all`
# is a wiring of each term but `documents`, as examples have no end of text. The model has 4 layers of 4 heads and 128
# channels; Muon, at a constant learning rate after a warm-up, so that a run's curve is that of every shorter run too.
# After each task it says how long the others take. The same command resumes where it was stopped. OUT/TASK has the runs
# of a task, OUT/data its examples, and OUT/probe.html, written anew after each task, the maps.
#
# Environment: TRAINER, JOBS: see compare.sh
set -uo pipefail
source -- "$(dirname -- "$0")/runs.sh"
die() { echo "error: probe.sh: $*" >&2; exit 1; }

# Through 4 layers a window of 4 reaches 12 tokens back: less than most tasks need. Examples without tokens to spare, as
# here, are learned fastest. Of each task but copy, compress and memorize, which plain attention solves at every size
# that was tried, there is a level that it solves in 1,000 updates and one that it does not.
few='plain; rope; sla(2,2); window(4); gqa(2); lsh(4,2)'
all='plain; rope; relative; memory(16) rope; sla(2,2); also(2,2); share(2); layers(0_0_2_2); gqa(2); vres; router;
  depth; window(4); strided(8); fixed(8,2); topk(4); lsh(4,2); reuse(2); blend(0.3); gate; universal(1);
  universal(1) act(0.01); modern; rmsnorm; qknorm; relu2; swiglu; untied; softcap(15); dense; gru; reversible'
tasks='recall --pairs 8 --symbols 32 -t 32; recall --pairs 16 --symbols 32 -t 64;
  noisy-recall --pairs 8 --noise 4 --symbols 16 -t 36; noisy-recall --pairs 8 --noise 8 --symbols 16 -t 40;
  fuzzy-recall --pairs 2 --width 2 --symbols 16 -t 16; fuzzy-recall --pairs 2 --width 4 --symbols 16 -t 32;
  copy --length 8 --symbols 16 -t 32; compress --length 8 --symbols 16 -t 32; memorize --facts 64 --symbols 16 -t 32;
  induction --length 8 --symbols 16 -t 24; induction --length 16 --symbols 16 -t 28;
  hops --pairs 6 --hops 1 --symbols 16 -t 30; hops --pairs 6 --hops 2 --symbols 16 -t 30;
  hops --pairs 4 --hops 1 --distance 20 --symbols 16 -t 38; hops --pairs 4 --hops 2 --distance 20 --symbols 16 -t 38'
wirings=$few seeds=2 steps=1000 out=runs/probe
while [ $# -gt 0 ]; do
  case $1 in
    --wirings) wirings=${2-} ;;
    --tasks) tasks=${2-} ;;
    --seeds) seeds=${2-} ;;
    --steps) steps=${2-} ;;
    -o | --out) out=${2-} ;;
    -h | --help) show_help ;;
    *) die "$1: there are --wirings, --tasks, --seeds, --steps and --out" ;;
  esac
  [ $# -ge 2 ] || die "$1: needs a value"
  shift 2
done
enter_root out TRAINER
source scripts/stoppable.sh
[ "$wirings" != all ] || wirings=$all
[[ $seeds =~ ^([1-9][0-9]{0,3}:)?[1-9][0-9]{0,3}$ ]] || die "'$seeds': --seeds is a number, at least 1, or FIRST:LAST"
[[ $steps =~ ^[1-9][0-9]{0,6}$ ]] || die "'$steps': --steps is a number, at least 1"
[ -n "$out" ] || die "--out: needs a folder"
wirings=$(tr '\n' ' ' <<<"$wirings")
last_seed=${seeds#*:} most_seeds=${seeds#*:} first_seed=1
if [[ $seeds = *:* ]]; then first_seed=${seeds%:*}; elif [ "$last_seed" -lt 5 ]; then most_seeds=5; fi
texts=()
while IFS= read -r text; do
  text=$(sed 's/^ *//; s/ *$//' <<<"$text")
  [ -z "$text" ] || texts+=("$text")
done <<<"$(tr ';\n' '\n ' <<<"$tasks")"
[ ${#texts[@]} -gt 0 ] || die "--tasks: none is given"
for program in data/probe report; do [ -x $program ] || die "$program: not built; make builds it"; done
mkdir -p "$out/data" || exit 1

# setting_of <folder> <name>: a number in the manifest of a task's examples.
setting_of() { sed -n "s/^ *\"$2\": *\([0-9.]*\),*\$/\1/p" "$1/MANIFEST.json"; }
# level_of <task> <folder>: which level of what the task is, as an outline of ./report has it: the value of the
# parameter that makes the task harder, and the task without it, -t and -x.
level_of() {
  local parameter level
  parameter=$(sed -n 's/^ *"harder": *"\([a-z]*\)",*$/\1/p' "$2/MANIFEST.json")
  level=$(setting_of "$2" "$parameter")
  sed -E "s/ *--$parameter[ =]+[0-9]+//; s/ *-[tx] *[0-9]+//g; s/^/level $level of /; s/\$/ --$parameter/" <<<"$1"
}
name_of() { wiring_name "$1" | sed 's/_-*/_/g; s/_$//'; }
# updates_of <task>: its -x, else --steps.
updates_of() { sed -nE "s/.* -x *([0-9]+)( .*)?\$/\1/; T other; p; q; :other; s/.*/$steps/p" <<<"$1"; }
each_wiring() { tr ';' '\n' <<<"$wirings" | sed 's/^ *//; s/ *$//; /^$/d'; }
# runs_of <task> [wiring]: the folders of the runs that have begun, in the order of the wirings: differences are to the
# first.
runs_of() {
  local wiring seed folder
  while IFS= read -r wiring; do
    for ((seed = first_seed; seed <= most_seeds; seed++)); do
      folder=$out/$(name_of "$1")/$(wiring_name "$wiring")-$seed
      [ ! -e "$folder/log.jsonl" ] || echo "$folder"
    done
  done < <(if [ $# -gt 1 ]; then echo "$2"; else each_wiring; fi)
}
# uneven <task>: the wirings, each with `;` after it, of which the last accuracies of the seeds differ by more than 20
# points.
uneven() {
  local wiring folder
  while IFS= read -r wiring; do
    while IFS= read -r folder; do
      sed -n 's/.*"val_accuracy":\([0-9.e-]*\).*/\1/p' "$folder/log.jsonl" | tail -n 1
    done < <(runs_of "$1" "$wiring") | sort -g | awk 'NR == 1 { least = $1 } END { exit $1 - least <= 0.2 }' &&
      printf '%s;' "$wiring"
  done < <(each_wiring)
}

# All examples first: what is wrong with a task is said before the first run.
for task in "${texts[@]}"; do
  # shellcheck disable=SC2046 # options, split at spaces
  data/probe $(sed -E 's/ -x *[0-9]+//' <<<"$task") -o "$out/data/$(name_of "$task")" --examples 64000 \
    --val-examples 500 >/dev/null || exit 1
done

outline=$out/outline.txt
write_page() {
  local task examples
  local says="Models of 4 layers of 4 heads and 128 channels learn tasks whose answers are known, in $steps updates "
  says+="(or what -x says) of 32 examples at a constant learning rate; seeds $first_seed to $last_seed"
  [ "$last_seed" -eq "$most_seeds" ] ||
    says+=", and to $most_seeds where the accuracies of a wiring's seeds differ by more than 20 points"
  says+=". Only answers are scored. "
  says+="Chance is what a model gets right that picks any of the answers in the context."
  {
    printf '# What this is\n%s\n' "$says"
    for task in "${texts[@]}"; do
      examples=$out/data/$(name_of "$task")
      printf '# %s\n%s\nchance %s\n' "$task" "$(level_of "$task" "$examples")" \
        "$(setting_of "$examples" chance_in_context)"
      runs_of "$task" | sed 's/^/run /'
    done
  } >"$outline"
  ./report --outline "$outline" -o "$out/probe.html" >/dev/null
}

# compare <task> <wirings> <seeds> <more options of compare.sh ...>: sets status. Ends the script if runs are of other
# options.
compare() {
  local task=$1 examples pattern
  examples=$out/data/$(name_of "$task")
  pattern=$(pattern_of "$examples")
  stoppable scripts/compare.sh --wirings "$2" --seeds "$3" --out "$out/$(name_of "$task")" "${@:4}" -- \
    -i "$pattern/train_*.bin" -j "$pattern/val_*.bin" --layers 4 --heads 4 --channels 128 \
    --vocab-size "$(setting_of "$examples" vocab_size)" --tokenizer none \
    --max-seq-len "$(setting_of "$examples" seq_len)" -t "$(setting_of "$examples" seq_len)" -b 32 \
    --shuffle --optimizer muon -l 2e-3 -u 50 -k constant -c 0 -m 0 -v 100 -x "$(updates_of "$task")"
  [ "$status" -ne 2 ] || exit 2
}
# more_seeds <task>: five of the wirings whose seeds differ. compare.sh's page is of all again after it.
more_seeds() {
  local more runs
  [ "$last_seed" -lt "$most_seeds" ] || return
  more=$(uneven "$1")
  [ -n "$more" ] || return
  echo "seeds $((last_seed + 1)) to $most_seeds of ${more%;}"
  compare "$1" "$more" "$((last_seed + 1)):$most_seeds"
  mapfile -t runs < <(runs_of "$1")
  ./report "${runs[@]}" -o "$out/$(name_of "$1")/compare.html" >/dev/null
}
# The page is of all tasks: their options are compared before any of it is written.
for task in "${texts[@]}"; do compare "$task" "$wirings" "$first_seed:$most_seeds" --check; done
count=0 started=$SECONDS
for task in "${texts[@]}"; do
  echo "task $((count + 1)) of ${#texts[@]}: $task"
  compare "$task" "$wirings" "$first_seed:$last_seed"
  [ -n "$stopped" ] || [ "$status" -ne 0 ] || more_seeds "$task"
  write_page
  [ -z "$stopped" ] && [ "$status" -eq 0 ] || exit "$status"
  count=$((count + 1)) spent=$((SECONDS - started))
  echo "$count of ${#texts[@]} tasks after $(((spent + 30) / 60)) min; the others take" \
    "$(((spent * (${#texts[@]} - count) / count + 30) / 60)) min if they take as long"
done
echo "$out/probe.html"
