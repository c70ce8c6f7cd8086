#!/usr/bin/env bash
# data/openwebtext.sh [ARCHIVES]: OpenWebText, 8 million pages that Reddit pointed to, from Hugging Face
# (Skylion007/openwebtext): the first ARCHIVES of its 21 archives, by default all. Tokens in data/openwebtext-gpt2/,
# GPT-2's, or, with TOKENIZER=bytes, data/openwebtext/; the folder's name ends in the number of archives where that is
# below 21. A document is a page. Prints the folder as its last line. OPENWEBTEXT_URL is another location of the same
# files (https://, file://).
set -euo pipefail
corpus=openwebtext
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
archives=${1:-21}
url=${OPENWEBTEXT_URL:-https://huggingface.co/datasets/Skylion007/openwebtext/resolve/main/subsets}
[[ $archives =~ ^[1-9][0-9]?$ ]] && ((archives <= 21)) ||
  fail "usage: data/openwebtext.sh [ARCHIVES], of 1 to 21"
TOKENIZER=${TOKENIZER:-gpt2} choose_tokenizer openwebtext
((archives == 21)) || out+=-$archives
exit_if_done
say "fetching $archives archives of 0.6 GB, writing about 0.9 GB of tokens for each;" \
  "encoding takes about half a minute each on two cores"

# The archives are kept until the tokens are written, so that an interrupted run resumes. No checksums are published;
# each archive is read to its end, and xz's own checksums detect damage.
folder=$root/data/.download/openwebtext
mkdir -p "$folder"
files=()
for ((i = 0; i < archives; i++)); do
  name=$(printf 'urlsf_subset%02d.tar' "$i")
  if [[ ! -e $folder/$name ]]; then
    got=0
    fetch_rest "$url/$name" "$folder/$name.part" || got=$?
    # tar takes one that is cut between two files.
    if [[ ! -e $folder/$name.part ]] || ! tar -tf "$folder/$name.part" >/dev/null 2>&1 ||
      [[ $(tail -c 1024 "$folder/$name.part" | tr -d '\0' | wc -c) != 0 ]]; then
      ((got != cannot_resume)) || rm -f "$folder/$name.part"
      ((got == 0)) || fail "cannot download $url/$name; run again to resume, or set OPENWEBTEXT_URL"
      rm -f "$folder/$name.part"
      fail "$url/$name gave no tar archive; deleted, run again"
    fi
    mv "$folder/$name.part" "$folder/$name"
  fi
  files+=("$folder/$name")
done
run tokenize --out "$out" "${files[@]}"
rm -f "${files[@]}"
rmdir "$folder" 2>/dev/null || true  # it has more archives where a run that wanted more of them was interrupted
echo "$out"
