#!/usr/bin/env bash
# `make train`: a small byte-level model of skip-layer attention on real text, from nothing to a sample in about five
# minutes on two cores; on a GPU where nvcc and a GPU are found. Environment: TEXT=path trains on a text file or folder
# of yours, DATA=tinyshakespeare on that instead of the dictionary; STEPS=n trains longer; OUT=folder.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-gcide} STEPS=${STEPS:-800}
trainer=./train_gpt2_sla_cpu
if command -v nvcc >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then trainer=./train_gpt2_sla; fi
say() { printf '\n== %s\n' "$*"; }

say "packages"
groups=(gpu)
if [ $trainer = ./train_gpt2_sla_cpu ]; then groups+=(cpu); fi
case $DATA in
  gcide) fetching=gcide ;;
  tinyshakespeare) fetching=curl ;;
  *) echo "error: DATA=$DATA: there are gcide and tinyshakespeare; TEXT=path takes any text" >&2; exit 1 ;;
esac
if [ -z "${TEXT:-}" ] && [ ! -e "data/$DATA/train_000000.bin" ]; then groups+=("$fetching"); fi
scripts/setup.sh "${groups[@]}" --optional extras

say "programs"
make --no-print-directory -s -j"$(nproc)" "${trainer#./}" data/tokenize

say "corpus"
if [ -n "${TEXT:-}" ]; then data=$(data/text.sh "$TEXT" | tail -n 1); else data=$("data/$DATA.sh" | tail -n 1); fi
data=${data#"$PWD/"}
# A micro-batch of validation takes 4 sequences of 256 tokens, and the last tenth of the text is validation data.
val=$(find "$data" -name 'val_*.bin' -printf '%s\n' | awk '{ n += ($1 - 1024) / 2 } END { print n + 0 }')
if [ "$val" -lt 1025 ]; then
  echo "error: ${TEXT:-$data}: is too little text: $val tokens to validate with, and make train needs 1025, which" \
    "10300 bytes of text give; name more text" >&2
  exit 1
fi
# A text may have changed since the last time, and a run is of one text: the folder's name has the tokens' checksum.
sum=
if [ -n "${TEXT:-}" ]; then
  sum=$(sed -n '/"shards"/,$s/.*"crc32c": "\(.*\)".*/\1/p' "$data/MANIFEST.json" | cksum | cut -d' ' -f1)
fi
OUT=${OUT:-runs/$(basename "$data")${sum:+-$sum}-$STEPS}

say "training"
options=(-i "$data/train_*.bin" -j "$data/val_*.bin" --shuffle
  --layers 8 --heads 8 --channels 256 --vocab-size 257 --max-seq-len 256 --wiring "sla(6,6)"
  -t 256 -b 4 -x "$STEPS" --optimizer muon -l 4e-3 -u 60 -c 0.1 -v 100 -m 40 -s 200 -g 256 --temperature 0.7 -n 200)
printf '%q ' "$trainer" "${options[@]}" -o "$OUT" -y
echo
"$trainer" "${options[@]}" -o "$OUT" -y

say "done"
last=$(ls -d "$OUT"/step_* | tail -n 1) sampler=${trainer/train/sample}
cat <<END
model, to load anywhere as GPT-2 of full size:  $last (config.json, model.safetensors, tokenizer.json)
losses, one JSON object a line:                 $OUT/log.jsonl
this run's options:                             $OUT/config.toml
corpus, as tokens:                              $data

what to try next:
  make train STEPS=4000            train longer
  make train TEXT=path/to/text     train on text of your own
  $trainer --config $OUT/config.toml --wiring plain -o runs/plain    the same without skip-layer attention
  make $(basename $sampler) && $sampler $last --prompt 'Skip' --temperature 0.7    more samples (--seed n)
  $trainer --help      every option
  make test                        run the tests, gradients among them
END
