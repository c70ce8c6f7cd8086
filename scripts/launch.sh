#!/usr/bin/env bash
# Trains on several GPUs of this machine, without MPI:
#
#   scripts/launch.sh RANKS PROGRAM [ARGUMENT ...]
#
# starts as many processes, of which each has torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE) and uses a GPU of its
# own, of those in CUDA_VISIBLE_DEVICES if that is set. They meet at a file that only this user can read. SIGTERM,
# SIGINT, SIGHUP and SIGUSR1 are passed on to all. If one fails, the others are ended, and the exit status is its own.
set -uo pipefail
die() { echo "error: launch.sh: $*" >&2; exit 1; }
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then die "usage: $0 RANKS PROGRAM [ARGUMENT ...]"; fi
ranks=$1
shift
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-}"
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ ${#gpus[@]} -lt "$ranks" ]; then
  die "$ranks ranks need a GPU each, and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES has ${#gpus[@]}; start as many"
fi
[ "$ranks" -gt 1 ] || exec "$@" --ranks 1
folder=$(mktemp -d) || die "no temporary folder can be made; TMPDIR=folder names another place"
trap 'rm -rf "$folder"' EXIT
set -m  # each rank has a process group: a terminal's Ctrl-C comes through this script alone
pids=()
to_all() { for pid in "${pids[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null; done; }
# shellcheck disable=SC2064 # the signal of now
for s in TERM INT HUP USR1; do trap "to_all $s" $s; done
for ((rank = 0; rank < ranks; rank++)); do
  {
    trap : TERM INT HUP USR1
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks "$@" --rendezvous "file:$folder/rendezvous" </dev/null
    echo $? >"$folder/status.$rank"
  } &
  pids+=($!)
done

# The statuses of the ranks that have ended, the first of them first.
statuses() { (cd "$folder" && find . -name 'status.*' -printf '%T@ %f\n' | sort -n | cut -d' ' -f2 | xargs -r cat); }
while true; do
  running=$(jobs -pr)
  ended=$(statuses)
  failed=$(grep -vxm 1 0 <<<"$ended")
  [ -z "$failed" ] || break
  [ "$(grep -c . <<<"$ended")" -lt "$ranks" ] || exit 0
  [ -n "$running" ] || die "a rank has ended and left no status in $folder"
  wait -n
done
# The others notice, say which rank it was and end, unless they have not met yet.
for signal in 0 TERM KILL; do
  to_all $signal
  for ((tenths = 0; tenths < 50; tenths++)); do
    [ -n "$(jobs -pr)" ] || exit "$failed"
    sleep 0.1
  done
done
exit "$failed"
