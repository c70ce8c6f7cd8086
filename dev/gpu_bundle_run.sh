#!/usr/bin/env bash
# run.sh in what `make gpu-bundle` has packed: finds libcublasLt and, for several ranks, libnccl in the CUDA toolkit or
# in PyTorch's wheels, and runs the check on the GPU.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")"
# not_found <library> <program>: its whole name, if the program does not find it.
not_found() { ldd "build/$2" 2>/dev/null | sed -n "s/^\s*\($1[^ ]*\) => not found.*/\1/p"; }
use() { export LD_LIBRARY_PATH=$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; }
wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
toolkit=$(dirname "$(command -v nvcc)")/..
# find_library <library> <program>: fails if the program does not find it, and nothing here has it.
find_library() {
  local missing path
  missing=$(not_found "$1" "$2")
  [ -n "$missing" ] || return 0
  for path in "$toolkit"/{lib64,lib,targets/*/lib} /usr/local/cuda*/{lib64,lib,targets/*/lib} \
    ${wheels:+"$wheels"/*/lib}; do
    if [ -e "$path/$missing" ]; then use "$path"; return; fi
  done
  return 1
}
if [ -n "$(not_found libgomp bf16/bench_gpu)" ]; then use "$PWD/lib"; fi
if ! find_library libcublasLt bf16/bench_gpu; then
  echo "error: $(not_found libcublasLt bf16/bench_gpu) is neither in a CUDA toolkit (beside nvcc, /usr/local/cuda*)" \
    "nor in PyTorch's wheels (of python3); LD_LIBRARY_PATH=folder $0" >&2
  exit 1
fi
find_library libnccl nccl/bf16/train_gpt2_sla  # the report says so where there is none
exec dev/gpu_check.sh
