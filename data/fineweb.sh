#!/usr/bin/env bash
# data/fineweb.sh [SHARDS]: FineWeb in GPT-2's tokens, 100 M of them a shard, as modded-nanogpt uses it (Hugging Face,
# kjj0/fineweb10B-gpt2): data/fineweb/fineweb_val_000000.bin and fineweb_train_000001.bin up to SHARDS, 1 to 103, by
# default 10. Prints the folder on its last line. FINEWEB_URL is another location of the same files (https://, file://).
set -euo pipefail
corpus=fineweb
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
shards=${1:-10} out=$root/data/fineweb
url=${FINEWEB_URL:-https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main}
[[ $shards =~ ^[1-9][0-9]{0,2}$ ]] && ((shards <= 103)) || fail "usage: data/fineweb.sh [SHARDS], of 1 to 103"

# Whether the file is a complete shard: the header 20240520, 1, number of tokens, and as many tokens.
is_shard() {
  local header
  read -r -a header < <(od -An -t d4 -N 12 "$1")
  [[ ${header[0]:-} = 20240520 && ${header[1]:-} = 1 && $(wc -c <"$1") = $((1024 + 2 * ${header[2]:-0})) ]]
}

# Whether it may be the beginning of one.
begins_as_shard() {
  [[ ! -e $1 || ! -s $1 || $(od -An -t d4 -N 4 "$1" | tr -d ' ') = 20240520 ]]
}

vocabulary=$("$root/data/gpt2.sh" | tail -n 1)
mkdir -p "$out"
cp "$vocabulary" "$out/gpt2.tiktoken"  # the tokens' vocabulary, where the trainer looks for it
names=(fineweb_val_000000.bin)
for ((i = 1; i <= shards; i++)); do names+=("$(printf 'fineweb_train_%06d.bin' "$i")"); done
missing=()
for name in "${names[@]}"; do [[ -e $out/$name ]] || missing+=("$name"); done
say "fetching ${#missing[@]} files of 200 MB: $((${#missing[@]} * 200)) MB, two seconds each at 100 MB/s"
for name in ${missing[@]+"${missing[@]}"}; do
  # A file is named .part until it is complete, so that a broken download resumes.
  got=0
  fetch_rest "$url/$name" "$out/$name.part" || got=$?
  if [[ ! -e $out/$name.part ]] || ! is_shard "$out/$name.part"; then
    ((got != cannot_resume)) || rm "$out/$name.part"
    ((got == 0)) || ! begins_as_shard "$out/$name.part" ||
      fail "cannot download $url/$name; run again to resume, or set FINEWEB_URL"
    rm -f "$out/$name.part"
    fail "$url/$name gave no shard; deleted, run again"
  fi
  mv "$out/$name.part" "$out/$name"
done
echo "$out"
