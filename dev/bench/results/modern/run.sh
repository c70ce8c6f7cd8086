#!/usr/bin/env bash
# The runs of README.md beside it: learning rates of `plain` and `modern` (300 updates, seed 1), and what each part of
# `modern` is worth (1,000 updates, three seeds).
#
#   dev/bench/results/modern/run.sh rates|parts
#
# The same command resumes where it was stopped. Runs are in OUT/rates/RATE and OUT/parts; OUT/rates.html and
# OUT/parts.html compare them, and table.py OUT prints README.md's tables from their logs.
#
# Each wiring has its best rate: `plain` from scripts/evidence.sh's setting, `modern` from `rates`; the parts of
# `modern` have that rate, too.
#
# Environment: OUT=folder (runs/modern); DATA=folder of tokens (data/gcide); TRAINER: see scripts/compare.sh
set -uo pipefail
source -- "$(dirname -- "$0")/../../../../scripts/runs.sh"
enter_root OUT DATA TRAINER
source scripts/stoppable.sh
die() { echo "error: run.sh: $*" >&2; exit 1; }
[[ $# = 1 && $1 =~ ^(rates|parts)$ ]] || die "'$*': there are rates and parts"
out=${OUT:-runs/modern} data=${DATA:-data/gcide}
ls "$data"/train_*.bin >/dev/null 2>&1 || die "$data: no train_*.bin in it; data/gcide.sh makes some"
pattern=$(pattern_of "$data")
common=(-i "$pattern/train_*.bin" -j "$pattern/val_*.bin" --shuffle --layers 8 --heads 8 --channels 256 --vocab-size 257
  --max-seq-len 256 -t 256 -b 4 --optimizer muon -c 0.1 -m 160)
arms=(plain modern
  'qknorm rope relu2 untied softcap(15)'
  'rmsnorm rope relu2 untied softcap(15)'
  'rmsnorm qknorm relu2 untied softcap(15)'
  'rmsnorm qknorm rope untied softcap(15)'
  'rmsnorm qknorm rope relu2 softcap(15)'
  'rmsnorm qknorm rope relu2 untied')

# compare <folder> <wirings> <seeds> <options ...>: ends the script if it was stopped or a run failed.
compare() {
  stoppable nice -n 19 scripts/compare.sh --wirings "$2" --seeds "$3" --out "$1" -- "${common[@]}" "${@:4}"
  [ "$status" -eq 0 ] || exit "$status"
}

if [ "$1" = rates ]; then
  runs=()
  for rate in 2.5e-3 4e-3 6e-3 9e-3 1.3e-2 1.7e-3; do  # in the order in which edges were found to be best
    compare "$out/rates/$rate" 'plain; modern' 1 -x 300 -v 300 -u 30 -l "$rate"
    runs+=("$out/rates/$rate"/{plain,modern}-1)
  done
  ./report "${runs[@]}" -o "$out/rates.html" >/dev/null
  echo "$out/rates.html"
  exit
fi

# As many updates are as many FLOPs: the parts of `modern` have no matmul that GPT-2 lacks.
trainer=${TRAINER:-./train_gpt2_sla_cpu}
for wiring in "${arms[@]}"; do
  "$trainer" "${common[@]}" --wiring "$wiring" --dry-run | sed -n 's/.* at T 256 \(.*\) GFLOP,.*/\1/p'
done | sort -u | awk 'END { exit NR != 1 }' || die "the arms have different FLOPs a token, and would need other updates"
plain_rate=6e-3 modern_rate=2.5e-3
others=$(printf '%s; ' "${arms[@]:1}")
trained=(-x 1000 -v 1000 -u 60)
compare "$out/parts" plain 1:3 "${trained[@]}" -l $plain_rate
compare "$out/parts" "$others" 1:3 "${trained[@]}" -l $modern_rate
runs=()
for wiring in "${arms[@]}"; do runs+=("$out/parts/$(wiring_name "$wiring")"-{1,2,3}); done
./report "${runs[@]}" -o "$out/parts.html" >/dev/null
echo "$out/parts.html"
