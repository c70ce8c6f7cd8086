#!/usr/bin/env bash
# `make train`: a small byte-level model of skip-layer attention on real text, from nothing to a sample; on a GPU where
# one is found, and nvcc. It makes 800 updates, or as many as take five minutes on this machine: if it gets slower or
# faster meanwhile, the run continues to another number of them. Environment: STEPS=n: so many; TEXT=path trains on a
# text file or folder of yours, DATA=tinyshakespeare on that instead of the dictionary; VOCABULARY=4096: tokens are not
# bytes, but of a vocabulary of so many that is learned from the text; OUT=folder.
set -euo pipefail
source -- "$(dirname -- "$0")/runs.sh"
enter_root TEXT OUT
source scripts/stoppable.sh
DATA=${DATA:-gcide} TEXT=${TEXT:-} STEPS=${STEPS:-} VOCABULARY=${VOCABULARY:-}
die() { echo "error: $*" >&2; exit 1; }
[[ ${STEPS:-1} =~ ^[1-9][0-9]{0,8}$ ]] || die "STEPS=$STEPS: it must be a number of updates, at least 1"
if [ -n "$VOCABULARY" ] &&
  ! [[ $VOCABULARY =~ ^[1-9][0-9]{2,4}$ && $VOCABULARY -ge 257 && $VOCABULARY -le 65536 ]]; then
  die "VOCABULARY=$VOCABULARY: it must be a number of tokens, 257 to 65536"
fi
export TOKENIZER=bytes
[ -z "$VOCABULARY" ] || TOKENIZER=bpe$VOCABULARY
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
groups=(gpu corpora)
if [ $trainer = ./train_gpt2_sla_cpu ]; then groups+=(cpu); fi
case $DATA in
  gcide) fetching=gcide ;;
  tinyshakespeare) fetching=curl ;;
  *) die "DATA=$DATA: there are gcide and tinyshakespeare; TEXT=path takes any text" ;;
esac
if [ -z "$TEXT" ] && [ ! -e "data/$DATA${VOCABULARY:+-$TOKENIZER}/train_000000.bin" ]; then groups+=("$fetching"); fi
scripts/setup.sh "${groups[@]}" --optional extras

say "programs"
targets=("${trainer#./}" data/tokenize report)
# A line for each source that is compiled, with its number of how many: those that make would compile if only they were
# missing or older. Other lines than make's commands are shown.
stamps=$(find build -name '*flags' -printf '-o %p ' 2>/dev/null) || true
# shellcheck disable=SC2086 # options, split at spaces
total=$(make -n $stamps "${targets[@]}" 2>/dev/null | grep -c -- ' -std=[^ ]* .* [^ ]*\.\(cpp\|cu\) .*-o ') || true
make --no-print-directory -j"$(nproc)" "${targets[@]}" 2>&1 | {
  count=0
  while IFS= read -r line; do
    if [[ $line =~ \ -std=.*\ ([^\ ]+\.(cpp|cu))\  && $line = *' -o '* ]]; then
      count=$((count + 1))
      echo "compiling ${BASH_REMATCH[1]} ($count$([ "$count" -gt "$total" ] || echo " of $total"))"
    elif [[ $line != *' -std='*' -o '* && $line != ar\ * && $line != cat\ * ]]; then
      printf '%s\n' "$line" >&2
    fi
  done
}

