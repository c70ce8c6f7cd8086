# stoppable <command ...>: runs it, and hands SIGTERM, SIGINT and SIGUSR1 on to it as SIGUSR1, on which the trainer leaves a checkpoint and
# which mpirun and srun pass to their processes (on the other two they end them). Sets status to its exit status; stopped=yes if there was
# a signal.
stopped=
stoppable() {
  local signalled=yes child s
  "$@" &
  child=$!
  trap 'stopped=yes signalled=yes; kill -USR1 "$child" 2>/dev/null' TERM INT USR1
  while [ -n "$signalled" ]; do  # a signal ends wait, but not the command
    signalled=
    wait "$child"
    s=$?
    [ $s = 127 ] || status=$s  # 127: it has been waited for
  done
  trap - TERM INT USR1
}
