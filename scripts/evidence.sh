#!/usr/bin/env bash
# `make evidence`: does skip-layer attention help, and why? The runs of the protocol in dev/bench/results/sla/README.md,
# in its order, so that what is there at any time answers the questions before it:
#
#   scripts/evidence.sh [--plan] [block] [controls] [documents] [modern]        default: all of them, in this order
#
# An arm is a wiring with what options it needs. Each is tried at four learning rates with seed 1, at a fifth and a
# sixth where the best is at an edge, and trained at its best one with the seeds from 2 on. An arm makes as many updates
# as the FLOPs of the first arm of its block allow. --plan: only says what has been done and how many runs are left. The
# same command resumes where it was stopped. Runs are in OUT/QUESTION/RATE, and OUT/evidence.html, written anew after
# each arm, shows them; dev/bench/results/sla/differences.py OUT prints the numbers.
#
# Environment: SIZE=cpu or gpu, the protocol's two (cpu); OUT=folder (runs/evidence or runs/evidence-gpu); PAIRS=n:
# seeds of each arm (5); DATA=folder of tokens (data/gcide); UPDATES=n of the first arm (1000); ARMS=n: arms at a time
# (1); TRAINER and JOBS: see compare.sh
set -uo pipefail
source -- "$(dirname -- "$0")/runs.sh"
enter_root OUT DATA TRAINER
source scripts/stoppable.sh
die() { echo "error: evidence.sh: $*" >&2; exit 1; }
plan=
if [ "${1-}" = --plan ]; then plan=yes; shift; fi
[ $# -gt 0 ] || set -- block controls documents modern
for question in "$@"; do
  [[ $question =~ ^(block|controls|documents|modern)$ ]] ||
    die "$question: there are block, controls, documents and modern"
done
size=${SIZE:-cpu} pairs=${PAIRS:-5} data=${DATA:-data/gcide} updates=${UPDATES:-1000} arms_at_once=${ARMS:-1}
case $size in
  cpu) seq_len=256 micro_batch=4 out=${OUT:-runs/evidence} ;;
  gpu) seq_len=1024 micro_batch=8 out=${OUT:-runs/evidence-gpu} ;;
  *) die "SIZE=$size: there are cpu and gpu" ;;
esac
for number in "$pairs" "$updates" "$arms_at_once"; do
  [[ $number =~ ^[1-9][0-9]{0,6}$ ]] || die "'$number': PAIRS, UPDATES and ARMS are numbers, at least 1"
done
find_trainer
if ! ls "$data"/train_*.bin >/dev/null 2>&1; then
  [ -z "${DATA:-}" ] || die "$data: no train_*.bin in it; data/README.md says how to make some"
  data/gcide.sh >/dev/null || die "no corpus; name a folder of tokens with DATA="
fi
mkdir -p "$out" || exit 1
pattern=$(pattern_of "$data")
common=(-i "$pattern/train_*.bin" -j "$pattern/val_*.bin" --shuffle --vocab-size 257)

# ----------------------------------------------------------------------------
# What there is to run

wide=(--layers 8 --heads 8 --channels 256)
# As many parameters as sla(6,6) has: 6,252,372 and 6,252,544.
narrow=(--layers 8 --heads 9 --channels 252)
long=(--layers 8 --heads 4 --channels 128)
rates=(2.5e-3 4e-3 6e-3 9e-3)   # of Muon
lower_rates=(1.7e-3 1.1e-3) higher_rates=(1.3e-2 1.9e-2)
paper_rate=9e-4                 # of AdamW: 1.5e-4 of 768 channels, for 128
# The last six of eight heads attend to layers 5 to 7 below theirs: random.Random(52).randint(5, 7) for each.
random='sla(6,2:3) sla(5,3:4) sla(6,4:6) sla(7,6:7) sla(5,7:8)'

