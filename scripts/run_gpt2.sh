#!/usr/bin/env bash
# One of the paper's runs on all GPUs of this machine. 524,288 tokens per update, 18,000 updates and learning rate
# 1.5e-4 are the paper's; warm-up, clipping and decay, which it does not give, are nanoGPT's. If the run fails, it is
# resumed (-y), until it is finished or has failed three times in a row without a new checkpoint.
#
#   scripts/run_gpt2.sh 124M|350M|774M sla|plain [T] [options of the trainer ...]
#
# sla: skip-layer attention as the paper has it, from 3/4 of the layers on in 3/4 of the heads; plain: its baseline.
# T: 4096 (the default), 8192 or 16384. Environment:
#   DATA=folder     with train_*.bin and val_*.bin in GPT-2's tokens (data/openwebtext-gpt2, which data/openwebtext.sh
#                   makes)
#   OUT=folder      of the run (runs/gpt2-124M-sla-4096, or gpt2-124M-4096 of the baseline)
#   BATCH=n         sequences in a micro-batch; T * BATCH * ranks must divide 524,288. Default: the largest power of two
#                   that does, and whose memory plan fits; for a run that is resumed no more than it began with
#   LAUNCH=command  starts the trainer's processes (on several GPUs: scripts/launch.sh <how many>); scripts/multi_node/
#                   sets it
#   CUDA_VISIBLE_DEVICES=0,1,...   the GPUs to use, of all
#   TRAINER=program (./train_gpt2_sla)
#   PAUSE=seconds   before it is started again (10)
set -uo pipefail
source -- "$(dirname -- "$0")/runs.sh"
enter_root DATA OUT TRAINER
source scripts/stoppable.sh
size=${1:-} attention=${2:-}
case $size in
  124M) preset=d12 wiring='sla(9,9)' ;;
  350M) preset=d24 wiring='sla(18,12)' ;;
  774M) preset=d36 wiring='sla(27,15)' ;;
  *) die "'$size': the paper's models are 124M, 350M and 774M" ;;
esac
case $attention in
  sla) name=gpt2-$size-sla ;;
  plain) name=gpt2-$size wiring=plain ;;
  *) die "'$attention': attention is sla or plain" ;;
esac
shift 2
T=4096
case ${1:-} in [0-9]*) T=$1; shift ;; esac
case $T in 4096 | 8192 | 16384) ;; *) die "T = $T: the paper's are 4096, 8192 and 16384" ;; esac
DATA=${DATA:-data/openwebtext-gpt2} OUT=${OUT:-runs/$name-$T} TRAINER=${TRAINER:-./train_gpt2_sla} PAUSE=${PAUSE:-10}
ls "$DATA"/train_*.bin >/dev/null 2>&1 ||
  die "$DATA: no train_*.bin in it; name a folder of GPT-2's tokens with DATA=, see data/README.md"
[ -x "$TRAINER" ] || die "$TRAINER: not built; make builds it where nvcc is installed"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
if [ -z "${LAUNCH+set}" ]; then LAUNCH=; [ "$gpus" -lt 2 ] || LAUNCH="scripts/launch.sh $gpus"; fi
eval "launch=($LAUNCH)"  # as a shell reads it: an argument may be quoted

train() {
  exec "${launch[@]}" "$TRAINER" -e "$preset" --wiring "$wiring" --max-seq-len "$T" \
    -i "$DATA/train_*.bin" -j "$DATA/val_*.bin" --shuffle -t "$T" -b "$BATCH" -d 524288 -x 18000 \
    -l 1.5e-4 -k cosine -q 0.1 -u 2000 -c 0.1 --grad-clip 1 \
    -v 250 -n 500 --keep 3 --keep-every 6000 -o "$OUT" -y "$@"
}

# The micro-batch, by a dry run, which says how many ranks there are and how many sequences fit. The same machine has
# the same memory, and so a resumed run the same micro-batch and the same bits.
largest_batch() {
  local plan batch fits
  plan=$(BATCH=1 train "$@" --dry-run --json) || return
  number() { sed -n "1s/.*\"$1\":\([0-9]*\).*/\1/p"; }
  batch=$(head -n 1 "$OUT/log.jsonl" 2>/dev/null | number micro_batch)
  batch=${batch:-$((524288 / T / $(number ranks <<<"$plan")))}
  fits=$(number largest_micro_batch <<<"$plan")
  while [ "$batch" -gt "$fits" ]; do batch=$((batch / 2)); done
  echo "$batch"
}

failures=0
while true; do
  before=$(newest_checkpoint "$OUT") status=1
  BATCH=${BATCH:-$(largest_batch "$@")}
  [ -z "$BATCH" ] || stoppable train "$@"
  if [ $status -eq 0 ]; then
    [ ! -x report ] || [ ! -e "$OUT/log.jsonl" ] || ./report "$OUT" >/dev/null
    exit 0
  fi
  [ -z "$stopped" ] || { echo "stopped; the same command resumes" >&2; exit $status; }
  if [ "$(newest_checkpoint "$OUT")" = "$before" ]; then failures=$((failures + 1)); else failures=0; fi
  [ $failures -lt 3 ] ||
    die "ended three times in a row without a new checkpoint, the last time with status $status; see above"
  resumes=$(newest_checkpoint "$OUT" | sed 's/^/resumes from /')
  echo "the run ended with status $status; it ${resumes:-starts again} in $PAUSE s" >&2
  sleep "$PAUSE"
done
