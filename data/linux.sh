#!/usr/bin/env bash
# The kernel's sources, from Debian's or Ubuntu's package linux-source: text with long-range structure, for long
# contexts. Tokens in data/linux/: bytes, or, with TOKENIZER=gpt2, GPT-2's, in data/linux-gpt2/. A document is a file,
# in the order of the archive. Prints the folder as its last line.
# PART=sound/soc/codecs data/linux.sh: the files of that folder alone, in data/linux-sound-soc-codecs/.
set -euo pipefail
corpus=linux
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
part=${PART:-}
unset PART  # make has one of its own
[[ $part =~ ^([A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*)?$ ]] ||
  fail "PART=$part: it must be a folder of the sources, as sound/soc"
choose_tokenizer "linux${part:+-${part//\//-}}"
exit_if_done
package=$(apt-cache depends linux-source 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }') || true
[[ -n $package ]] ||
  fail "apt knows no linux-source, or is not here; if package lists are missing, run scripts/setup.sh gcide, which" \
    "fetches them"
[[ -z $part ]] || command -v xz >/dev/null || fail "PART=$part: tar needs xz to unpack it (package xz-utils)"
say "fetching 140 MB (Debian package $package), reading 1.4 GB of text from it, writing at most 2.8 GB of tokens:" \
  "one to three minutes"
# The package is kept until its tokens are written, so that an interrupted run does not fetch it again.
folder=$root/data/.download/$package
if [[ ! -e $folder/complete ]]; then
  rm -rf "$folder"
  download_package "$package" "$folder"
  touch "$folder/complete"
fi
archive=$(find "$folder/usr/src" -type f -name 'linux-source-*.tar.*' | head -n 1)
[[ -n $archive ]] || fail "$package holds no linux-source-*.tar: it has another layout"
if [[ -n $part ]]; then
  mkdir -p "$folder/part"
  tar -x -f "$archive" -C "$folder/part" --strip-components=1 --wildcards "*/$part" ||
    fail "PART=$part: tar cannot unpack it from $archive (is there such a folder?)"
  archive=$folder/part/$part
fi
run tokenize --out "$out" "$archive"
rm -rf "$folder"
echo "$out"
