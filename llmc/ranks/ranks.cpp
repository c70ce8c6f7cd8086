#include "ranks.h"
#ifdef SLA_MPI
#include <mpi.h>
#endif
#include <unistd.h>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include "llmc/base/error.h"
#include "llmc/base/host_name.h"
#include "llmc/base/number.h"

// The environment variables of a launcher. It sets the first three together: how many processes there are, which of
// them this is, and which on its machine. local_size: how many are on its machine. job: the same in all processes of a
// run, and others in other runs.
struct Launcher {
  const char *name, *size, *rank, *local_rank, *local_size;
  const char* job[3];
};

// Where launchers are nested the inner one comes first. A shell in an allocation, too, has SLURM_PROCID; only srun's
// tasks have SLURM_STEP_NUM_TASKS.
// clang-format off
constexpr Launcher launchers[] = {
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", {"PMIX_NAMESPACE"}},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
};
// clang-format on
constexpr const Launcher &mpirun = launchers[1], &srun = launchers[2];

// Each is set by a launcher that is none of these: MPICH's and Intel's mpiexec, MVAPICH's, Cray's, IBM's, Flux's.
constexpr const char* others[] = {"PMI_RANK",           "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK", "PALS_RANKID",
                                  "JSM_NAMESPACE_RANK", "ALPS_APP_PE",     "FLUX_TASK_RANK"};

static const char what_to_type[] = "start it with scripts/launch.sh N, mpirun -np N, srun or torchrun; "
                                   "a run of this process alone with scripts/launch.sh 1";

#ifdef SLA_MPI
constexpr bool has_mpi = true;

static Ranks ranks_of_mpi() {
  Ranks r;
  int threads = 0;
  // Other threads load data and watch the ranks; this one calls MPI.
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &threads);
  if (threads < MPI_THREAD_FUNNELED) user_error("MPI allows this process no threads; %s", what_to_type);
  MPI_Comm neighbours;
  MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &r.size);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, r.rank, MPI_INFO_NULL, &neighbours);
  MPI_Comm_rank(neighbours, &r.local_rank);
  MPI_Comm_free(&neighbours);
  r.by_mpi = true;
  return r;
}
void broadcast_by_mpi(void* bytes, size_t count) { MPI_Bcast(bytes, int(count), MPI_BYTE, 0, MPI_COMM_WORLD); }
void finalize_ranks(const Ranks& ranks) {
  if (ranks.by_mpi) MPI_Finalize();
}
#else
constexpr bool has_mpi = false;

static Ranks ranks_of_mpi() {
  user_error("this process was started by MPI, without which this program was built; start it with scripts/launch.sh N "
             "or torchrun, or build it where mpicxx is");
}
void broadcast_by_mpi(void*, size_t) {}
void finalize_ranks(const Ranks&) {}
#endif

// The number in an environment variable.
static int number_of(const char* variable, int least) {
  const char* const text = getenv(variable);
  try {
    const int number = parse_number<int>(text != nullptr ? text : "");
    if (number >= least) return number;
  } catch (const UserError& e) { user_error("the environment variable %s=%s", variable, e.what()); }
  user_error("the environment variable %s=%s: it must be at least %d", variable, text, least);
}

// The shell of `srun --pty` is the first task of its step; this process was started in it, and not by srun.
static bool is_in_shell_of_srun() {
  return getenv("SLURM_PTY_PORT") != nullptr && getenv("SLURM_TASK_PID") != nullptr && number_of(srun.rank, 0) == 0 &&
         number_of("SLURM_TASK_PID", 0) != int(getpid());
}

// The launcher that has started this process; null if none has.
static const Launcher* launcher_of_this() {
  for (const Launcher& l : launchers) {
    if (&l == &srun && (getenv(l.size) == nullptr || is_in_shell_of_srun())) continue;
    std::string present, missing;
    for (const char* variable : {l.rank, l.size, l.local_rank}) {
      const char* const text = getenv(variable);
      std::string& list = text != nullptr ? present : missing;
      list += (list.empty() ? "" : ", ") + std::string(variable) + (text != nullptr ? std::string("=") + text : "");
    }
    if (missing.empty()) return &l;
    if (!present.empty())
      user_error("the environment has %s and not %s, which %s sets beside it: which of how many processes is this? "
                 "Unset what is there, or %s",
                 present, missing, l.name, what_to_type);
  }
  return nullptr;
}

// Where the ranks of a run leave their files; "" if no place is known that all see.
static std::string folder_of(const Launcher& l, const std::string& rendezvous, const std::string& out) {
  std::string run = l.name;
  for (const char* variable : l.job)
    if (const char* text = variable != nullptr ? getenv(variable) : nullptr) run += std::string("-") + text;
  for (char& c : run)
    if (!isalnum((unsigned char)c)) c = '-';
  const char *size = getenv(l.size), *local_size = getenv(l.local_size), *temporary = getenv("TMPDIR");
  if (!rendezvous.empty()) return rendezvous + "/ranks-" + run;
  if (run != l.name && size != nullptr && local_size != nullptr && strcmp(size, local_size) == 0)
    return format("%s/gpt2-sla-%u-%s", temporary != nullptr ? temporary : "/tmp", unsigned(geteuid()), run.c_str());
  return out.empty() ? "" : out + "/ranks-" + run;
}

Ranks init_ranks(const std::string& rendezvous, const std::string& out) {
  const Launcher* const l = launcher_of_this();
  const bool has_pmix = getenv("PMIX_RANK") != nullptr;  // alone, it leaves the size to MPI
  if (l == nullptr && !has_pmix) {
    for (const char* variable : others)
      if (const char* text = getenv(variable))
        user_error("the environment has %s=%s, by a launcher that this program does not know; %s", variable, text,
                   what_to_type);
    return {};
  }
  Ranks r;
  if (l != nullptr) {
    r.size = number_of(l->size, 1), r.rank = number_of(l->rank, 0), r.local_rank = number_of(l->local_rank, 0);
    if (r.rank >= r.size) user_error("%s=%d: with %s=%d it must be below that", l->rank, r.rank, l->size, r.size);
    if (r.size == 1) return {};
  }
  const bool is_told_by_mpi = l == nullptr || l == &mpirun;
  const int started = r.size;
  if (is_told_by_mpi || (has_mpi && has_pmix && l == &srun)) r = ranks_of_mpi();
  if (l != nullptr && r.size != started)
    user_error("%s has started %d processes, and MPI knows of %d: this program was built with another MPI than the one "
               "that started it; `make clean` and build with its mpicxx, or %s",
               l->name, started, r.size, what_to_type);
  if (r.size > 1) r.folder = folder_of(l != nullptr ? *l : mpirun, rendezvous, out);
  if (r.size > 1 && r.folder.empty() && !r.by_mpi)
    user_error("rank %d of %d, which %s has started, does not know where the others are: give -o or --rendezvous, a "
               "folder that all of them see; on a single machine scripts/launch.sh %d %s ... needs neither",
               r.rank, r.size, l->name, r.size, program_invocation_name);
  return r;
}

std::string rank_name(const Ranks& ranks) {
  return format("rank %d of %d (pid %d on %s)", ranks.rank, ranks.size, int(getpid()), host_name().c_str());
}
