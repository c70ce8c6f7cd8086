#!/usr/bin/env bash
# Installs the packages that are missing, by apt. scripts/setup.sh [--check] build|test|browser|style|curl|gcide ...
# Without the right to install, or with --check, it prints the one command to run and stops.
set -euo pipefail

check=0
if [ "${1:-}" = --check ]; then check=1; shift; fi

missing=() why=() lists=0
need() {  # need <package> <what for> <test command...>
  local package=$1 reason=$2
  shift 2
  if ! "$@" >/dev/null 2>&1; then missing+=("$package"); why+=("  $package: $reason"); fi
}
chart_js() { ls /usr/share/javascript/chart.js/chart.min.js || ls /usr/share/javascript/chart.js/chart.umd.js; }
header() { echo "#include <$1>" | "${CXX:-g++}" -std=c++17 -E -x c++ - ; }

for group in "$@"; do
  case $group in
    build)
      need g++ "the compiler" command -v "${CXX:-g++}"
      need make "runs the Makefile" command -v make
      need libdnnl-dev "oneDNN, the matmuls on a CPU" header dnnl.h
      need nlohmann-json3-dev "JSON: configs, safetensors headers, logs" header nlohmann/json.hpp
      need libcli11-dev "the command line" header CLI/CLI.hpp
      need libtomlplusplus-dev "TOML: a run's options in a file" header toml++/toml.h
      need libarchive-dev "reads compressed corpora and tar files" header archive.h
      need libjs-chart.js "Chart.js, the charts in reports" chart_js
      ;;
    test)
      need libgtest-dev "GoogleTest, the unit tests" header gtest/gtest.h
      need libboost-context-dev "fibers, as threads of the emulated GPU" header boost/context/fiber.hpp
      need libopenmpi-dev "MPI, by which ranks find each other; the emulated NCCL runs on it" command -v mpicxx
      need openmpi-bin "mpirun, which starts them" command -v mpirun
      ;;
    browser)  # Ubuntu's package is an empty one that asks for a snap; tests say what they skip then
      if grep -qx ID=debian /etc/os-release; then
        need chromium "a browser, in which the tests open reports" command -v chromium
      fi
      ;;
    style) need clang-format "checks the form of the sources" command -v clang-format ;;
    curl)
      need curl "downloads a corpus" command -v curl
      need ca-certificates "certificates, to verify the servers" test -e /etc/ssl/certs/ca-certificates.crt
      ;;
    gcide) lists=1 ;;  # apt-get download needs only the package lists
    *)
      echo "error: scripts/setup.sh: unknown group '$group'; known are build, test, browser, style, curl and gcide" >&2
      exit 1
      ;;
  esac
done
command="apt-get update"
if [ ${#missing[@]} -gt 0 ]; then
  command+=" && apt-get install -y --no-install-recommends ${missing[*]}"
  { echo "missing packages:"; printf '%s\n' "${why[@]}"; } >&2
elif [ $lists = 1 ] && ! apt-cache show dict-gcide >/dev/null 2>&1; then
  echo "missing: apt's package lists, in which the default corpus is found" >&2
else
  exit 0
fi
if [ $check = 1 ] || ! command -v apt-get >/dev/null; then
  echo "install them with: sudo sh -c '$command'" >&2
  exit 1
elif [ "$(id -u)" = 0 ]; then
  run=(sh -c)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  run=(sudo DEBIAN_FRONTEND=noninteractive sh -c)
else
  echo "error: installing needs root; run this once, then try again:" >&2
  echo "  sudo sh -c '$command'" >&2
  exit 1
fi
echo "installing: $command" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "${run[@]}" "$command" >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "error: the installation failed; its last lines are above" >&2
  exit 1
fi
