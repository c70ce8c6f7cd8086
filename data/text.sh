#!/usr/bin/env bash
# data/text.sh PATH: any text file, or folder of text files, as byte tokens in
# data/text-<name>-<checksum of the path>/. Made again when something in PATH is newer. A document is a file. Prints
# the folder on its last line.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "text: $*" >&2; }

if [[ $# -ne 1 || $1 == -* ]]; then
  say "usage: data/text.sh PATH (a text file, or a folder of text files)"
  exit 1
fi
if [[ ! -e $1 ]]; then
  say "error: $1: no such file or folder"
  exit 1
fi
path=$(realpath "$1")
name=$(basename "$path" | tr -c 'A-Za-z0-9._\n-' '_')
sum=$(printf %s "$path" | sha256sum)
out=$root/data/text-$name-${sum:0:8}

# A folder is newer when a name in it came or went.
if [[ -e $out/train_000000.bin && -z $(find "$path" -newer "$out/train_000000.bin" -print -quit) ]]; then
  say "already there, and nothing in $path is newer"
  echo "$out"
  exit 0
fi
bytes=$(du -sb "$path" | cut -f1)
say "$path has about $bytes bytes; writing twice as many of tokens, about $((bytes / 200000000 + 1)) s"
[[ -x $root/data/tokenize ]] || make -s -C "$root" data/tokenize >&2

# What changes while it is read must count as newer the next time: the result is as old as the beginning.
mkdir -p "$root/data/.download"
stamp=$(mktemp "$root/data/.download/text.XXXXXX")
trap 'rm -f "$stamp"' EXIT
trap 'exit 130' INT TERM HUP
"$root/data/tokenize" --tokenizer bytes --force --out "$out" "$path" >&2
touch -r "$stamp" "$out/train_000000.bin"
echo "$out"
