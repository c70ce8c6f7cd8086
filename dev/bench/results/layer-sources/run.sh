#!/usr/bin/env bash
# The comparison of README.md beside it: plain attention, skip-layer attention and what else uses other layers'
# projections, each at its own best of three learning rates. Rates are tried with seed 1, and seeds 2 to 4 are what is
# compared. Each arm has as many updates as plain's FLOPs allow. As many arms at a time as there are cores.
#
#   dev/bench/results/layer-sources/run.sh
#
# The same command resumes where it was stopped. Runs are in OUT/ARM/RATE; table.py OUT prints README.md's tables.
#
# Environment: OUT=folder (runs/sources); DATA=folder of tokens (data/gcide); UPDATES=n of plain (2000); TRAINER: see
# scripts/compare.sh
set -uo pipefail
cd "$(dirname "$0")/../../../.."
source scripts/runs.sh
die() { echo "error: run.sh: $*" >&2; exit 1; }
export out=${OUT:-runs/sources} data=${DATA:-data/gcide} updates=${UPDATES:-2000}
export trainer=${TRAINER:-./train_gpt2_sla_cpu}
[ $# = 0 ] || die "'$*': it takes no arguments"
ls "$data"/train_*.bin >/dev/null 2>&1 || die "$data: no train_*.bin in it; data/gcide.sh makes some"
rates=(4e-3 8e-3 1.6e-2)
arms=(router dense depth plain 'sla(6,3)' 'sla(6,3,v)' 'sla(6,3,k)' vres)  # the slowest first

# options_of <wiring>: a line each.
options_of() {
  printf '%s\n' -i "$data/train_*.bin" -j "$data/val_*.bin" --shuffle --layers 8 --heads 4 --channels 128 \
    --vocab-size 257 --max-seq-len 256 -t 256 -b 4 --optimizer muon -c 0.1 -m 160
}
gigaflops() {
  local options
  mapfile -t options < <(options_of)
  "$trainer" "${options[@]}" --wiring "$1" --dry-run | sed -n 's/.* at T 256 \(.*\) GFLOP,.*/\1/p'
}
export plain_gigaflops
plain_gigaflops=$(gigaflops plain)
[ -n "$plain_gigaflops" ] || die "the trainer prints no FLOPs"

# arm <wiring>
arm() {
  local wiring=$1 name steps rate options best
  name=$(wiring_name "$wiring")
  steps=$(awk -v n="$updates" -v plain="$plain_gigaflops" -v its="$(gigaflops "$wiring")" \
    'BEGIN { printf "%.0f", n * plain / its }')
  mapfile -t options < <(options_of)
  options+=(-x "$steps" -v "$steps" -u 100)
  compare() {  # <rate> <seeds>
    nice -n 19 scripts/compare.sh --wirings "$wiring" --seeds "$2" --out "$out/$name/$1" -- "${options[@]}" -l "$1"
  }
  for rate in "${rates[@]}"; do compare "$rate" 1 || return; done
  best=$(for rate in "${rates[@]}"; do
    echo "$(final_loss "$out/$name/$rate/$name-1" "$steps") $rate"
  done | LC_ALL=C sort -g | sed -n '1s/.* //p')
  compare "$best" 2:4
}
export -f options_of gigaflops arm wiring_name final_loss
export JOBS=1 OMP_NUM_THREADS=1 all_rates="${rates[*]}"
printf '%s\n' "${arms[@]}" | xargs -d '\n' -n 1 -P "$(nproc)" bash -c 'read -ra rates <<<"$all_rates"; arm "$0"' ||
  die "not all runs are done; the same command resumes"
