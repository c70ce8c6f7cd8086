#!/usr/bin/env bash
# `make gpu-bundle GPU_ARCH=sm_90`: packs the programs that it has built, with all that `make gpu-check` needs, into one
# file for a machine that has a GPU and nothing else: no internet, compiler or packages. There
#
#   sh gpt2-sla-sm_90.sh [folder]
#
# unpacks it into gpt2-sla-sm_90 or that folder, finds libcublasLt and libnccl, and runs dev/gpu_check.sh, whose STEPS,
# LIMIT and NCCL_LIB it takes from the environment; <folder>/run.sh does so again. The trainer and the headers to build
# with (INCLUDES) are in the folder, too.
#
#   dev/gpu_bundle.sh <folder of the programs> <architecture, such as 90>
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
build=$1 name=gpt2-sla-sm_$2
packed=$build/packed bundle=$build/$name.sh
rm -rf "$packed"
mkdir -p "$packed"/{build/{bf16,fp32,nccl/bf16},dev/{bench,test/golden},scripts,llmc/formats,include,lib}
for program in "$build"/{bf16,fp32,nccl/bf16}/*; do
  if [ -f "$program" ] && [ -x "$program" ]; then strip -o "$packed/build/${program#"$build/"}" "$program"; fi
done
commit=$(git describe --always --dirty 2>/dev/null || echo 'no git')
release=$(${NVCC:-nvcc} --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
echo "$commit, CUDA $release, sm_$2" >"$packed/build/prebuilt"
cp dev/gpu_check.sh "$packed/dev"
cp dev/gpu_bundle_run.sh "$packed/run.sh"
cp scripts/launch.sh "$packed/scripts"
cp dev/bench/{torch_sla,kernel_times}.py "$packed/dev/bench"
cp -r dev/test/golden/paper_default "$packed/dev/test/golden"
cp -r llmc/formats/huggingface "$packed/llmc/formats"
cp -L "$(${CXX:-g++} -print-file-name=libgomp.so.1)" "$packed/lib"  # OpenMP, which comes with a compiler

# The header-only libraries, from where the compiler finds them.
read -ra includes <<<"${INCLUDES:-}"
printf '#include <%s>\n' CLI/CLI.hpp nlohmann/json.hpp toml++/toml.h |
  ${CXX:-g++} -std=c++17 "${includes[@]/#/-I}" -M -x c++ - | tr ' \\' '\n\n' |
  sed -n 's,^\(.*\)/\(CLI\|nlohmann\|toml++\)/.*,\1/\2,p' | sort -u | xargs -I{} cp -rL {} "$packed/include"
if [ -d /usr/src/googletest/googletest ]; then cp -r /usr/src/googletest/googletest "$packed/include"; fi

# The script, behind which the archive begins.
unpack=$(cat <<END
#!/bin/sh
# gpt2-sla $commit for sm_$2. sh $name.sh [folder]: unpacks it and checks the GPU. STEPS=tests,bench: parts of it.
set -e
case \$1 in '') folder=$name ;; /*) folder=\$1 ;; *) folder=./\$1 ;; esac
mkdir -p "\$folder"
decompress() {
  if command -v xz >/dev/null; then xz -dc; return; fi
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
}
tail -n +12 "\$0" | decompress | tar xf - -C "\$folder"
exec "\$folder/run.sh"
END
)
# The programs share most of their kernels: with a dictionary as large as all of them, each is packed once.
{ echo "$unpack"; tar c -C "$packed" --owner=0 --group=0 . | xz -T1 --lzma2=preset=4,dict=512MiB; } >"$bundle.part"
mv "$bundle.part" "$bundle"
echo "$bundle: $(($(stat -c %s "$bundle") / 1000)) KB"
