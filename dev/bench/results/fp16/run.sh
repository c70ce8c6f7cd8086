#!/usr/bin/env bash
# 300 updates of a small model in fp32, bf16 and fp16 on the emulated GPU, with the same data in the same order. Writes
# runs/fp16/PRECISION/log.jsonl, and prints the table of README.md.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/../../../.."
data/gcide.sh >&2
make -j"$(nproc)" build/{fp32,bf16,fp16}/train_gpt2_sla_emu >&2
for precision in fp32 bf16 fp16; do
  OMP_NUM_THREADS=1 SLA_EMU_RACES=0 build/$precision/train_gpt2_sla_emu -i 'data/gcide/train_*.bin' \
    -j 'data/gcide/val_*.bin' --shuffle --layers 2 --heads 4 --channels 64 --vocab-size 257 --max-seq-len 32 -t 32 -b 4 \
    --wiring 'sla(1,2)' -x 300 -l 3e-3 -u 30 -v 50 -m 8 -o runs/fp16/$precision >&2
done
echo "| after update | fp32 | bf16 | fp16 |"
echo "| --: | --: | --: | --: |"
for step in 0 50 100 150 200 250 300; do
  printf '| %d |' $step
  for precision in fp32 bf16 fp16; do
    sed -n "s/^{\"step\":$step,\"val_loss\":\([0-9.]*\).*/ \1 |/p" runs/fp16/$precision/log.jsonl | tr -d '\n'
  done
  echo
done
