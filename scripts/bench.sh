#!/usr/bin/env bash
# `make bench`: tokens/s, share of the limit and memory of three sizes on this machine, in about a minute once the
# trainer is built. Each size makes two updates of random tokens, and more for 8 s; the trainer's log and plan have the
# numbers: of the median update but the first, and the bytes that the plan allocates. On a GPU GPT-2 124M, 350M and
# 774M, at 1,024 tokens, with the largest micro-batch up to 32 that is a power of two and fits; on a CPU 8 layers of
# 256 channels, 6 of 384 and 124M. Nothing is written but a temporary folder. Environment:
# PRECISION, as of make.
set -euo pipefail
export LC_ALL=C
source -- "$(dirname -- "$0")/runs.sh"
enter_root
source scripts/gpu.sh
trainer=./train_gpt2_sla_cpu groups=(gpu cpu)
machine=$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)
machine="${machine:-$(uname -m)}, $(nproc) processors"
if [ -n "$gpus" ] && [ -z "$gpu_problem" ]; then
  trainer=./train_gpt2_sla groups=(gpu) machine=$gpus
elif [ -n "$gpus" ]; then
  echo "note: $gpus is not used: $gpu_problem" >&2
fi
scripts/setup.sh "${groups[@]}" >&2
make -s -j"$(nproc)" "${trainer#./}" >&2
folder=$(mktemp -d) child=
trap '[ -z "$child" ] || kill -KILL $child 2>/dev/null || true; rm -rf "$folder"' EXIT

number() { sed -n "s/.*\"$1\":\([0-9.]*\).*/\1/p"; }
# bench <name> <vocabulary> <largest micro-batch> <tokens in a sequence> <model's options ...>
bench() {
  local name=$1 batch=$3 T=$4 plan fits
  # shellcheck disable=SC2059 # bytes, as escapes
  printf "$(awk -v vocabulary="$2" 'BEGIN { for (i = 0; i < 70000; i++) {
    token = int(rand() * vocabulary); printf "\\%03o\\%03o", token % 256, token / 256 } }')" >"$folder/tokens.bin"
  local run=("$trainer" "${@:5}" -i "$folder/tokens.bin" -t "$T" -k constant -v 0 -x 1000000)
  if ! fits=$("${run[@]}" -b 1 --dry-run --json 2>"$folder/output" | number largest_micro_batch); then
    grep -qE 'exceeds the free |are free on the ' "$folder/output" || die "$name: $(tail -n 1 "$folder/output")"
    fits=0
  fi
  while [ "$batch" -gt "$fits" ]; do batch=$((batch / 2)); done
  if [ "$batch" = 0 ]; then printf '%-20s %12s\n' "$name" "does not fit"; return; fi
  plan=$("${run[@]}" -b "$batch" --dry-run --json)
  "${run[@]}" -b "$batch" -o "$folder/run" >"$folder/output" 2>&1 &
  child=$!
  until awk '/"loss":/ { n++ } END { exit n < 2 }' "$folder/run/log.jsonl" 2>/dev/null; do
    kill -0 $child 2>/dev/null || break
    sleep 0.1
  done
  sleep 8
  # Killed, it writes no checkpoint.
  { kill -KILL $child && wait $child; } 2>/dev/null || [ $? = 137 ] ||
    die "$name: the trainer ended: $(tail -n 1 "$folder/output")"
  child=
  sed -n 's/^{"step":.*"ms":\([0-9.]*\),.*"tokens_per_second":\([0-9.]*\),"limit_ms":\([0-9.]*\).*/\2 \3 \1/p' \
    "$folder/run/log.jsonl" | tail -n +2 | sort -n | awk -v name="$name" -v batch="$batch x $T" \
    -v bytes="$(number memory_needed <<<"$plan")" '{ rate[NR] = $1; share[NR] = $2 / $3 }
    END { m = int((NR + 1) / 2)
      printf "%-20s %12s %12.0f %11.0f %% %9.2f GB\n", name, batch, rate[m], share[m] * 100, bytes / 1e9 }'
  rm -r "$folder/run"
}

echo "$machine"
printf '%-20s %12s %12s %13s %12s\n' model micro-batch tokens/s 'of the limit' memory
if [ $trainer = ./train_gpt2_sla ]; then
  for size in '124M d12' '350M d24' '774M d36'; do bench "GPT-2 ${size% *}" 50257 32 1024 -e "${size#* }"; done
else
  bench '8 layers of 256, 6M' 257 4 256 --layers 8 --heads 8 --channels 256 --vocab-size 257 --max-seq-len 256
  bench '6 layers of 384, 30M' 50257 4 256 -e gpt3:384
  bench 'GPT-2 124M' 50257 4 64 -e d12
fi
