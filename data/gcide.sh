#!/usr/bin/env bash
# The Collaborative International Dictionary of English (Webster 1913 and WordNet), from Debian's package dict-gcide,
# as byte tokens in data/gcide/. A document is a dictionary entry. Prints that folder on its last line.
set -euo pipefail
export LC_ALL=C
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/data/gcide
say() { echo "gcide: $*" >&2; }

if [[ -e $out/train_000000.bin ]]; then
  say "already there"
  echo "$out"
  exit 0
fi
say "fetching 15 MB (Debian package dict-gcide), unpacking 40 MB of text, writing 80 MB of tokens: some seconds"
[[ -x $root/data/tokenize ]] || make -s -C "$root" data/tokenize >&2

mkdir -p "$root/data/.download"
tmp=$(mktemp -d "$root/data/.download/gcide.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP

# apt checks the package against its signed lists. As root it would hand the download to a user of its own, who may
# not enter this folder.
if ! (cd "$tmp" && apt-get -q -o APT::Sandbox::User=root download dict-gcide) >&2; then
  say "error: apt-get could not download dict-gcide; if package lists are missing, run scripts/setup.sh, which" \
      "fetches them (apt-get update)"
  exit 1
fi
dpkg-deb -x "$tmp"/dict-gcide_*.deb "$tmp/package"

# An entry begins with a line in column 0 behind an empty line; its head may go on in column 0 on the next. Everything
# before the first entry, the number zero, is licence and preface.
gunzip -c <"$tmp/package/usr/share/dictd/gcide.dict.dz" |
  awk '/^0 \\0\\ adj\./ { inside = 1; above = "" }
       inside { if (above == "" && /^[^ \t]/) printf "%c", 0; print }
       { above = $0 }' >"$tmp/gcide.txt"
entries=$(tr -dc '\000' <"$tmp/gcide.txt" | wc -c)
if ((entries < 100000)); then
  say "error: found $entries dictionary entries, expected about 126,000: this package is laid out differently;" \
      "data/tinyshakespeare.sh and data/text.sh do not need it"
  exit 1
fi
"$root/data/tokenize" --tokenizer bytes --separator nul --out "$out" "$tmp/gcide.txt" >&2
echo "$out"
