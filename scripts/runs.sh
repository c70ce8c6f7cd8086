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
die() { echo "error: $*" >&2; exit 1; }
# newest_checkpoint <folder of a run>: its path; nothing where there is none.
newest_checkpoint() {
  { find -H "$1" -maxdepth 1 -name 'step_[0-9]*' ! -name 'step_*[!0-9]*' 2>/dev/null || true; } | sort | tail -n 1
}
