#!/usr/bin/env bash
# Tiny Shakespeare, from Karpathy's char-rnn, as byte tokens in data/tinyshakespeare/. Prints that folder on its last
# line.
# TINYSHAKESPEARE_URL names another source of the same file (https://, file://).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/data/tinyshakespeare
url=${TINYSHAKESPEARE_URL:-https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt}
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
say() { echo "tinyshakespeare: $*" >&2; }

if [[ -e $out/train_000000.bin ]]; then
  say "already there"
  echo "$out"
  exit 0
fi
say "fetching 1.1 MB, writing 2.2 MB of tokens: a second"
[[ -x $root/data/tokenize ]] || make -s -C "$root" data/tokenize >&2

# The text stays in data/.download/ until it is complete and right, so that a broken download goes on where it
# stopped.
mkdir -p "$root/data/.download"
text=$root/data/.download/tinyshakespeare.txt
right() { echo "$sha256  $text" | sha256sum --check --status 2>/dev/null; }
if ! right; then
  [[ -e $text && $(wc -c <"$text") -lt 1115394 ]] || rm -f "$text"  # only what is shorter than the whole can go on
  if ! curl -fL --no-progress-meter --retry 3 --connect-timeout 20 -C - -o "$text" "$url"; then
    say "error: cannot download $url; run again to go on, or set TINYSHAKESPEARE_URL"
    exit 1
  fi
  if ! right; then
    say "error: $url gave $(wc -c <"$text") bytes with another checksum than expected; deleted, run again"
    rm -f "$text"
    exit 1
  fi
fi
"$root/data/tokenize" --tokenizer bytes --out "$out" "$text" >&2
rm -f "$text"
echo "$out"
