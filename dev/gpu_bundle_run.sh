#!/usr/bin/env bash
# run.sh in what `make gpu-bundle` has packed: finds libcublasLt, in the CUDA toolkit or in PyTorch's wheels, and runs
# the check on the GPU.
set -uo pipefail
cd "$(dirname "$0")"
# not_found <library>: its whole name, if the programs do not find it.
not_found() { ldd build/bf16/bench_gpu 2>/dev/null | sed -n "s/^\s*\($1[^ ]*\) => not found.*/\1/p"; }
use() { export LD_LIBRARY_PATH=$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; }
if [ -n "$(not_found libgomp)" ]; then use "$PWD/lib"; fi
missing=$(not_found libcublasLt)
if [ -n "$missing" ]; then
  wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
  folder=
  toolkit=$(dirname "$(command -v nvcc)")/..
  for path in "$toolkit"/{lib64,lib,targets/*/lib} /usr/local/cuda*/{lib64,lib,targets/*/lib} \
    ${wheels:+"$wheels"/*/lib}; do
    if [ -z "$folder" ] && [ -e "$path/$missing" ]; then folder=$path; fi
  done
  if [ -z "$folder" ]; then
    echo "error: $missing is neither in a CUDA toolkit (beside nvcc, /usr/local/cuda*) nor in PyTorch's wheels (of" \
      "python3); LD_LIBRARY_PATH=folder $0" >&2
    exit 1
  fi
  use "$folder"
fi
exec dev/gpu_check.sh
