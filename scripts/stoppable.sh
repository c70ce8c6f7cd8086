# stoppable <command ...>: runs it, and forwards SIGTERM, SIGINT, SIGHUP and SIGUSR1 to it as SIGUSR1, on which the
# trainer writes a checkpoint and stops. mpirun and srun pass SIGUSR1 to their processes, and on the others end them.
# Sets status to the command's exit status, and stopped=yes if there was a signal.
stopped=
stoppable() {
  local signalled=yes child s
  "$@" &
  child=$!
  trap 'stopped=yes signalled=yes; kill -USR1 "$child" 2>/dev/null' TERM INT HUP USR1
  while [ -n "$signalled" ]; do  # a signal ends wait, but not the command
    signalled=
    wait "$child"
    s=$?
    [ $s = 127 ] || status=$s  # 127: wait has returned its status before
  done
  trap - TERM INT HUP USR1
}
