#!/usr/bin/env bash
# Checks that no line of the sources has more than 120 columns and, where clang-format 14 is installed, that C++ and
# CUDA have the form that .clang-format describes (`clang-format -i FILE` brings a file into it). Exits with 1 if not.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
sources() { git ls-files "${@/#/*.}" | grep -v '^dev/bench/results/'; }
status=0
awk 'length > 120 { printf "%s:%d: %d columns\n", FILENAME, FNR, length; n++ } END { exit n > 0 }' \
  $(sources cu h cpp py js css sh sbatch mk) Makefile || status=1
version=$(clang-format --version 2>/dev/null)
case $version in
  *" version 14."*) clang-format --dry-run -Werror $(sources cu h cpp) || status=1 ;;
  *) echo "skipped: the form of C++ is checked by clang-format 14 alone; here is ${version:-none}" >&2 ;;
esac
exit $status
