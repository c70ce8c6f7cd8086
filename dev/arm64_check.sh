#!/usr/bin/env bash
# Does it work on Arm? Compiles the CPU's programs for arm64, with warnings as errors, and trains golden cases with them
# under qemu: each loss must equal the independent implementation's to a relative 1.1e-7. Where nvcc is found, it
# compiles the trainer for a GPU with an Arm host, as in a Grace Hopper.
#
#   dev/arm64_check.sh [FOLDER]     build/arm64: what is built, and oneDNN for arm64, of Debian's package, unpacked
#
# It needs g++-aarch64-linux-gnu and qemu-user (scripts/setup.sh arm64). Exit status 77: they are not there, or apt has
# no libdnnl-dev for arm64.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
unset MAKEFLAGS
folder=${1:-build/arm64}
case $folder in -* | *[[:space:]\'\"]*) echo "error: $folder: make takes no such name of a folder" >&2; exit 1 ;; esac
mkdir -p "$folder"
skip() { echo "skipped: $*" >&2; exit 77; }
for command in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $command >/dev/null || skip "$command is not found; scripts/setup.sh arm64 installs it"
done

# With lists of packages of its own, apt needs no right to install, and the machine's architectures stay as they are.
onednn=$folder/onednn
if [ ! -e "$onednn/complete" ]; then
  rm -rf "$onednn"
  mkdir -p "$onednn"/apt/{lists,cache/archives}/partial
  lists=$(realpath "$onednn/apt")
  apt=(apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root
    -o Dir::State::Lists="$lists/lists" -o Dir::Cache="$lists/cache" -o Dir::State::Status=/dev/null)
  (cd "$onednn" && "${apt[@]}" update && "${apt[@]}" download libdnnl-dev libdnnl2) >"$folder/apt.log" 2>&1 ||
    skip "apt has no libdnnl-dev for arm64; $folder/apt.log says why"
  for package in "$onednn"/*.deb; do dpkg-deb -x "$package" "$onednn"; done
  rm -rf "$onednn"/apt "$onednn"/*.deb
  touch "$onednn/complete"
fi
libraries=$onednn/usr/lib/aarch64-linux-gnu
compiler="aarch64-linux-gnu-g++ -I$onednn/usr/include -L$libraries"
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu QEMU_SET_ENV=LD_LIBRARY_PATH=$libraries

objects=$folder/obj/release_werror
make --no-print-directory -s -j"$(nproc)" CXX="${CCACHE:-} $compiler -Wl,-rpath-link,$libraries" MARCH=armv8.2-a \
  HAVE_MPI= HAVE_NVCC= WERROR=1 BUILD="$folder" "$objects"/{report,data/{tokenize,convert,probe}}.o \
  "$folder"/fp32/{train,sample,evaluate}_gpt2_sla_cpu

# The CRC-32C of these nine digits is the algorithm's published check value.
printf '#include "llmc/base/crc32c.h"\nint main() { return crc32c("%s", 9) != 0xe3069283; }\n' 123456789 |
  aarch64-linux-gnu-g++ -std=c++17 -march=armv8.2-a -I. -x c++ - -o "$folder/crc32c"
qemu-aarch64 "$folder/crc32c" || { echo "error: CRC-32C is not what it is on other machines" >&2; exit 1; }

# number <key> <golden case>: a whole number of what is expected.
number() { sed -n "s/^ \"$1\": \([0-9]*\),/\1/p" "dev/test/golden/$2/expected.json"; }
failed=0
for name in paper_default f_reformer f_gtrxl; do
  golden=dev/test/golden/$name out=$folder/out B=$(number batch_size $name) T=$(number seq_len $name)
  rm -rf "$out"
  qemu-aarch64 "$folder/fp32/train_gpt2_sla_cpu" -e $golden -i $golden/tokens.bin -k constant -b "$B" -t "$T" \
    -d $((B * T * $(number grad_accum_steps $name))) -x "$(number steps $name)" -l 1e-4 -c 0.1 -v 0 -o "$out" \
    >"$folder/$name.log" 2>&1 || { cat "$folder/$name.log"; exit 1; }
  paste <(sed -n '/"losses"/,/]/s/^  \([0-9.]*\),*$/\1/p' $golden/expected.json) \
    <(sed -n 's/.*"step": *[0-9]*, *"loss": *\([0-9.]*\),.*/\1/p' "$out/log.jsonl") |
    awk -v name=$name '{ d = ($2 - $1) / $1; if (d < 0) d = -d; if (d > most) most = d }
      END { printf "%s: %d losses, at most %.1e of them away\n", name, NR, most; exit NR != 10 || most > 1.1e-7 }' ||
    failed=1
done

source scripts/gpu.sh
if [ -z "$nvcc" ]; then
  echo "not compiled for a GPU with an Arm host: $gpu_problem"
else
  for headers in "$(dirname "$(readlink -f "$(command -v "${nvcc##* }")")")"/../targets/*/include; do :; done
  $nvcc -ccbin aarch64-linux-gnu-g++ -std=c++17 -I. -I"$headers" -DPRECISION_BF16 -arch=compute_80 -code=compute_80 \
    -Werror all-warnings -Xcompiler -Wall,-Wextra,-fopenmp,-march=armv8-a -c train_gpt2_sla.cu -o "$folder/grace.o"
  echo "train_gpt2_sla.cu compiles for a GPU with an Arm host"
fi
exit $failed
