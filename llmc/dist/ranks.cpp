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

// The number of processes that were started together by MPI, this one included; 1 if it was not started by MPI.
static int started_by_mpi() {
  const int ranks = number_of("OMPI_COMM_WORLD_SIZE", 0);  // mpirun
  if (ranks > 0) return ranks;
  return getenv("PMIX_RANK") != nullptr ? number_of("SLURM_STEP_NUM_TASKS", 1) : 1;  // srun --mpi=pmix
}

static Ranks ranks_of_mpi() {
  Ranks r;
#ifdef SLA_MPI
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
#endif
  return r;
}

std::string read_private_file(const std::string& path, const char* otherwise) {
  constexpr size_t max_bytes = size_t(1) << 16;
  struct stat status;
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a named pipe must not block
  std::string bytes(max_bytes + 1, '\0');
  if (file.fd < 0 || fstat(file.fd, &status) != 0) user_error("%s: cannot be read: %s", path.c_str(), strerror(errno));
  if (!S_ISREG(status.st_mode)) user_error("%s: is no file; name one", path.c_str());
  if (status.st_uid != geteuid())
    user_error("%s: belongs to another user (%u), who may know what it says; remove it, or %s", path.c_str(),
               unsigned(status.st_uid), otherwise);
  if ((status.st_mode & 077) != 0)
    user_error("%s: other users may read or write it (mode %04o); chmod 600 it, or %s", path.c_str(),
               unsigned(status.st_mode & 0777), otherwise);
  const ssize_t size = read(file.fd, bytes.data(), bytes.size());
  if (size < 0) user_error("%s: cannot be read: %s", path.c_str(), strerror(errno));
  if (size_t(size) > max_bytes) user_error("%s: has more than %zu bytes; name another file", path.c_str(), max_bytes);
  return bytes.substr(0, size_t(size));
}

// The secret that the ranks share; "" if there is none.
static std::string secret_of(const RankOptions& o) {
  const char* const variable = getenv("SLA_RENDEZVOUS_SECRET");
  if (variable == nullptr && o.secret_file.empty()) return "";
  if (variable != nullptr && !o.secret_file.empty())
    user_error("--rendezvous-secret %s: there is SLA_RENDEZVOUS_SECRET, too; give one of them", o.secret_file.c_str());
  std::string secret =
      variable != nullptr ? variable : read_private_file(o.secret_file, "give it as SLA_RENDEZVOUS_SECRET");
  secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
  constexpr size_t min_bytes = 16;  // a shorter one could be guessed by who overhears a handshake
  if (secret.size() < min_bytes)
    user_error("%s: a secret needs at least %zu characters, and it has %zu; draw one: head -c 32 /dev/urandom | base64",
               variable != nullptr ? "SLA_RENDEZVOUS_SECRET" : ("--rendezvous-secret " + o.secret_file).c_str(),
               min_bytes, secret.size());
  return secret;
}

Ranks init_ranks(const RankOptions& o) {
  if (o.rendezvous.empty()) {
    if (o.rank || o.ranks || o.local_rank || !o.secret_file.empty())
      user_error("--rank, --ranks, --local-rank and --rendezvous-secret belong to --rendezvous; mpirun's processes "
                 "know theirs");
    const int processes = started_by_mpi();
    if (processes == 1) return {};
#ifndef SLA_MPI
    user_error("started as one of %d processes, but this program was built without MPI; install OpenMPI "
               "(libopenmpi-dev) and build again, or give --rendezvous",
               processes);
#endif
    return ranks_of_mpi();
  }
  if (!begins_with(o.rendezvous, "file:") && !begins_with(o.rendezvous, "tcp:"))
    user_error("--rendezvous %s: it must be file:PATH or tcp:HOST:PORT", o.rendezvous.c_str());
  Ranks r;
  r.rendezvous = o.rendezvous, r.secret = secret_of(o);
  r.rank = o.rank.value_or(number_of("SLURM_PROCID", -1));
  r.size = o.ranks.value_or(number_of("SLURM_NTASKS", -1));
  r.local_rank = o.local_rank.value_or(number_of("SLURM_LOCALID", 0));
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
