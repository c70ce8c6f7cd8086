#!/usr/bin/env bash
# The runs of README.md beside it, from the repository's root: dev/bench/results/ladder/run.sh < runs.txt
# A line: FLOPs, layers, heads, channels, context, tokens an update, learning rate, seed, terms beside sla (or nothing).
# A run that is finished is left out, and one that was stopped goes on. OMP_NUM_THREADS=1: on one core.
set -euo pipefail
while read -r flops layers heads channels context batch rate seed terms; do
  out=runs/ladder/$flops-$layers-$channels-$context-$batch-$rate-$seed-${terms:-none}
  [ ! -e "$out/done" ] || continue
  options=(--layers "$layers" --heads "$heads" --channels "$channels" --vocab-size 257 --max-seq-len "$context"
    --wiring "sla($((layers * 3 / 4)),$((heads * 3 / 4))) $terms" -t "$context" -b $((2048 / context)) -d "$batch"
    -i 'data/gcide/train_*.bin' -j 'data/gcide/val_*.bin' --shuffle --optimizer muon -l "$rate" --seed "$seed")
  each=$(./train_gpt2_sla_cpu "${options[@]}" -x 1 --dry-run --json | sed -n 's/.*"flops_per_token": *\([0-9.e+]*\).*/\1/p')
  updates=$(awk "BEGIN { printf \"%d\", $flops / $each / $batch + 0.5 }")
  ./train_gpt2_sla_cpu "${options[@]}" -x "$updates" -u $((updates / 16 + 1)) -v $((updates / 10 + 1)) -m 80 \
    -o "$out" -n 500 --keep 1 -y </dev/null >"$out.txt"
  touch "$out/done"
done