say "corpus"
if [ -n "$TEXT" ]; then data=$(data/text.sh "$TEXT" | tail -n 1); else data=$("data/$DATA.sh" | tail -n 1); fi
data=${data#"$PWD/"}
# A micro-batch of validation takes 4 sequences of 256 tokens, and the last tenth of the text is validation data.
val=$(find "$data" -name 'val_*.bin' -printf '%s\n' | awk '{ n += ($1 - 1024) / 2 } END { print n + 0 }')
if [ "$val" -lt 1025 ]; then
  die "${TEXT:-$data}: is too little text: $val tokens to validate with, and make train needs 1025, which 10300 bytes" \
    "of text give${VOCABULARY:+ without VOCABULARY, and about four times as many with it}; name more text"
fi
# A run is of one text, which may have changed since the last time, and in one precision: its name has a checksum of the
# folder's name and of the tokens.
name=$DATA
if [ -n "$TEXT" ]; then
  name=$(basename "$data")
  sum=$({ echo "$name"; sed -n '/"shards"/,$s/.*"crc32c": "\(.*\)".*/\1/p' "$data/MANIFEST.json"; } | sha256sum)
  name=${name#text-} name=${name%"-$TOKENIZER"} name=${name%-????????}
  name=$(wiring_name "${name:0:30}")-${sum:0:4}
fi
name=runs/$name${VOCABULARY:+-$TOKENIZER}${PRECISION:+-${PRECISION,,}}${STEPS:+-$STEPS}
OUT=${OUT:-$name}
vocab_size=257
# The text may give fewer tokens than asked for.
[ -z "$VOCABULARY" ] || vocab_size=$(sed -n 's/.*"vocab_size": \([0-9]*\).*/\1/p' "$data/MANIFEST.json")
options=(-i "$data/train_*.bin" -j "$data/val_*.bin" --shuffle
  --layers 8 --heads 8 --channels 256 --vocab-size "$vocab_size" --max-seq-len 256 --wiring "sla(6,6)"
  -t 256 -b 4 --optimizer muon -l 4e-3 -c 0.1)

# How many updates: chosen once, so that the same command resumes the same run on whichever machine, and again only if
# it would not take five minutes. Validations and samples take a seventh of the time beside them.
longest=$((300000 * 7 / 8)) chosen=$OUT.steps  # ms of updates; file
choose() {  # choose <updates that fit>
  local steps=$(($1 / 20 * 20))
  echo $((steps > 800 ? 800 : steps < 200 ? 200 : steps))
}
is_chosen=
if [ -z "$STEPS" ]; then
  is_chosen=yes
  [ ! -e "$chosen" ] || STEPS=$(<"$chosen")
fi
if [ -z "$STEPS" ]; then
  say "how fast this machine is"
  trial=$(mktemp -d)
  trap 'rm -rf "$trial"' EXIT
  "$trainer" "${options[@]}" -x 11 -v 0 -o "$trial/run" >/dev/null
  ms=$(sed -n 's/^{"step":.*"ms":\([0-9]*\).*/\1/p' "$trial/run/log.jsonl" | sort -n | head -n 1)
  rm -r "$trial"
  trap - EXIT
  [ -n "$ms" ] || die "$trainer -x 11 tells no time of an update"
  STEPS=$(choose $((longest / (ms + 1))))
  minutes() { echo $((($1 * (ms + 1) * 8 / 7 + 30000) / 60000)); }
  text="$ms ms an update: $STEPS updates, about $(minutes "$STEPS") min on this machine"
  [ "$STEPS" = 800 ] || text+="; STEPS=800, as in the README, takes about $(minutes 800)"
  echo "$text"
  echo "(kept in $chosen for the next time)"
  mkdir -p "$(dirname "$chosen")"
  echo "$STEPS" >"$chosen"
fi

# watch: every so many seconds, from the times of the updates so far, and those of the last 20 for the others, how many
# fit. If others fit, by a tenth of the time, that number is kept and the run stopped, to be resumed with it.
watch() {
  local fit
  while sleep 45 >/dev/null 2>&1; do
    fit=$(sed -n 's/^{"step":\([0-9]*\),"loss":.*"ms":\([0-9.]*\),.*/\1 \2/p' "$OUT/log.jsonl" 2>/dev/null |
      awk -v longest="$longest" -v steps="$STEPS" '
        { sum += $2; last[NR % 20] = $2; step = $1 }
        END {
          for (i in last) { pace += last[i]; n++ }
          if (n < 20 || step >= steps) exit
          pace /= n
          off = sum + pace * (steps - step) - longest
          if (off * off > longest * longest / 100) printf "%d", step + (longest > sum ? (longest - sum) / pace : 0)
        }') && [ -n "$fit" ] || continue
    fit=$(choose "$fit")
    [ "$fit" != "$STEPS" ] || continue
    echo "$fit" >"$chosen"
    kill -USR1 $$
    return
  done
}

say "training"
options+=(-u 60 -v 100 -m 40 -s 200 -g 256 --temperature 0.7 -n 200)
while true; do
  run=("$trainer" "${options[@]}" -x "$STEPS" -o "$OUT" -y)
  printf '%q ' "${run[@]}"
  echo
  watcher=
  if [ -n "$is_chosen" ]; then watch & watcher=$!; fi
  stopped='' status=0
  stoppable "${run[@]}" || true
  [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
  now=$([ -z "$is_chosen" ] || cat "$chosen")
  if [ -z "$stopped" ] || [ "${now:-$STEPS}" = "$STEPS" ]; then break; fi
  echo "at this speed $now updates take five minutes, not $STEPS"
  STEPS=$now
done
[ ! -e "$OUT/log.jsonl" ] || ./report "$OUT" >/dev/null || true
[ "$status" -eq 0 ] || exit "$status"

say "done"
last=$(find "$OUT" -maxdepth 1 -name 'step_*' | sort | tail -n 1) sampler=${trainer/train/sample}
build=${PRECISION:+PRECISION=$PRECISION }
# What make and then a shell read as this text.
in_make() { printf '%q' "${1//\$/\$\$}"; }
same_text=  # what says it is on this text again
[ "$DATA" = gcide ] || same_text=" DATA=$DATA"
[ -z "$TEXT" ] || same_text=" TEXT=$(in_make "$TEXT")"
[ -z "$VOCABULARY" ] || same_text+=" VOCABULARY=$VOCABULARY"
# The first word of the text, whose tokens are bytes of two: 256 ends a text. Of a vocabulary of its own, which begins
# with what is most frequent, the first longer word, if it is in Latin letters.
prompt=$(if [ -n "$VOCABULARY" ]; then grep -oE '"Ġ[A-Za-z]{4,}"' "$data/tokenizer.json" | tr -dc 'A-Za-z\n'; else
  tail -c +1025 "$data/train_000000.bin" | head -c 2000 | tr -d '\000\001' |
    grep -aoE '[^[:space:][:cntrl:]]{3,30}' | iconv -c -f UTF-8 -t UTF-8; fi | head -n 1) || true
printf -v again '%q ' --config "$OUT/config.toml" --wiring plain -o "$OUT-plain"
printf -v sample '%q ' "$last" --prompt "$prompt"
cat <<END
model, to load anywhere as GPT-2 of full size:  $last (config.json, model.safetensors, tokenizer.json)
the run as a page, for a browser:               $OUT/report.html
losses, one JSON object a line:                 $OUT/log.jsonl
this run's options:                             $OUT/config.toml
corpus, as tokens:                              $data

what to try next:
  make ${build}train$same_text STEPS=4000    train longer
  make train TEXT=path/to/text     train on text of your own
  $trainer $again   the same without skip-layer attention
  make $build${sampler#./} && $sampler $sample--temperature 0.7    more samples (--seed n)
  $trainer --help      every option
  make test                        run the tests, gradients among them
END
