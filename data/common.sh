# What the scripts in this folder share; they source it. $corpus is the corpus's name, and set before.
export LC_ALL=C
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "$corpus: $*" >&2; }
fail() { say "error: $*"; exit 1; }
trap 'exit 130' INT TERM HUP

# choose_tokenizer <name>: sets $out to data/<name>, or, with TOKENIZER=gpt2 in the environment, to data/<name>-gpt2.
choose_tokenizer() {
  tokenizer=${TOKENIZER:-bytes}
  case $tokenizer in
    bytes) out=$root/data/$1 ;;
    gpt2) out=$root/data/$1-gpt2 ;;
    *) fail "TOKENIZER=$tokenizer: there are bytes (the default) and gpt2" ;;
  esac
}

# Ends the script if there is nothing to do.
stop_if_there() {
  if [[ -e $out/train_000000.bin ]]; then
    say "already there"
    echo "$out"
    exit 0
  fi
}

# tokenize <arguments...>: into $out, with the program and the vocabulary that takes.
tokenize() {
  [[ -x $root/data/tokenize ]] || make -s -C "$root" data/tokenize >&2
  local vocabulary=bytes
  if [[ $tokenizer = gpt2 ]]; then vocabulary=$("$root/data/gpt2.sh" | tail -n 1); fi
  "$root/data/tokenize" --tokenizer "$vocabulary" --out "$out" "$@" >&2
}

# download <url> <file> <bytes> <sha256> <what to do otherwise>: the file stays beside its name until it is complete and right, so that a
# broken download goes on where it stopped.
download() {
  local url=$1 file=$2 bytes=$3 sha256=$4 otherwise=$5
  right() { echo "$sha256  $file.part" | sha256sum --check --status 2>/dev/null; }
  mkdir -p "$(dirname "$file")"
  if ! right; then
    [[ -e $file.part && $(wc -c <"$file.part") -lt $bytes ]] || rm -f "$file.part"  # only what is shorter than the whole can go on
    curl -fL --no-progress-meter --retry 3 --connect-timeout 20 -C - -o "$file.part" "$url" ||
      fail "cannot download $url; run again to go on, or $otherwise"
    if ! right; then
      local got
      got=$(wc -c <"$file.part")
      rm -f "$file.part"
      fail "$url gave $got bytes with another checksum than expected; deleted, run again"
    fi
  fi
  mv "$file.part" "$file"
}

# download_package <package> <folder>: fetches a Debian package, which apt checks against its signed lists, and unpacks it into the folder.
# As root apt would hand the download to a user of its own, who may not enter this folder.
download_package() {
  mkdir -p "$2"
  (cd "$2" && apt-get -q -o APT::Sandbox::User=root download "$1") >&2 ||
    fail "apt-get could not download $1; if package lists are missing, run scripts/setup.sh, which fetches them (apt-get update)"
  dpkg-deb -x "$2/$1"_*.deb "$2"
}
