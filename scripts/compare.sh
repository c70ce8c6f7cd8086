#!/usr/bin/env bash
# Trains the same model with several wirings and seeds, and writes a page that compares them:
#
#   scripts/compare.sh --wirings 'plain; sla(9,9); gqa(4)' --seeds 3 [-o runs/compare] [--check] -- options of the
#                      trainer, but not --wiring, --seed, -o, -y and --dry-run
#
# Differences are to the first wiring. Seeds are 1, 2, ..., or with --seeds 4:8 those from 4 to 8; all wirings of a seed
# begin with the same weights, as far as they have the same tensors, and read the same data in the same order (give
# --shuffle, so that seeds differ in it). Runs are interleaved, all wirings of a seed after each other, so that what
# changes on the machine meanwhile concerns all of them. On a machine with several GPUs each trains a run of its own.
# The same command resumes where it was stopped: every run has its folder OUT/WIRING-SEED, and OUT/compare.html is
# written anew after each. What a run prints is added to OUT/WIRING-SEED.txt. A run that fails is said, and the others
# continue. A run of which only the log is here, as from an archive of results, is not done again if that has its last
# validation.
#
# What is in OUT must have been made with the same options and data: otherwise the trainer names what differs, and the
# exit status is 2 before anything is trained or written. --check: only that.
#
# Environment: TRAINER=program (./train_gpt2_sla where a GPU is found, else ./train_gpt2_sla_cpu); JOBS=n: runs at a
# time (the GPUs; on a CPU as many as there are cores, or as memory has room for)
set -uo pipefail
source -- "$(dirname -- "$0")/runs.sh"
source "$root/scripts/stoppable.sh"
die() { echo "error: compare.sh: $*" >&2; exit 1; }

wirings='' seeds='' out=runs/compare check=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --check) check=yes; shift; continue ;;
    -h | --help) show_help ;;
    --wirings) wirings=${2-} ;;
    --seeds) seeds=${2-} ;;
    -o | --out) out=${2-} ;;
    *) die "$1: there are --wirings, --seeds, -o and --check; the trainer's options come after --" ;;
  esac
  [ $# -ge 2 ] || die "$1: needs a value"
  shift 2
done
[ "${1-}" = -- ] || die "the trainer's options are missing; they come after --"
shift
for option in "$@"; do
  case $option in
    --wiring | --wiring=*) die "$option: wirings are given before --, by --wirings" ;;
    --seed | --seed=*) die "$option: seeds are given before --, by --seeds" ;;
    -o* | --out | --out=*) die "$option: the folder is given before --, by -o" ;;
    -y* | --resume* | --same-options | --dry-run) die "$option: every run is resumed; --check trains none" ;;
  esac
done
[[ $seeds =~ ^([1-9][0-9]{0,3}:)?[1-9][0-9]{0,3}$ ]] ||
  die "--seeds '$seeds': how many seeds? a number, at least 1, or FIRST:LAST"
