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
