#!/usr/bin/env bash
# `make train`: a small byte-level model of skip-layer attention on real text, from nothing to a sample; on a GPU where
# one is found, and nvcc. It makes 800 updates, or as many as take five minutes on this machine. Environment: STEPS=n:
# so many; TEXT=path trains on a text file or folder of yours, DATA=tinyshakespeare on that instead of the dictionary;
# OUT=folder.
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-gcide}
say() { printf '\n== %s\n' "$*"; }
source scripts/gpu.sh
trainer=./train_gpt2_sla_cpu
[ -z "$gpu_remark" ] || echo "note: $gpu_remark"
if [ -n "$gpus" ] && [ -z "$gpu_problem" ]; then
  trainer=./train_gpt2_sla
elif [ -n "$gpus" ]; then
  echo "note: $gpus is not used, and training is on the CPU: $gpu_problem"
fi

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
name=${OUT:-runs/$(basename "$data")${sum:+-$sum}}
options=(-i "$data/train_*.bin" -j "$data/val_*.bin" --shuffle
  --layers 8 --heads 8 --channels 256 --vocab-size 257 --max-seq-len 256 --wiring "sla(6,6)"
  -t 256 -b 4 --optimizer muon -l 4e-3 -c 0.1)

# How many updates: chosen once, so that the same command resumes the same run on whichever machine. Validations and
# samples take a seventh of the time beside them.
if [ -z "${STEPS:-}" ] && [ -e "$name.steps" ]; then STEPS=$(<"$name.steps"); fi
if [ -z "${STEPS:-}" ]; then
  say "how fast this machine is"
  trial=$("$trainer" "${options[@]}" -x 11 -v 0)
  ms=$(sed -n 's/^step .* | \([0-9]*\) ms | .*/\1/p' <<<"$trial" | sort -n | head -n 1)
  [ -n "$ms" ] || { echo "error: $trainer -x 11 tells no time of an update" >&2; exit 1; }
  STEPS=$((300000 * 7 / 8 / (ms + 1) / 20 * 20))
  STEPS=$((STEPS > 800 ? 800 : STEPS < 200 ? 200 : STEPS))
  minutes() { echo $((($1 * (ms + 1) * 8 / 7 + 30000) / 60000)); }
  text="$ms ms an update: $STEPS updates, about $(minutes $STEPS) min on this machine"
  [ $STEPS = 800 ] || text+="; STEPS=800, as in the README, takes about $(minutes 800)"
  echo "$text"
  echo "(kept in $name.steps for the next time)"
  mkdir -p "$(dirname "$name")"
  echo $STEPS >"$name.steps"
fi
OUT=${OUT:-$name-$STEPS}

say "training"
options+=(-x "$STEPS" -u 60 -v 100 -m 40 -s 200 -g 256 --temperature 0.7 -n 200)
printf '%q ' "$trainer" "${options[@]}" -o "$OUT" -y
echo
"$trainer" "${options[@]}" -o "$OUT" -y

say "done"
last=$(ls -d "$OUT"/step_* | tail -n 1) sampler=${trainer/train/sample}
build=${PRECISION:+PRECISION=$PRECISION }${ATTENTION:+ATTENTION=$ATTENTION }
cat <<END
model, to load anywhere as GPT-2 of full size:  $last (config.json, model.safetensors, tokenizer.json)
losses, one JSON object a line:                 $OUT/log.jsonl
this run's options:                             $OUT/config.toml
corpus, as tokens:                              $data

what to try next:
  make train STEPS=4000            train longer
  make train TEXT=path/to/text     train on text of your own
  $trainer --config $OUT/config.toml --wiring plain -o runs/plain    the same without skip-layer attention
  make $build$(basename $sampler) && $sampler $last --prompt 'Skip' --temperature 0.7    more samples (--seed n)
  $trainer --help      every option
  make test                        run the tests, gradients among them
END
