# The repository's folder, from where the script was started: "." if it is there.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[ ! "$PWD" -ef "$root" ] || root=.
# enter_root <name of a variable ...>: goes to that folder. The variables, those that are set, are paths: they mean the
# same from there, and none begins with a dash, which would make it an option.
enter_root() {
  local name
  for name in "$@"; do
    case ${!name:-/} in
      /*) ;;
      -*) printf -v "$name" %s "./${!name}" ;;&
      *) [ "$root" = . ] || printf -v "$name" %s "${PWD%/}/${!name}" ;;
    esac
  done
  cd -- "$root" || exit 1
}
# pattern_of <folder>: a glob pattern that matches its name and no other.
pattern_of() { sed 's/[][*?\\]/\\&/g' <<<"$1"; }
# show_help: the comment that the script begins with.
show_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit; }
# find_trainer: sets gpus, how many this machine has, and trainer: TRAINER, or the one for a GPU if there is one.
find_trainer() {
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  trainer=${TRAINER:-$root/train_gpt2_sla$([ "$gpus" -gt 0 ] || echo _cpu)}
}
# wiring_name <text>: the text of a wiring as part of a folder's name: "gqa(2) window(4)" is gqa_2_window_4.
wiring_name() {
  local LC_ALL=C name=${1//[!a-zA-Z0-9.]/_}
  while [[ $name = *__* ]]; do name=${name//__/_}; done
  echo "${name%_}"
}
# final_loss <run> <updates>: its validation loss after that update, from its log; nothing before it has come so far.
final_loss() {
  [ ! -e "$1/log.jsonl" ] ||
    sed -n "s/^{\"step\":$2,\"val_loss\":\([0-9.e+-]*\)[,}].*/\1/; T last; h; :last; \${ x; /./p; }" "$1/log.jsonl"
}
