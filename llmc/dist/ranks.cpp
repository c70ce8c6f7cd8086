#include "ranks.h"
#ifdef SLA_MPI
#include <mpi.h>
#endif
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include "llmc/utils/error.h"
#include "llmc/utils/files.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"

// The number in an environment variable, or `otherwise` if it is not set.
static int number_of(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  try {
    return text != nullptr ? parse_number<int>(text) : otherwise;
  } catch (const UserError& e) { user_error("the environment variable %s=%s", variable, e.what()); }
}

// By which variables a launcher tells a process which of how many it is.
struct Launcher {
  const char *name, *rank, *size, *local_rank, *local_size;
  const char* job[2];  // what the processes of a run have in common, and other runs on the machine have not
};

// Of those that may be nested the inner one comes first. A shell in an allocation, too, has SLURM_PROCID and
// SLURM_NTASKS; only srun's tasks have SLURM_STEP_NUM_TASKS. mpiexec is Intel MPI's or MPICH's.
constexpr Launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {"MASTER_PORT", "TORCHELASTIC_RUN_ID"}},
    {"mpirun",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"PMIX_NAMESPACE"}},
    {"srun",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     "SLURM_STEP_TASKS_PER_NODE",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", {}},
};

// The shell of `srun --pty` is the first task of its step; this process was started in it, and not by srun.
static bool is_in_shell_of_srun() {
  return getenv("SLURM_PTY_PORT") != nullptr && number_of("SLURM_PROCID", 0) == 0 &&
         number_of("SLURM_TASK_PID", int(getpid())) != int(getpid());
}

// The launcher that has started this process as one of at least `least` processes; null if there is none.
static const Launcher* launcher_of(int least) {
  for (const Launcher& l : launchers)
    if (number_of(l.size, 0) >= least && !(l.name == std::string("srun") && is_in_shell_of_srun())) return &l;
  return nullptr;
}

#ifdef SLA_MPI
static Ranks ranks_of_mpi() {
  Ranks r;
  int threads = 0;
  // Other threads load data and watch the ranks; this one calls MPI.
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &threads);
  if (threads < MPI_THREAD_FUNNELED)
    user_error("MPI allows this process no threads; build OpenMPI with them, or give --rendezvous");
  MPI_Comm neighbours;
  MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &r.size);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, r.rank, MPI_INFO_NULL, &neighbours);
  MPI_Comm_rank(neighbours, &r.local_rank);
  MPI_Comm_free(&neighbours);
  r.by_mpi = true;
  return r;
}
#endif

