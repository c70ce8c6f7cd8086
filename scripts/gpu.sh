#!/usr/bin/env bash
# Which nvcc and which NVIDIA GPUs this machine has, and whether the one compiles for the others. A script that sources
# this file gets these variables; make runs it and gets them as assignments.
#
#   nvcc           what to call; empty without one of CUDA 12.3 or later
#   cuda           its version, such as 12.8
#   gpus           such as "Tesla T4 (7.5), NVIDIA L4 (8.9)"; empty if nvidia-smi shows none
#   architectures  what programs are compiled for, such as "80 90a"; where no GPU is, those of data centres
#   gpu_problem    why no program for a GPU can be built for them; empty if one can
#   gpu_remark     what a user should know beside that
#
# Environment: NVCC (nvcc), GPU_ARCH (such as "sm_80 sm_90": these, and not those of this machine's GPUs), PRECISION (as
# of make)
nvcc=${NVCC:-nvcc} gpus='' architectures='' gpu_problem='' gpu_remark=''

if ! command -v "${nvcc%% *}" >/dev/null; then
  for folder in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
    if [ -n "$folder" ] && [ -x "$folder/bin/nvcc" ]; then
      gpu_remark="no $nvcc on PATH; $folder/bin has one: used"
      nvcc=$folder/bin/nvcc
      break
    fi
  done
fi
cuda=$($nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p') || true
if [ -z "$cuda" ]; then
  nvcc='' gpu_problem="no nvcc is on PATH, in CUDA_HOME or in /usr/local/cuda; CUDA 12.3 or later has it"
  gpu_problem+="; see scripts/TROUBLES.md"
elif [ $((${cuda%.*} * 100 + ${cuda#*.})) -lt 1203 ]; then
  gpu_problem="$nvcc is of CUDA $cuda; 12.3 or later is needed" nvcc=''
fi
known=$([ -z "$nvcc" ] || $nvcc --list-gpu-code 2>/dev/null) || true  # sm_75 and so on, a line each
nvcc_has() { grep -qx "sm_$1" <<<"$known"; }

# Why there can be no program for a GPU, whose architecture is such as 75, 90 or 90a; empty if there can be one.
why_not() {
  local gpu=$1 number=${2%[af]} needed
  if ! [[ $number =~ ^[0-9]+$ ]]; then
    echo "$gpu is no architecture; they are such as sm_90"
  elif [ "$number" -lt 70 ]; then
    echo "$gpu is too old; compute capability 8.0 is needed, or 7.5 with PRECISION=FP16, or 7.0 with FP32"
  elif [ "$number" -lt 75 ] && [ "${PRECISION:-}" != FP32 ]; then
    echo "$gpu has no tensor cores for attention in bf16 or fp16; PRECISION=FP32 is for it"
  elif [ "$number" -lt 80 ] && [[ ${PRECISION:-} != FP* ]]; then
    echo "$gpu has no bf16; PRECISION=FP16 is for it"
  elif [ -n "$known" ] && ! nvcc_has "$number"; then
    case $number in
      7*) needed="CUDA 12" ;;
      100 | 101 | 120) needed="CUDA 12.8" ;;
      103 | 121) needed="CUDA 12.9" ;;
      *) needed="a later CUDA" ;;
    esac
    echo "$gpu needs $needed, nvcc here is $cuda"
  fi
}

refused=() compiled=()
consider() {  # consider <a GPU> <its architecture>
  local reason
  reason=$(why_not "$@")
  if [ -n "$reason" ]; then refused+=("$reason"); else compiled+=("${2/%90/90a}"); fi  # Hopper's has wgmma as 90a alone
}

names=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || names=
capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9]*\.[0-9]*') || true
while IFS='|' read -r gpu capability; do
  gpus+="${gpus:+, }$gpu${capability:+ ($capability)}"
  # Drivers of before 2022 do not say it.
  if [ -z "${GPU_ARCH:-}" ] && [ -n "$capability" ]; then consider "$gpu ($capability)" "${capability/./}"; fi
done < <(if [ -n "$names" ]; then paste -d '|' <(echo "$names") <(echo "$capabilities"); fi)
for architecture in ${GPU_ARCH:-}; do consider "sm_${architecture#sm_}" "${architecture#sm_}"; done

join() { local text; text=$(printf '%s; ' "$@"); echo "${text%; }"; }
if [ ${#refused[@]} -gt 0 ] && { [ -n "${GPU_ARCH:-}" ] || [ ${#compiled[@]} = 0 ]; }; then
  gpu_problem=${gpu_problem:-$(join "${refused[@]}")}
elif [ ${#refused[@]} -gt 0 ]; then
  gpu_remark+="${gpu_remark:+; }$(join "${refused[@]}"): left out"
fi
if [ ${#compiled[@]} = 0 ]; then
  compiled=(80 90a)
  for architecture in 100 120; do if nvcc_has $architecture; then compiled+=($architecture); fi; done
  architectures="${compiled[*]} ptx"
else
  architectures=$(printf '%s\n' "${compiled[@]}" | sort -u | paste -sd ' ')
fi
# A GPU that nvidia-smi does not show: a display controller (class 03) of NVIDIA's (vendor 10de).
if [ -z "$gpus" ]; then
  for device in "${PCI_DEVICES:-/sys/bus/pci/devices}"/*; do
    if [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ] && [[ $(cat "$device/class") = 0x03* ]]; then
      gpu_remark+="${gpu_remark:+; }this machine has an NVIDIA GPU, but nvidia-smi shows none: is its driver installed?"
      break
    fi
  done
fi

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
  for variable in nvcc cuda gpus architectures gpu_problem gpu_remark; do echo "$variable := ${!variable}"; done
fi
