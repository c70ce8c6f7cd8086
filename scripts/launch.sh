#!/usr/bin/env bash
# Trains on several GPUs of this machine, without MPI:
#
#   scripts/launch.sh RANKS PROGRAM [ARGUMENT ...]
#
# starts as many processes. Each has torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE) and a GPU of
# its own, one in CUDA_VISIBLE_DEVICES if that is set. SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to all. If one
# fails, the others are ended, and the exit status is its own. Needs bash 5.1 (2020).
set -uo pipefail
die() { echo "error: launch.sh: $*" >&2; exit 1; }
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) || die "this is bash $BASH_VERSION; it needs 5.1"
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then die "usage: $0 RANKS PROGRAM [ARGUMENT ...]"; fi
export WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1
shift
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-}"
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ ${#gpus[@]} -lt "$WORLD_SIZE" ] &&
  [ -z "${NCCL_MULTI_RANK_GPU_ENABLE-}" ]; then
  die "$WORLD_SIZE ranks need a GPU each, and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES has ${#gpus[@]}; start as many"
fi
[ "$WORLD_SIZE" -gt 1 ] || RANK=0 LOCAL_RANK=0 exec "$@"
unset MASTER_ADDR MASTER_PORT
export TORCHELASTIC_RUN_ID=launch-$$-$RANDOM
# Where the ranks meet; ranks that were killed have left it.
trap 'rm -rf "${TMPDIR:-/tmp}/gpt2-sla-$EUID-torchrun-$TORCHELASTIC_RUN_ID"' EXIT
set -m  # each rank has a process group: a terminal's Ctrl-C comes through this script alone
pids=()
to_all() { for pid in "${pids[@]}"; do kill "-$1" -- "-$pid"; done; }
one_lives() { for pid in "${pids[@]}"; do kill -0 -- "-$pid" && return; done; return 1; }
# shellcheck disable=SC2064 # the signal of now
for s in TERM INT HUP USR1; do trap "passed+=' $s '; to_all $s" $s; done
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$rank "$@" </dev/null &
  pids+=($!)
done
exec 3>&2 2>/dev/null  # bash would tell of each rank that it is ended
for ((left = WORLD_SIZE; left > 0;)); do
  wait -n -p ended
  status=$?
  [ -n "${ended-}" ] || continue  # a signal has been passed on
  left=$((left - 1))
  [ "$status" -eq 0 ] || break
done
for rank in "${!pids[@]}"; do
  [ "$status" -gt 128 ] && signal=$(kill -l "$status") || break
  if [ "${pids[rank]}" = "$ended" ] && [[ ${passed-} != *" $signal "* ]]; then
    echo "error: launch.sh: rank $rank of $WORLD_SIZE was ended by SIG$signal" >&3
  fi
done
sleep 0.7  # for those that end by themselves, by the same signal; not as long as they wait with the same error
for signal in TERM KILL; do
  to_all $signal
  for ((tenths = 0; tenths < 50; tenths++)); do
    one_lives || exit "$status"
    sleep 0.1
  done
done
exit "$status"
