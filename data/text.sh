#!/usr/bin/env bash
# data/text.sh PATH: any text file, or folder of text files, compressed and in tar files too, as tokens in
# data/text-<name>-<checksum of the path>/: bytes, or, with TOKENIZER=gpt2, GPT-2's, in that folder with -gpt2 at its
# end, or, with TOKENIZER=bpe4096, those of a vocabulary of 4096 tokens that is learned from it, in one with -bpe4096.
# Made again if the text in PATH is another, by its size and checksum. A document is a file. Prints the folder as its
# last line.
# data/text.sh --pairs PATH: JSON lines {"prompt": "...", "answer": "..."}, whose answers are scored, in
# data/pairs-<name>-<checksum of the path>/.
set -euo pipefail
corpus=text
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
options=()
if [[ ${1-} = --pairs ]]; then
  corpus=pairs
  options=(--pairs)
  shift
fi
[[ $# -eq 1 && ($1 != -* || -e $1) ]] ||
  fail "usage: data/text.sh [--pairs] PATH (a text file, or a folder of text files)"
[[ -e $1 ]] || fail "$1: no such file or folder"
path=$(realpath -- "$1"; echo .)
path=${path%$'\n.'}  # with the newlines at its end, if it has any
name=${path##*/}
name=${name//[^A-Za-z0-9._-]/_}
name=${name:0:100}  # a file name has at most 255 bytes, and the folder's has more in it
sum=$(printf %s "$path" | sha256sum)
choose_tokenizer "$corpus-$name-${sum:0:8}"

if [[ ! -e $out/train_000000.bin ]]; then
  read -r bytes _ < <(du -sb "$path")
  say "$path has about $bytes bytes; writing twice as many of tokens, about $((bytes / 100000000 + 1)) s"
fi
run tokenize --out "$out" --update "${options[@]}" "$path"
echo "$out"
