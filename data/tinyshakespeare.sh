#!/usr/bin/env bash
# Tiny Shakespeare, from Karpathy's char-rnn, as tokens in data/tinyshakespeare/: bytes, or, with TOKENIZER=gpt2,
# GPT-2's, in data/tinyshakespeare-gpt2/. Prints the folder as its last line. TINYSHAKESPEARE_URL is another location of
# the same file (https://, file://).
set -euo pipefail
corpus=tinyshakespeare
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
choose_tokenizer tinyshakespeare
exit_if_done
say "fetching 1.1 MB, writing at most 2.2 MB of tokens: a second"
text=$root/data/.download/tinyshakespeare.txt
char_rnn=https://raw.githubusercontent.com/karpathy/char-rnn/master
download "${TINYSHAKESPEARE_URL:-$char_rnn/data/tinyshakespeare/input.txt}" "$text" \
  1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed "set TINYSHAKESPEARE_URL"
run tokenize --out "$out" "$text"
rm -f "$text"
echo "$out"
