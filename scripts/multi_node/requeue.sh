# The common part of the Slurm jobs: runs "$@", forwards Slurm's warning signal to it, and requeues the job if the run
# stopped because of it before its end.
[ $# -ge 1 ] || { echo "error: usage: sbatch scripts/multi_node/slurm....sbatch <script> [arguments ...]" >&2; exit 1; }
source scripts/stoppable.sh
stoppable "$@"
if [ -n "$stopped" ] && [ $status -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