# model_of <question> <wiring>: the options of its shape and rows.
model_of() {
  local shape=("${wide[@]}")
  [ "$1 $2" != "controls plain" ] || shape=("${narrow[@]}")
  printf '%s\n' "${shape[@]}" --max-seq-len $seq_len -t $seq_len -b $micro_batch
}
# gigaflops <question> <wiring>: of a token, forward and backward.
gigaflops() {
  local options
  mapfile -t options < <(model_of "$@")
  "$trainer" "${common[@]}" "${options[@]}" --wiring "$2" --dry-run |
    sed -n "s/.* at T $seq_len \(.*\) GFLOP,.*/\1/p"
}
# read_updates <question>: sets updates_of[QUESTION WIRING] of its arms.
declare -A updates_of
read_updates() {
  local wiring of_first its
  of_first=$(gigaflops block "$(arms_of $([ "$1" = modern ] && echo modern || echo block) | sed -n 1p)")
  while IFS= read -r wiring; do
    its=$(gigaflops "$1" "$wiring")
    [ -n "$its" ] || die "$wiring: $trainer --dry-run prints no FLOPs"
    updates_of["$1 $wiring"]=$(awk -v n="$updates" -v first="$of_first" -v its="$its" \
      'BEGIN { printf "%.0f", n * first / its }')
  done < <(arms_of "$1")
}
# trained <question> <wiring>: the options of its runs, but for the rate; validation is on 163,840 bytes.
trained() {
  local n=${updates_of["$*"]}
  model_of "$@"
  printf '%s\n' --optimizer muon -u 60 -c 0.1 -m $((163840 / (micro_batch * seq_len))) -v "$n" -x "$n"
}
# in_long_rows <T>: the options of the runs of `documents`, 4,096 tokens an update.
in_long_rows() {
  printf '%s\n' "${long[@]}" --max-seq-len "$1" -t "$1" -b $((4096 / $1)) -l "$paper_rate" -u $(((updates + 8) / 9)) \
    -q 0.1 -c 0.1 -m 40 -v "$updates" -x "$updates"
}
arms_of() {
  case $1 in
    block) printf '%s\n' plain 'sla(6,6)' ;;
    controls)
      [ $size = gpu ] || echo plain  # a GPU has no kernels for heads of 28 channels
      printf '%s\n' 'sla(6,6,v)' 'sla(6,6,k)' "$random" vres router depth dense
      ;;
    modern) printf '%s\n' modern 'modern sla(6,6)' ;;
    documents) printf '%s\n' rope 'rope sla(6,3)' 'rope documents' 'rope sla(6,3) documents' ;;
  esac
}
lengths=(256 1024 4096)
long_seeds=3

# ----------------------------------------------------------------------------
# Runs

folder_of() { echo "$out/$1/$2"; }  # <question> <rate>
# losses_of <question> <wiring>: a line "RATE LOSS" for each rate that has been tried to the end, the best first.
losses_of() {
  local rate loss
  for rate in "${lower_rates[@]}" "${rates[@]}" "${higher_rates[@]}"; do
    loss=$(final_loss "$(folder_of "$1" "$rate")/$(wiring_name "$2")-1" "${updates_of["$*"]}")
    [ -z "$loss" ] || echo "$rate $loss"
  done | LC_ALL=C sort -g -k 2
}
best_rate() { losses_of "$@" | sed -n '1s/ .*//p'; }

# next_rate <question> <wiring>: the rate that is to be tried next; nothing if the best has others on both sides, or
# all have been tried.
next_rate() {
  local all=("${lower_rates[1]}" "${lower_rates[0]}" "${rates[@]}" "${higher_rates[@]}") tried best rate i
  tried=$(losses_of "$@")
  for rate in "${rates[@]}"; do
    grep -q "^$rate " <<<"$tried" || { echo "$rate"; return; }
  done
  best=$(sed -n '1s/ .*//p' <<<"$tried")
  for i in "${!all[@]}"; do
    [ "${all[i]}" = "$best" ] || continue
    for rate in $([ "$i" -eq 0 ] || echo "${all[i - 1]}") ${all[i + 1]-}; do
      grep -q "^$rate " <<<"$tried" || { echo "$rate"; return; }
    done
  done
}

# compare <folder> <wiring> <seeds> <options ...>: ends the script if it was stopped or a run failed.
compare() {
  stoppable nice -n 19 scripts/compare.sh --wirings "$2" --seeds "$3" --out "$1" -- "${common[@]}" "${@:4}"
  [ "$status" -eq 0 ] || { write_page; exit "$status"; }
}

# arm <question> <wiring>: tries its rates, then trains it at the best with the other seeds.
arm() {
  local rate options
  mapfile -t options < <(trained "$@")
  while rate=$(next_rate "$@") && [ -n "$rate" ]; do
    compare "$(folder_of "$1" "$rate")" "$2" 1 "${options[@]}" -l "$rate"
  done
  rate=$(best_rate "$@")
  compare "$(folder_of "$1" "$rate")" "$2" "2:$((pairs + 1))" "${options[@]}" -l "$rate"
  write_page
}

# ----------------------------------------------------------------------------
# The page

