#!/usr/bin/env bash
# `make train`: the best small model of skip-layer attention that this machine makes of real text in so many minutes,
# five if nothing is said, from nothing to a sample; on a GPU where one is found, and nvcc. It measures how fast models
# from small to large train here, takes the one that the time is enough for, says why, and writes what it chose into a
# config.toml, by which the trainer runs. If the machine gets slower or faster meanwhile, the run continues to another
# number of updates. Environment: MINUTES=n or HOURS=n, such as 0.5; TEXT=path trains on a text file or folder of yours,
# DATA=tinyshakespeare on that instead of the dictionary; VOCABULARY=4096: tokens are not bytes, but of a vocabulary of
# so many that is learned from the text; OUT=folder.
set -euo pipefail
source -- "$(dirname -- "$0")/runs.sh"
enter_root TEXT OUT
source scripts/stoppable.sh
DATA=${DATA:-gcide} TEXT=${TEXT:-} VOCABULARY=${VOCABULARY:-}
calculate() { LC_ALL=C awk "BEGIN { $1 }"; }
for name in MINUTES HOURS; do
  while [[ ${!name:-} = 0[0-9]* ]]; do printf -v "$name" %s "${!name#0}"; done  # gawk would read 010 as 8
  [[ ${!name:-1} =~ ^([0-9]{1,5}|[0-9]{0,5}\.[0-9]{1,3})$ ]] && [[ ${!name:-1} =~ [1-9] ]] ||
    die "$name=${!name}: it must be a time, such as 20 or 0.5"
done
[ -z "${MINUTES:-}" ] || [ -z "${HOURS:-}" ] || die "MINUTES=$MINUTES and HOURS=$HOURS: give one of them"
[ -z "$TEXT" ] || [ "$DATA" = gcide ] || die "TEXT and DATA each say what to train on; give one of them"
[ -z "$TEXT" ] || [ -e "$TEXT" ] || die "$TEXT: no such file or folder"
minutes=5
[ -z "${HOURS:-}" ] || minutes=$(calculate "print $HOURS * 60")
[ -z "${MINUTES:-}" ] || minutes=$MINUTES
if [ -n "$VOCABULARY" ] &&
  ! [[ $VOCABULARY =~ ^[1-9][0-9]{2,4}$ && $VOCABULARY -ge 257 && $VOCABULARY -le 65536 ]]; then
  die "VOCABULARY=$VOCABULARY: it must be a number of tokens, 257 to 65536"