[[ $seeds = *:* ]] || seeds=1:$seeds
first_seed=${seeds%:*} last_seed=${seeds#*:}
[ "$first_seed" -le "$last_seed" ] || die "--seeds $seeds: the first is after the last"
[ -n "$out" ] || die "-o: needs a folder"
[[ $out != -* ]] || out=./$out
names=() texts=()
while IFS= read -r text; do
  text=$(sed 's/^ *//; s/ *$//' <<<"$text")
  [ -n "$text" ] || continue
  name=$(wiring_name "$text")
  for other in ${names[@]+"${names[@]}"}; do [ "$other" != "$name" ] || die "--wirings: two are called $name"; done
  names+=("$name") texts+=("$text")
done < <(tr ';' '\n' <<<"$wirings")
[ ${#names[@]} -gt 0 ] || die "--wirings: none is given; for example --wirings 'plain; sla(9,9)'"
num_runs=$((${#names[@]} * (last_seed - first_seed + 1)))

find_trainer
[ -x "$trainer" ] || die "$trainer: not built; make builds it"
[ -x "$root/report" ] || die "$root/report: not built; make builds it"

# check_runs <options ...>: ends the script if a run that is here already is not what it would be now.
check_runs() {
  local seed i said refused=
  for ((seed = first_seed; seed <= last_seed; seed++)); do
    for i in "${!names[@]}"; do
      [ -e "$out/${names[i]}-$seed/log.jsonl" ] || continue
      said=$("$trainer" "$@" --wiring "${texts[i]}" --seed "$seed" -o "$out/${names[i]}-$seed" -y --same-options \
        --dry-run 2>&1 >/dev/null | sed -nE 's/^error: (-y|--same-options):/\1:/p')
      [ -z "$said" ] || { echo "error: compare.sh: ${names[i]}, seed $seed: $said" >&2; refused=yes; }
    done
  done
  [ -z "$refused" ] || exit 2
}
check_runs "$@"
[ -z "$check" ] || exit 0

# in_memory <options ...>: how many runs of the first wiring have room in memory, by what --dry-run prints; at least 1.
in_memory() {
  "$trainer" "$@" --wiring "${texts[0]}" --dry-run 2>/dev/null | awk '
    function bytes(number, unit) { return number * (unit == "GB" ? 1e9 : unit == "MB" ? 1e6 : 1e3) }
    $1 == "total" && $4 == "of" { n = int(bytes($5, $6) / bytes($2, $3)) }
    END { print (n < 1 ? 1 : n < 1000 ? n : 1000) }'
}
jobs=${JOBS:-}
if [ -z "$jobs" ] && [ "$gpus" -gt 0 ]; then jobs=$gpus; fi
if [ -z "$jobs" ]; then  # a run a core is faster than one after the other on all of them
  jobs=$(printf '%s\n' "$(nproc)" "$num_runs" "$(in_memory "$@")" | sort -n | sed -n 1p)
fi
[ "$gpus" -gt 0 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((jobs < $(nproc) ? $(nproc) / jobs : 1))}
mkdir -p "$out" || exit 1
updates=  # of each run, where -x says it
for ((i = 1; i < $#; i++)); do [ "${!i}" != -x ] || updates=${*:i+1:1}; done
failures=$out/failures.$$  # another compare.sh may train other wirings into OUT
: >"$failures"

# compare_page: of all runs that have begun; those of the first wiring first.
compare_page() {
  local runs=() name seed
  for name in "${names[@]}"; do
    for ((seed = first_seed; seed <= last_seed; seed++)); do
      [ ! -e "$out/$name-$seed/log.jsonl" ] || runs+=("$out/$name-$seed")
    done
  done
  [ ${#runs[@]} -eq 0 ] || flock "$out" "$root/report" "${runs[@]}" -o "$out/compare.html" >/dev/null
}

# train <name> <wiring> <seed> <gpu> <options ...>. A checkpoint is written at the end, and where -n says.
train() {
  local name=$1 wiring=$2 seed=$3 gpu=$4
  shift 4
  [ "$gpus" -lt 2 ] || export CUDA_VISIBLE_DEVICES=$((gpu % gpus))
  exec "$trainer" --keep 1 "$@" --wiring "$wiring" --seed "$seed" -o "$out/$name-$seed" -y >>"$out/$name-$seed.txt" 2>&1
}

# is_only_a_log <run>: whether the run has been done to its end, and all that is left of it is its log.
is_only_a_log() {
  [ -z "$(ls -d "$1"/step_*/ 2>/dev/null)" ] && grep -qs "^{\"step\":${updates:-none},\"val_loss\":" "$1/log.jsonl"
}

# worker <k> <options ...>: every jobs-th run, from the k-th on.
worker() {
  local k=$1 n=${#names[@]} run name seed
  shift
  for ((run = k; run < num_runs; run += jobs)); do
    name=${names[run % n]} seed=$((first_seed + run / n))
    status=0
    is_only_a_log "$out/$name-$seed" || stoppable train "$name" "${texts[run % n]}" "$seed" "$k" "$@"
    [ -z "$stopped" ] || return "$status"
    if [ "$status" -eq 0 ]; then
      echo "$name, seed $seed: $(sed -n 's/^{"step":\([0-9]*\),"val_loss":\(.*\)}$/validation loss \2 after step \1/p' \
        "$out/$name-$seed/log.jsonl" | tail -n 1 | sed 's/,"val_\([a-z_]*\)":/, \1 /g')"
    else
      echo "error: $name, seed $seed, ended with status $status: $(tail -n 1 "$out/$name-$seed.txt")" >&2
      echo "$name-$seed" >>"$failures"
    fi
    compare_page
  done
}

workers=()
signalled=
trap 'signalled=yes; kill -USR1 "${workers[@]}" 2>/dev/null' TERM INT USR1
for ((k = 0; k < jobs; k++)); do worker "$k" "$@" & workers+=($!); done
wait_for "${workers[@]}"
compare_page
num_failed=$(wc -l <"$failures")
rm "$failures"
if [ -n "$signalled" ]; then echo "stopped; the same command resumes" >&2; exit 138; fi
[ "$num_failed" -eq 0 ] || die "$num_failed of $num_runs runs failed; the others are in $out/compare.html"
echo "$out/compare.html"
