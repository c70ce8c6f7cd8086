#!/usr/bin/env bash
# The Collaborative International Dictionary of English (Webster 1913 and WordNet), from Debian's package dict-gcide,
# as tokens in data/gcide/: bytes, or, with TOKENIZER=gpt2, GPT-2's, in data/gcide-gpt2/. A document is a dictionary
# entry. Prints the folder as its last line.
set -euo pipefail
corpus=gcide
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
choose_tokenizer gcide
exit_if_done
say "fetching 15 MB (Debian package dict-gcide), unpacking 40 MB of text, writing at most 80 MB of tokens: some seconds"
mkdir -p "$root/data/.download"
tmp=$(mktemp -d "$root/data/.download/gcide.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
download_package dict-gcide "$tmp/package"

# An entry begins in column 0 after an empty line; its head may continue in column 0 on the next line. Everything before
# the first entry, the number zero, is licence and preface.
gunzip -c <"$tmp/package/usr/share/dictd/gcide.dict.dz" |
  awk '/^0 \\0\\ adj\./ { inside = 1; above = "" }
       inside { if (above == "" && /^[^ \t]/) printf "%c", 0; print }
       { above = $0 }' >"$tmp/gcide.txt"
entries=$(tr -dc '\000' <"$tmp/gcide.txt" | wc -c)
if ((entries < 100000)); then
  fail "found $entries dictionary entries, expected about 126,000: this package has another format;" \
       "data/tinyshakespeare.sh and data/text.sh do not need it"
fi
run tokenize --out "$out" --separator nul "$tmp/gcide.txt"
echo "$out"
