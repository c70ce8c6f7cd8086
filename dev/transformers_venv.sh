#!/usr/bin/env bash
# Makes a virtual environment of Python with PyTorch for the CPU, transformers and gguf, or completes it, and prints the
# path of its python: dev/transformers_venv.sh FOLDER VERSION, where VERSION is newest or a number. PyTorch is installed
# once in FOLDER, for all versions. 540 MB are downloaded for it and 80 for each version; on the disk they are 1.3 GB
# and 0.3 each. The newest version is asked for every time. Exit status 77: there is no network, or python3 has no venv.
set -euo pipefail
folder=$(mkdir -p -- "$1" && CDPATH='' cd -- "$1" && pwd) version=$2
venv=$folder/$version torch=$folder/torch log=$folder/$version.log

# installed <argument of pip...>
installed() {
  "$venv/bin/python" -m pip install --quiet --no-compile --retries 1 --disable-pip-version-check "$@" >"$log" 2>&1 &&
    return
  if grep -q 'connection broken\|timed out' "$log"; then
    echo "no network, from which to install: $*" >&2
    return 77
  fi
  echo "error: pip install $*:" >&2
  tail -n 20 "$log" >&2
  return 1
}

if ! { "$venv/bin/python" -m pip --version || "${PYTHON:-python3}" -m venv --clear "$venv"; } >"$log" 2>&1; then
  echo "python3 -m venv makes no environment; scripts/setup.sh python installs what it needs" >&2
  exit 77
fi

# The wheel is made for a GPU. On a CPU it calls the CUDA runtime and none of the other libraries that it is linked
# with, which are 2 GB: an empty one takes their place.
if [ ! -e "$torch/complete" ]; then
  rm -rf "$torch"
  installed --no-deps --target "$torch" torch==2.15.0 'nvidia-cuda-runtime==13.2.*'
  lib=$torch/torch/lib prefixes='(cu[a-zA-Z]|nccl|nvrtc|nvshmem)'
  nm -D --undefined-only "$lib"/*.so | awk '{ print $NF }' | sort -u |
    awk -F@ -v c="$torch/empty.c" -v map="$torch/empty.map" -v prefixes="^$prefixes" '
      $1 ~ prefixes && $2 !~ /^libcudart/ { names[$2 == "" ? "none" : $2] = names[$2 == "" ? "none" : $2] $1 "; "
                                            print "int " $1 "(void) { return 1; }" >c }
      END { for (version in names) print version " { " names[version] "};" >map }'
  ${CC:-gcc} -w -shared -fPIC "$torch/empty.c" "-Wl,--version-script=$torch/empty.map" -o "$lib/empty.so"
  objdump -p "$lib"/*.so | awk -v prefixes="^lib$prefixes" '$1 == "NEEDED" && $2 ~ prefixes { print $2 }' | sort -u |
    grep -v '^libcudart' | while read -r name; do ln -sf empty.so "$lib/$name"; done
  touch "$torch/complete"
fi
echo "$torch" >"$(echo "$venv"/lib/python3*/site-packages)/torch.pth"

transformers=transformers
[ "$version" = newest ] || transformers+="==$version"
packages=("$transformers" gguf psutil sympy networkx jinja2 setuptools)
if [ "$(cat "$venv/complete" 2>/dev/null)" != "${packages[*]}" ]; then
  installed "${packages[@]}"
  installed --no-deps accelerate  # which would install the libraries for a GPU
  echo "${packages[*]}" >"$venv/complete"
elif [ "$version" = newest ]; then
  installed --upgrade transformers gguf  # without a network pip leaves what there is, and reports success
fi
echo "$venv/bin/python"
