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
# wiring_name <text>: the text of a wiring as part of a folder's name: "gqa(2) window(4)" is gqa_2_window_4.
wiring_name() {
  local LC_ALL=C name=${1//[!a-zA-Z0-9.]/_}
  while [[ $name = *__* ]]; do name=${name//__/_}; done
  echo "${name%_}"
}
