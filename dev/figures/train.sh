#!/usr/bin/env bash
# The two runs of the README's loss curves: the model and recipe of `make train` (scripts/train.sh) for 2,000 steps,
# with skip-layer attention and without, on the same data with the same seed. Writes dev/figures/{sla,baseline}.jsonl:
# each run's log without the training steps that are not multiples of 10, and without times, which say nothing about a
# loss. Some minutes each on two idle cores. Then: dev/figures/figures.py
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_PROC_BIND=${OMP_PROC_BIND:-true}
make --no-print-directory -s -j"$(nproc)" train_gpt2_sla_cpu data/tokenize
data/gcide.sh

thin() {
  awk -F'[:,]' '!/"loss"/ || $2 % 10 == 0' | sed -E '/"checkpoint"/d; s/,"(ms|data_ms|tokens_per_second)":[^,}]*//g'
}

# train <name> <wiring>
train() {
  rm -rf "runs/figure-$1"
  ./train_gpt2_sla_cpu -i 'data/gcide/train_*.bin' -j 'data/gcide/val_*.bin' --shuffle \
    --layers 8 --heads 8 --channels 256 --vocab-size 257 --max-seq-len 256 --wiring "$2" \
    -t 256 -b 2 -x 2000 -l 1.5e-3 -u 60 -c 0.1 -v 200 -m 80 -s 0 -o "runs/figure-$1"
  thin < "runs/figure-$1/log.jsonl" > "dev/figures/$1.jsonl"
}
train sla 'sla(6,6)'
train baseline plain