std::string read_private_file(const std::string& path, const char* otherwise) {
  constexpr size_t max_bytes = size_t(1) << 16;
  struct stat status;
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a named pipe must not block
  std::string bytes(max_bytes + 1, '\0');
  if (file.fd < 0 || fstat(file.fd, &status) != 0) user_error("%s: cannot be read: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) user_error("%s: is no file; name one", path);
  if (status.st_uid != geteuid())
    user_error("%s: belongs to another user (%u), who may know what it says; remove it, or %s", path,
               unsigned(status.st_uid), otherwise);
  if ((status.st_mode & 077) != 0)
    user_error("%s: other users may read or write it (mode %04o); chmod 600 it, or %s", path,
               unsigned(status.st_mode & 0777), otherwise);
  const ssize_t size = read(file.fd, bytes.data(), bytes.size());
  if (size < 0) user_error("%s: cannot be read: %s", path, strerror(errno));
  if (size_t(size) > max_bytes) user_error("%s: has more than %zu bytes; name another file", path, max_bytes);
  return bytes.substr(0, size_t(size));
}

// The secret that the ranks share; "" if there is none.
static std::string secret_of(const RankOptions& o) {
  const char* const variable = getenv("SLA_RENDEZVOUS_SECRET");
  if (variable == nullptr && o.secret_file.empty()) return "";
  if (variable != nullptr && !o.secret_file.empty())
    user_error("--rendezvous-secret %s: there is SLA_RENDEZVOUS_SECRET, too; give one of them", o.secret_file);
  std::string secret =
      variable != nullptr ? variable : read_private_file(o.secret_file, "give it as SLA_RENDEZVOUS_SECRET");
  secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
  constexpr size_t min_bytes = 16;  // a shorter one could be guessed by who overhears a handshake
  if (secret.size() < min_bytes)
    user_error("%s: a secret needs at least %zu characters, and it has %zu; draw one: head -c 32 /dev/urandom | base64",
               variable != nullptr ? "SLA_RENDEZVOUS_SECRET" : ("--rendezvous-secret " + o.secret_file), min_bytes,
               secret.size());
  return secret;
}

// A name for what only this run's processes use: "srun-77-0"; "" if the launcher's variables do not tell runs apart.
static std::string name_of_run(const Launcher& l) {
  std::string name;
  for (const char* variable : l.job)
    if (const char* text = variable != nullptr ? getenv(variable) : nullptr) name += std::string("-") + text;
  for (char& c : name)
    if (!isalnum((unsigned char)c)) c = '-';
  return name.empty() ? "" : l.name + name;
}

// Where the processes of a launcher other than MPI meet: on one machine at a file of their own. Throws UserError, with
// what to type, if they are on several machines, or nothing tells them from other runs.
static std::string rendezvous_of(const Launcher& l) {
  const char *size = getenv(l.size), *local_size = getenv(l.local_size);
  const std::string run = name_of_run(l);
  if (!run.empty() && local_size != nullptr && strcmp(size, local_size) == 0)
    return format("file:%s/gpt2-sla-%u-%s", std::filesystem::temp_directory_path().c_str(), unsigned(geteuid()),
                  run.c_str());
  user_error("process %d of %s, which %s has started, does not know where the others are; type %s ... %s ... "
             "--rendezvous file:%s/rendezvous%s (a path that all machines share), on a single machine "
             "scripts/launch.sh %s %s ..., or --ranks 1 for a run of this process alone",
             number_of(l.rank, -1), size, l.name, l.name, program_invocation_name,
             std::filesystem::current_path().c_str(), run.empty() ? "" : ("-" + run), size, program_invocation_name);
}

// Throws UserError if one of the variables by which a launcher tells the rank and the size is set and the other is not.
static void check_both(const Launcher& l) {
  const bool has_rank = getenv(l.rank) != nullptr, has_size = getenv(l.size) != nullptr;
  if (has_rank == has_size) return;
  const char *there = has_rank ? l.rank : l.size, *missing = has_rank ? l.size : l.rank;
  user_error("the environment has %s=%s and not %s, which %s sets beside it: which of how many processes is this? "
             "Unset %s for a run of this process alone, or start all with scripts/launch.sh N %s ...",
             there, getenv(there), missing, l.name, there, program_invocation_name);
}

// The ranks without --rendezvous.
static Ranks ranks_of_launcher(const Launcher* l) {
  Ranks r;
#ifdef SLA_MPI
  // Of PMIx alone only MPI knows the size.
  const bool has_pmix = getenv("PMIX_RANK") != nullptr;
  if (l == nullptr ? has_pmix && launcher_of(1) == nullptr
                   : l->name == std::string("mpirun") || (l->name == std::string("srun") && has_pmix))
    return ranks_of_mpi();
#endif
  if (l != nullptr) r.rendezvous = rendezvous_of(*l);
  return r;
}

Ranks init_ranks(const RankOptions& o) {
  if (o.rendezvous.empty()) {
    if (o.ranks == 1 && o.rank.value_or(0) == 0 && !o.local_rank && o.secret_file.empty()) return {};
    if (o.rank || o.ranks || o.local_rank || !o.secret_file.empty())
      user_error("--rank, --ranks, --local-rank and --rendezvous-secret belong to --rendezvous; mpirun's processes "
                 "know theirs");
  } else if (!begins_with(o.rendezvous, "file:") && !begins_with(o.rendezvous, "tcp:")) {
    user_error("--rendezvous %s: it must be file:PATH or tcp:HOST:PORT", o.rendezvous);
  }
  // The others' rank may be set without a size: by a shell in Slurm's allocation, and by launchers that PMIx tells.
  if (!o.rank && !o.ranks) check_both(launchers[0]);
  const Launcher* l = launcher_of(2);
  Ranks r;
  r.rendezvous = o.rendezvous;
  if (o.rendezvous.empty()) r = ranks_of_launcher(l);
  if (r.rendezvous.empty()) return r;
  if (l == nullptr) l = launcher_of(1);
  r.secret = secret_of(o);
  r.rank = o.rank.value_or(l != nullptr ? number_of(l->rank, -1) : -1);
  r.size = o.ranks.value_or(l != nullptr ? number_of(l->size, -1) : -1);
  r.local_rank = o.local_rank.value_or(l != nullptr ? number_of(l->local_rank, 0) : 0);
  if (r.rank < 0 || r.size < 1)
    user_error("--rendezvous: which of how many processes is this? Give --rank and --ranks, or start it with srun");
  if (r.rank >= r.size) user_error("--rank %d: with --ranks %d it must be below that", r.rank, r.size);
  if (r.local_rank < 0) user_error("--local-rank %d: it must be at least 0", r.local_rank);
  return r;
}

void broadcast_by_mpi(std::string& text) {
#ifdef SLA_MPI
  unsigned long size = text.size();
  MPI_Bcast(&size, 1, MPI_UNSIGNED_LONG, 0, MPI_COMM_WORLD);
  text.resize(size);
  MPI_Bcast(text.data(), int(size), MPI_BYTE, 0, MPI_COMM_WORLD);
#else
  (void)text;
#endif
}

void finalize_ranks(const Ranks& ranks) {
#ifdef SLA_MPI
  if (ranks.by_mpi) MPI_Finalize();
#else
  (void)ranks;
#endif
}
