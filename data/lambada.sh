#!/usr/bin/env bash
# LAMBADA's 5,153 test texts, as OpenAI prepared them for GPT-2: data/lambada/lambada_test.jsonl, a JSON object with the
# field "text" a line. Prints the file as its last line. LAMBADA_URL is another location of the same file (https://,
# file://).
set -euo pipefail
corpus=lambada
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
file=$root/data/lambada/lambada_test.jsonl
exit_if_done "$file"
say "fetching 1.8 MB, a second"
download "${LAMBADA_URL:-https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl}" "$file" 1819752 \
  4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226 "set LAMBADA_URL"
echo "$file"
