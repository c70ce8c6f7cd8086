# Functions of the scripts in this folder, which source it after setting $corpus, the corpus's name.
export LC_ALL=C
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "$corpus: $*" >&2; }
fail() { say "error: $*"; exit 1; }
trap 'exit 130' INT TERM HUP

# choose_tokenizer <name>: sets $out to data/<name>, or, with TOKENIZER=gpt2 or bpe4096 in the environment, to
# data/<name>-gpt2 or data/<name>-bpe4096.
choose_tokenizer() {
  tokenizer=${TOKENIZER:-bytes}
  case $tokenizer in
    bytes) out=$root/data/$1 ;;
    gpt2 | bpe[1-9][0-9][0-9] | bpe[1-9][0-9][0-9][0-9] | bpe[1-6][0-9][0-9][0-9][0-9]) out=$root/data/$1-$tokenizer ;;
    *) fail "TOKENIZER=$tokenizer: it must be bytes (the default) or gpt2, or, as bpe4096, bpe and the size of a" \
         "vocabulary that is learned from the text" ;;
  esac
}

# exit_if_done [FILE]: prints it and ends the script if it exists; by default the folder of tokens, if there are some.
exit_if_done() {
  [[ -e ${1:-$out/train_000000.bin} ]] || return 0
  say "exists already"
  echo "${1:-$out}"
  exit 0
}

# run <program> <arguments...>: runs data/tokenize or data/convert with the vocabulary that $tokenizer names. Builds the
# program and fetches the vocabulary if they are missing. data/tokenize alone can learn one.
run() {
  [[ -x $root/data/$1 ]] || make -s -C "$root" "data/$1" >&2
  local option=--tokenizer vocabulary=bytes
  case $tokenizer in
    gpt2) vocabulary=$("$root/data/gpt2.sh" | tail -n 1) ;;
    bpe*) option=--train-vocabulary vocabulary=${tokenizer#bpe} ;;
  esac
  "$root/data/$1" "$option" "$vocabulary" "${@:2}" >&2
}

# fetch_rest <url> <file>: what the file does not have yet. Of a whole one, curl has an error.
fetch_rest() {
  command -v curl >/dev/null || fail "curl is not found; scripts/setup.sh curl installs it"
  curl -fL --no-progress-meter --retry 3 --connect-timeout 20 -C - -o "$2" "$1"
}
cannot_resume=33  # curl's status where the server sends no parts

# download <url> <file> <bytes> <sha256> <hint>: downloads to <file>.part, which is renamed when it is complete and its
# checksum right, so that a broken download resumes. <hint>: what to do if the download fails.
download() {
  local url=$1 file=$2 bytes=$3 sha256=$4 hint=$5
  is_complete() { echo "$sha256  $file.part" | sha256sum --check --status 2>/dev/null; }
  mkdir -p "$(dirname "$file")"
  if ! is_complete; then
    [[ -e $file.part && $(wc -c <"$file.part") -lt $bytes ]] || rm -f "$file.part"  # only a shorter file can be resumed
    fetch_rest "$url" "$file.part" || {
      [[ $? != "$cannot_resume" ]] || rm -f "$file.part"
      fail "cannot download $url; run again to resume, or $hint"
    }
    if ! is_complete; then
      local got
      got=$(wc -c <"$file.part")
      rm -f "$file.part"
      fail "$url gave $got bytes with another checksum than expected; deleted, run again"
    fi
  fi
  mv "$file.part" "$file"
}

# download_package <package> <folder>: fetches a Debian package, which apt verifies with its signed lists, and unpacks
# it into the folder. As root, apt would otherwise download as its own user, which has no access to this folder.
download_package() {
  mkdir -p "$2"
  (cd "$2" && apt-get -q -o APT::Sandbox::User=root download "$1") >&2 ||
    fail "apt-get could not download $1; if package lists are missing or old, run apt-get update, as root"
  dpkg-deb -x "$2/$1"_*.deb "$2"
}