fi
export TOKENIZER=bytes
[ -z "$VOCABULARY" ] || TOKENIZER=bpe$VOCABULARY
say() { printf '\n== %s\n' "$*"; }
source scripts/gpu.sh
trainer=./train_gpt2_sla_cpu on_gpu=0
[ -z "$gpu_remark" ] || echo "note: $gpu_remark"
if [ -n "$gpus" ] && [ -z "$gpu_problem" ]; then
  trainer=./train_gpt2_sla on_gpu=1
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
# A run is of one text, which may have changed since the last time, and in one precision: its name has a checksum of the
# folder's name and of the tokens.
name=$DATA
if [ -n "$TEXT" ]; then
  name=$(basename "$data")
  sum=$({ echo "$name"; sed -n '/"shards"/,$s/.*"crc32c": "\(.*\)".*/\1/p' "$data/MANIFEST.json"; } | sha256sum)
  name=${name#text-} name=${name%"-$TOKENIZER"} name=${name%-????????}
  name=$(LC_ALL=C sed 's/[^a-zA-Z0-9.]\{1,\}/_/g; s/_$//' <<<"${name:0:30}")-${sum:0:4}
fi
name=runs/$name${VOCABULARY:+-$TOKENIZER}${PRECISION:+-${PRECISION,,}}${MINUTES:+-${MINUTES}min}${HOURS:+-${HOURS}h}
OUT=${OUT:-$name} OUT=${OUT%/}
chosen=$OUT.toml
manifest_number() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" "$data/MANIFEST.json" | head -n 1; }
training_tokens=$(manifest_number train_tokens) validation_tokens=$(manifest_number val_tokens)
if [ "$validation_tokens" -lt 1025 ]; then
  die "${TEXT:-$data}: is too little text: $validation_tokens tokens to validate with, and make train needs" \
    "1025, which 10300 bytes of text give${VOCABULARY:+ without VOCABULARY, and about four times as many with it};" \
    "name more text"
fi
bytes_a_token=$(calculate "print $(manifest_number bytes_of_text) / ($training_tokens + $validation_tokens)")
# The text may give fewer tokens than VOCABULARY asks for.
files=(-i "$data/train_*.bin" -j "$data/val_*.bin" --vocab-size "$(manifest_number vocab_size)")

# What updates have of the time; the rest is validations, samples and checkpoints.
longest=$(calculate "printf \"%.0f\", $minutes * 60000 * 0.95")  # ms
source scripts/ladder.sh
chosen_number() { sed -n "s/^$1 = \([0-9]*\)$/\1/p" "$chosen"; }

say "how fast this machine is, and what it trains in ${minutes} minutes"
if [ -e "$chosen" ]; then
  why=$(sed -n 's/^# //p' "$chosen")
  [[ $why = [0-9]*' minutes on this machine'* && -n $(chosen_number steps) && -n $(chosen_number total-batch) ]] ||
    die "$chosen: is none of make train's, and stays as it is; give another OUT"
  if [[ $why != "$(calculate "printf \"%g\", $minutes") minutes on "* ]]; then
    die "$chosen: is what was chosen for ${why%% *} minutes, not $minutes; give another OUT"
  fi
  echo "$why"
else
  choose
fi
echo "(kept in $chosen for the next time)"
STEPS=$(chosen_number steps)
most=$((most_epochs * training_tokens / $(chosen_number total-batch)))

# watch: every so many seconds, from the times of the updates so far, and those of their second half for the others, how
# many fit. If others fit, by a twentieth of the time, that number is kept and the run stopped, to be resumed with it.
watch() {
  local fit
  while sleep "$((longest > 900000 ? 45 : longest / 20000 + 1))" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    fit=$(sed -n 's/^{"step":\([0-9]*\),"loss":.*"ms":\([0-9.]*\),.*/\1 \2/p' "$OUT/log.jsonl" 2>/dev/null |
      LC_ALL=C awk -v longest="$longest" -v steps="$STEPS" '
        { sum += $2; until[NR] = sum; step = $1 }
        END {
          half = int(NR / 2)
          if (half < 10 || step >= steps) exit
          pace = (sum - until[half]) / (NR - half)
          off = sum + pace * (steps - step) - longest
          if (off * off > longest * longest / 400) printf "%d", step + (longest > sum ? (longest - sum) / pace : 0)
        }') && [ -n "$fit" ] || continue
    if [ "$fit" -gt "$most" ]; then fit=$most; fi
    [ "$fit" != "$STEPS" ] || continue
    sed -i "s/^steps = .*/steps = $fit/" "$chosen"
    kill -USR1 $$
    return
  done
}

say "training"
while true; do
  run=("$trainer" --config "$chosen" "${files[@]}" -o "$OUT" -y)
  printf '%q ' "${run[@]}"
  echo
  watch & watcher=$!
  stopped='' status=0
  stoppable "${run[@]}" || true
  kill "$watcher" 2>/dev/null || true
  now=$(chosen_number steps)
  # Where the time was over before it stopped: one update more than it has.
  reached=$(newest_checkpoint "$OUT")
  reached=$((10#0${reached##*step_}))
  if [ -n "$stopped" ] && [ "$now" != "$STEPS" ] && [ "$now" -le "$reached" ]; then
    now=$((reached + 1))
    sed -i "s/^steps = .*/steps = $now/" "$chosen"
  fi
  if [ -z "$stopped" ] || [ "$now" = "$STEPS" ]; then break; fi
  echo "at this speed $now updates take the time, not $STEPS"
  STEPS=$now
done
[ ! -e "$OUT/log.jsonl" ] || ./report "$OUT" >/dev/null || true
[ "$status" -eq 0 ] || exit "$status"

say "done"
last=$(newest_checkpoint "$OUT") sampler=${trainer/train/sample}
# What make and then a shell read as this text.
in_make() { printf '%q' "${1//\$/\$\$}"; }
build=  # what make was told
for name in PRECISION INCLUDES NVCC; do
  [ -z "${!name:-}" ] || build+="$name=$(in_make "${!name}") "
done
same_text=  # what says it is on this text again
[ "$DATA" = gcide ] || same_text=" DATA=$DATA"
[ -z "$TEXT" ] || same_text=" TEXT=$(in_make "$TEXT")"
[ -z "$VOCABULARY" ] || same_text+=" VOCABULARY=$VOCABULARY"
# The first word of the text, whose tokens are bytes of two: 256 ends a text. Of a vocabulary of its own, which begins
# with what is most frequent, the first longer word, if it is in Latin letters.
prompt=$(if [ -n "$VOCABULARY" ]; then grep -oE '"Ġ[A-Za-z]{4,}"' "$data/tokenizer.json" | tr -dc 'A-Za-z\n'; else
  tail -c +1025 "$data/train_000000.bin" | head -c 2000 | tr -d '\000\001' |
    grep -aoE '[^[:space:][:cntrl:][:punct:]]{3,30}' | iconv -c -f UTF-8 -t UTF-8; fi | head -n 1) || true
printf -v again '%q ' --config "$OUT/config.toml" --wiring rope -o "$OUT-plain"
printf -v sample '%q ' "$last" --prompt "$prompt"
cat <<END
model, for transformers, too:                   $last (config.json, model.safetensors, tokenizer.json)
the run as a page, for a browser:               $OUT/report.html
losses, one JSON object a line:                 $OUT/log.jsonl
this run's options:                             $OUT/config.toml
corpus, as tokens:                              $data

what to try next:
  make ${build}train$same_text HOURS=1    train longer
  make ${build}train TEXT=path/to/text     train on text of your own
  $trainer $again   the same without skip-layer attention
  make $build${sampler#./} && $sampler $sample--temperature 0.7    more samples (--seed n)
  $trainer --help      every option
  make test                        run the tests, gradients among them
END
