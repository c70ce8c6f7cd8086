# What the Slurm jobs here have in common: runs "$@", hands Slurm's warning on to it, and puts the job back into the queue if there is more to
# do after it.
[ $# -ge 1 ] || { echo "error: usage: sbatch scripts/multi_node/slurm....sbatch <script> [arguments ...]" >&2; exit 1; }
source scripts/stoppable.sh
stoppable "$@"
if [ -n "$stopped" ] && [ $status -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
