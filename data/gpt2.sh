#!/usr/bin/env bash
# GPT-2's vocabulary, in tiktoken's format, as data/gpt2.tiktoken. Prints that file as its last line.
# GPT2_VOCABULARY_URL is another location of the same file (https://, file://). Where OpenAI's host is not reached, the
# file is taken from the source of openai-whisper, as pip fetches it.
set -euo pipefail
corpus=gpt2
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
file=$root/data/gpt2.tiktoken
if [[ ! -e $file ]]; then
  say "fetching 0.8 MB, a second"
  fetch() {
    download "$1" "$file" 835554 306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930 \
      "set GPT2_VOCABULARY_URL"
  }
  if [[ -n ${GPT2_VOCABULARY_URL:-} ]]; then
    fetch "$GPT2_VOCABULARY_URL"
  elif ! (fetch https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken); then
    say "taking it from the Python package openai-whisper"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m pip download --quiet --no-deps --no-binary openai-whisper -d "$folder" openai-whisper >&2 &&
      tar xzf "$folder"/*.tar.gz -C "$folder" --strip-components 1 ||
      fail "pip could not download openai-whisper; run again, or set GPT2_VOCABULARY_URL"
    fetch "file://$folder/whisper/assets/gpt2.tiktoken"
  fi
fi
echo "$file"