write_page() {
  local question wiring rate seed T
  runs() {  # <folder> <wiring> <first seed> <last seed>
    for ((seed = $3; seed <= $4; seed++)); do
      [ ! -e "$1/$(wiring_name "$2")-$seed/log.jsonl" ] || echo "run $1/$(wiring_name "$2")-$seed"
    done
  }
  {
    printf '# What this is\n%s\n' "The runs of dev/bench/results/sla/README.md, which says what is concluded from them."
    for question in block controls modern; do
      printf '# %s: each arm at its own best rate\n%s\n' "$question" \
        "Seeds 2 to $((pairs + 1)); rates were chosen with seed 1."
      [ $question != controls ] || rate=$(best_rate block plain)
      [ $question != controls ] || runs "$(folder_of block "${rate:-none}")" plain 2 $((pairs + 1))
      while IFS= read -r wiring; do
        rate=$(best_rate $question "$wiring")
        runs "$(folder_of $question "${rate:-none}")" "$wiring" 2 $((pairs + 1))
      done < <(arms_of $question)
      while IFS= read -r wiring; do
        printf '# %s: rates of %s\n%s\n' "$question" "$wiring" "Seed 1."
        for rate in "${lower_rates[@]}" "${rates[@]}" "${higher_rates[@]}"; do
          runs "$(folder_of $question "$rate")" "$wiring" 1 1
        done
      done < <(arms_of $question)
    done
    for T in "${lengths[@]}"; do
      printf '# documents: T = %s\n%s\n' "$T" "Short texts, 4,096 bytes an update at each T, AdamW at $paper_rate."
      while IFS= read -r wiring; do
        runs "$(folder_of documents "T$T")" "$wiring" 1 $long_seeds
      done < <(arms_of documents)
    done
  } >"$out/outline.$BASHPID"
  mv "$out/outline.$BASHPID" "$out/outline.txt"
  flock "$out" ./report --outline "$out/outline.txt" -o "$out/evidence.html" >/dev/null
}

# ----------------------------------------------------------------------------
# In order

# undone <folder> <wiring> <first seed> <last seed> <updates>: how many of these runs have not come to their end.
undone() {
  local seed count=0
  for ((seed = $3; seed <= $4; seed++)); do
    [ -n "$(final_loss "$1/$(wiring_name "$2")-$seed" "$5")" ] || count=$((count + 1))
  done
  echo "$count"
}
# left <question>: how many of its runs are left, as far as is known.
left() {
  local wiring rate T n count=0
  while IFS= read -r wiring; do
    if [ "$1" = documents ]; then
      for T in "${lengths[@]}"; do
        count=$((count + $(undone "$(folder_of documents "T$T")" "$wiring" 1 $long_seeds "$updates")))
      done
      continue
    fi
    n=${updates_of["$1 $wiring"]}
    for rate in "${rates[@]}"; do count=$((count + $(undone "$(folder_of "$1" "$rate")" "$wiring" 1 1 "$n"))); done
    rate=$(best_rate "$1" "$wiring")
    count=$((count + $(undone "$(folder_of "$1" "${rate:-none}")" "$wiring" 2 $((pairs + 1)) "$n")))
  done < <(arms_of "$1")
  echo "$count"
}
all_left() {
  local question sum=0
  for question in "$@"; do sum=$((sum + $(left "$question"))); done
  echo "$sum"
}

for question in block controls modern; do read_updates $question; done  # the page has all
if [ -n "$plan" ]; then
  for question in "$@"; do echo "$question: $(left "$question") runs are left"; done
  exit 0
fi
before=$(all_left "$@") started=$SECONDS
say_left() {
  local now
  now=$(all_left "$@")
  echo "$now runs are left$([ "$now" -ge "$before" ] ||
    awk -v s=$((SECONDS - started)) -v done=$((before - now)) -v left="$now" \
      'BEGIN { printf ", about %.1f hours at the pace of the last %d", s / done * left / 3600, done }')"
}
# a_seed_of_long_rows <seed>
a_seed_of_long_rows() {
  local options arms wirings T
  mapfile -t arms < <(arms_of documents)
  wirings=$(printf '%s; ' "${arms[@]}")
  for T in "${lengths[@]}"; do
    mapfile -t options < <(in_long_rows "$T")
    compare "$(folder_of documents "T$T")" "$wirings" "$1:$1" "${options[@]}"
  done
  write_page
}
# next_job: a line "QUESTION<tab>ARM", of documents "QUESTION<tab>SEED"; nothing if none is left.
jobs=$(for question in "$@"; do
  if [ "$question" = documents ]; then seq $long_seeds; else arms_of "$question"; fi | sed "s/^/$question\t/"
done)
next_job() {
  local n
  {
    flock 9
    n=$(($(cat "$out/jobs_begun") + 1))
    echo $n >"$out/jobs_begun"
  } 9>"$out/lock"
  sed -n "${n}p" <<<"$jobs"
}
# worker <questions ...>: one arm, or a seed of all lengths, after the other.
worker() {
  local question its_arm
  while IFS=$'\t' read -r question its_arm < <(next_job); do
    if [ "$question" = documents ]; then a_seed_of_long_rows "$its_arm"; else arm "$question" "$its_arm"; fi
    say_left "$@"
  done
}
echo 0 >"$out/jobs_begun"
workers=()
trap 'kill -USR1 "${workers[@]}" 2>/dev/null' TERM INT USR1
for ((k = 0; k < arms_at_once; k++)); do worker "$@" & workers+=($!); done
wait_for "${workers[@]}" || exit
echo "$out/evidence.html"
