#!/usr/bin/env bash
# Installs the packages that are missing, by apt. scripts/setup.sh [--check] GROUP ... [--optional GROUP ...]
#
#   gpu      a compiler and the header-only libraries: all that the programs for a GPU need beside nvcc
#   cpu      what the programs for the CPU need besides
#   corpora  what reads compressed corpora: data/tokenize needs it
#   extras   what draws curves in reports
#   build    the first three
#   test, browser, python, arm64, style, curl, xz, gcide   for the tests, the form of the sources, and the corpora
#
# Without the right to install, or with --check, it prints the one command to run and stops. The exit status is 0 if
# only packages of the groups after --optional are missing. INCLUDES, from the environment, are folders in which
# header-only libraries and chart.min.js are found too, as by make INCLUDES="...".
set -euo pipefail

check=0 optional=0 required=0
if [ "${1:-}" = --check ]; then check=1; shift; fi

missing=() why=() lists=0
need() {  # need <package> <what for> <test command...>
  local package=$1 reason=$2
  shift 2
  if "$@" >/dev/null 2>&1; then return; fi
  missing+=("$package") why+=("  $package: $reason")
  [ $optional = 1 ] || required=1
}
read -ra includes <<<"${INCLUDES:-}"
chart_js() {
  local folder
  for folder in /usr/share/javascript/chart.js /usr/share/nodejs/chart.js/dist "${includes[@]}"; do
    if [ -e "$folder/chart.min.js" ] || [ -e "$folder/chart.umd.js" ]; then return; fi
  done
  return 1
}
# CXX may be a command with options.
header() { echo "#include <$1>" | ${CXX:-g++} -std=c++17 "${includes[@]/#/-I}" -E -x c++ - ; }

needs_of_gpu() {
  local compiler=${CXX:-g++}
  need g++ "the compiler" command -v "${compiler%% *}"
  need make "runs the Makefile" command -v make
  need nlohmann-json3-dev "JSON: configs, safetensors headers, logs" header nlohmann/json.hpp
  need libcli11-dev "the command line" header CLI/CLI.hpp
  need libtomlplusplus-dev "TOML: a run's options in a file" header toml++/toml.h
}
needs_of_cpu() { need libdnnl-dev "oneDNN, the matmuls on a CPU" header dnnl.h; }
needs_of_corpora() {
  need libarchive-dev "reads compressed corpora and tar files" header archive.h
  need zlib1g-dev "reads what gzip has compressed" header zlib.h
}
needs_of_extras() { need libjs-chart.js "Chart.js, the charts in reports" chart_js; }

for group in "$@"; do
  case $group in
    --optional) optional=1 ;;
    gpu | cpu | corpora | extras) "needs_of_$group" ;;
    build) needs_of_gpu; needs_of_cpu; needs_of_corpora ;;
    test)
      need libgtest-dev "GoogleTest, the unit tests" header gtest/gtest.h
      need libboost-context-dev "fibers, as threads of the emulated GPU" header boost/context/fiber.hpp
      need libopenmpi-dev "MPI, by which ranks find each other" command -v mpicxx
      need openmpi-bin "mpirun, which starts them" command -v mpirun
      ;;
    browser)  # Ubuntu's package is an empty one that asks for a snap; tests say what they skip then
      if grep -qx ID=debian /etc/os-release; then
        need chromium "a browser, in which the tests open reports" command -v chromium
      fi
      ;;
    python) need python3-venv "environments of Python, in which the tests load models" python3 -c 'import ensurepip' ;;
    arm64)
      need g++-aarch64-linux-gnu "compiles for Arm" command -v aarch64-linux-gnu-g++
      need qemu-user "runs programs for Arm" command -v qemu-aarch64
      ;;
    style) need clang-format "checks the form of the sources" command -v clang-format ;;
    curl)
      need curl "downloads a corpus" command -v curl
      need ca-certificates "certificates, to verify the servers" test -e /etc/ssl/certs/ca-certificates.crt
      ;;
    xz) need xz-utils "unpacks and packs archives" command -v xz ;;
    gcide) lists=1 ;;  # apt-get download needs only the package lists
    *)
      echo "error: scripts/setup.sh: unknown group '$group'; known are gpu, cpu, corpora, extras, build, test," \
        "browser, python, arm64, style, curl, xz and gcide" >&2
      exit 1
      ;;
  esac
done
command="apt-get update"
if [ ${#missing[@]} -gt 0 ]; then
  # One source of packages that cannot be read is no reason to install none.
  command+="; apt-get install -y --no-install-recommends ${missing[*]}"
  { echo "missing packages:"; printf '%s\n' "${why[@]}"; } >&2
elif [ $lists = 1 ] && ! apt-cache show dict-gcide >/dev/null 2>&1; then
  if ! command -v apt-get >/dev/null; then
    echo "error: the default corpus is a Debian package, and there is no apt here:" \
      "give DATA=tinyshakespeare or TEXT=path" >&2
    exit 1
  fi
  required=1
  echo "missing: apt's package lists, in which the default corpus is found" >&2
else
  exit 0
fi
# give_up <message>: an error, unless everything can do without what is missing.
give_up() {
  if [ $required = 0 ]; then echo "$1; only what needs these packages is left out" >&2; exit 0; fi
  echo "error: $1" >&2
  exit 1
}
sudo='sudo '
[ "$(id -u)" != 0 ] || sudo=
if [ $check = 1 ] || ! command -v apt-get >/dev/null; then
  echo "install them with: ${sudo}sh -c '$command'" >&2
  exit $required
elif [ "$(id -u)" = 0 ]; then
  run=(sh -c)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  run=(sudo DEBIAN_FRONTEND=noninteractive sh -c)
else
  echo "installing needs root; to be run once, before trying again:" >&2
  echo "  sudo sh -c '$command'" >&2
  give_up "these packages are not installed"
fi
echo "installing: $command" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "${run[@]}" "$command" >"$log" 2>&1 &&
  { [ ${#missing[@]} -gt 0 ] || ! apt-cache show dict-gcide >/dev/null 2>&1; }; then
  tail -n 20 "$log" >&2
  give_up "the installation failed; its last lines are above"
fi
