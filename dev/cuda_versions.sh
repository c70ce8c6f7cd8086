#!/usr/bin/env bash
# Does the source compile with other versions of CUDA than this machine's?
#   dev/cuda_versions.sh [FOLDER [SOURCE...]]       FOLDER: where the toolkits are kept for the next time
#
# PyPI has the toolkit in parts: for CUDA 13 all that a compilation takes, nvcc among it; for CUDA 12 the headers,
# libdevice and ptxas, with which Debian's clang-19 compiles in nvcc's place. Each translation unit is compiled for both
# sides, the device's down to machine code, in bf16 for sm_90, in fp32 for sm_80 and for the oldest GPU that the version
# has code for, sm_70 or sm_75, and in fp16 for sm_75, with warnings as errors. Nothing is linked.
#
# llmc/cuda/launch.h says what changed between versions. It takes some 2 GB, and half a minute or more for each of 48
# compilations.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
folder=${1:-$(mktemp -d)}
units=("${@:2}")
[ ${#units[@]} -gt 0 ] || units=(train_gpt2_sla.cu test_gpt2_sla.cu dev/test/test_ops.cu dev/test/test_attention.cu)
failed=0

# fetch <version> <package==version>...: into $folder/<version>.
fetch() {
  [ -e "$folder/$1/complete" ] ||
    { python3 -m pip install -q --no-deps --target "$folder/$1" "${@:2}" && touch "$folder/$1/complete"; }
}
# toolkit <version>: the parts of CUDA 12 as one folder, as clang expects it.
toolkit() {
  local parts=$folder/$1/nvidia root=$folder/$1/toolkit
  [ -e "$root" ] && return
  mkdir -p "$root/bin" "$root/include" "$root/lib64"
  for part in cuda_runtime cuda_nvcc cuda_cccl cublas nccl; do cp -rn "$parts/$part/include/." "$root/include"; done
  cp -r "$parts/cuda_nvcc/nvvm" "$root" && cp "$parts/cuda_nvcc/bin/ptxas" "$root/bin"
}
# compile_12 <version> <unit> <architecture> <flags...>; compile_13 does so with nvcc of CUDA 13
compile_12() {
  local common=(-std=c++17 -O1 -x cuda "--cuda-path=$folder/$1/toolkit" "--cuda-gpu-arch=sm_$3"
    -Wno-unknown-cuda-version -Wno-pass-failed -I. -DSLA_NCCL "${@:4}" -Wall -Wextra -Werror -c "$2")
  clang++-19 "${common[@]}" --cuda-device-only -o "$folder/device.o" &&
    clang++-19 "${common[@]}" -fopenmp --cuda-host-only -o "$folder/host.o"
}
compile_13() {
  local parts=$folder/$1/nvidia
  "$parts/cu13/bin/nvcc" -std=c++17 -O3 -I. -I"$parts/nccl/include" -DSLA_NCCL "${@:4}" -arch="sm_$3" \
    -Werror all-warnings -Xcompiler -Wall,-Wextra,-fopenmp -c "$2" -o "$folder/both.o"
}
check() {  # <compile> <version> <oldest architecture>
  for unit in "${units[@]}"; do
    for build in "90 -DPRECISION_BF16" 80 "$3" "75 -DPRECISION_FP16"; do
      begin=$SECONDS verdict=compiles
      "$1" "$2" "$unit" $build >"$folder/log" 2>&1 || { verdict=RED; failed=1; cat "$folder/log" >&2; }
      echo "| $2 | $(basename "$unit") | sm_$build | $verdict | $((SECONDS - begin)) s |"
    done
  done
}

echo "| CUDA | source | for | | time |"
echo "| --- | --- | --- | --- | --: |"
if command -v clang++-19 >/dev/null; then
  for version in 12.3 12.8; do
    fetch $version nvidia-cuda-{nvcc,runtime,cccl}-cu12==$version.* nvidia-cublas-cu12==$version.* nvidia-nccl-cu12 &&
      toolkit $version && check compile_12 $version 70 || failed=1
  done
else
  echo "| 12 | not compiled: apt-get install clang-19 libomp-19-dev | | | |"
fi
fetch 13.5 nvidia-cuda-{nvcc,crt,runtime}==13.5.* nvidia-nvvm==13.5.* "nvidia-cuda-cccl>=13,<14" \
  "nvidia-cublas>=13,<14" nvidia-nccl-cu13 && check compile_13 13.5 75 || failed=1
exit $failed
