# The common part of the Slurm jobs: runs "$@", forwards Slurm's warning signal to it, and requeues the job if the run
# stopped because of it before its end.
[ $# -ge 1 ] || { echo "error: usage: sbatch scripts/multi_node/slurm....sbatch <script> [arguments ...]" >&2; exit 1; }
# Since Slurm 22.05 srun does not take --cpus-per-task from the job: its tasks would share one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}; fi
source scripts/stoppable.sh
stoppable "$@"
if [ -n "$stopped" ] && [ $status -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
