#!/usr/bin/env bash
# One of the paper's runs on several machines, by OpenMPI and ssh:
#
#   scripts/multi_node/mpirun.sh node1:8,node2:8 scripts/run_gpt2.sh 124M sla 16384
#
# The first argument is mpirun's --host: each machine with the number of its GPUs. The same folder with the program,
# data and runs must exist on all of them under the same path. INTERFACE=name makes OpenMPI and NCCL use that network
# interface. Variables of NCCL, OpenMP, CUDA and the network libraries reach the processes on all machines.
set -euo pipefail
[ $# -ge 2 ] || { echo "error: usage: $0 host:gpus[,host:gpus...] <script> [arguments ...]" >&2; exit 1; }
hosts=$1
shift
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
LAUNCH=$(printf '%q ' mpirun --host "$hosts" --map-by slot --bind-to none --wdir "$root")
LAUNCH+=" -x PATH -x LD_LIBRARY_PATH"
for variable in $(compgen -e); do
  case $variable in
    NCCL_SOCKET_IFNAME) [ -n "${INTERFACE:-}" ] || LAUNCH+=" -x $variable" ;;
    NCCL_* | OMP_* | CUDA_* | CUBLAS_* | UCX_* | FI_*) LAUNCH+=" -x $variable" ;;
  esac
done
if [ -n "${INTERFACE:-}" ]; then
  LAUNCH+=" --mca btl_tcp_if_include $INTERFACE --mca oob_tcp_if_include $INTERFACE -x NCCL_SOCKET_IFNAME=$INTERFACE"
fi
export LAUNCH
exec "$@"
