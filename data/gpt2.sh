#!/usr/bin/env bash
# GPT-2's vocabulary, in tiktoken's format, as data/gpt2.tiktoken. Prints that file as its last line.
# GPT2_VOCABULARY_URL is another location of the same file (https://, file://).
set -euo pipefail
corpus=gpt2
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
file=$root/data/gpt2.tiktoken
if [[ ! -e $file ]]; then
  say "fetching 0.8 MB, a second"
  download "${GPT2_VOCABULARY_URL:-https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken}" "$file" \
    835554 306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930 "set GPT2_VOCABULARY_URL"
fi
echo "$file"
