#!/usr/bin/env bash
# The kernel's sources, from Debian's or Ubuntu's package linux-source: text with long-range structure, for long
# contexts. Tokens in data/linux/: bytes, or, with TOKENIZER=gpt2, GPT-2's, in data/linux-gpt2/. A document is a file,
# in the order of the archive. Prints the folder as its last line.
set -euo pipefail
corpus=linux
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
choose_tokenizer linux
exit_if_done
package=$(apt-cache depends linux-source 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }')
[[ -n $package ]] ||
  fail "apt knows no linux-source; if package lists are missing, run scripts/setup.sh gcide, which fetches them"
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
tokenize "$archive"
rm -rf "$folder"
echo "$out"
