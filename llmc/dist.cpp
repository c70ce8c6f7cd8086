#include "dist.h"
#ifdef SLA_MPI
#include <mpi.h>           // MPI_Init, MPI_Bcast
#endif
#include <netdb.h>         // getaddrinfo
#include <sys/socket.h>    // socket, bind, connect
#include <unistd.h>        // close, unlink, usleep
#include <cerrno>          // errno
#include <chrono>          // std::chrono::steady_clock
#include <cstdlib>         // getenv, strtol
#include <cstring>         // memcpy, strerror
#include <fstream>         // std::ifstream
#include <iterator>        // std::istreambuf_iterator
#include <memory>          // std::unique_ptr
#include <random>          // std::random_device
#include <vector>          // std::vector
#include "durable_file.h"  // write_file_durably, rename_durably
#include "error.h"         // user_error, CHECK

static int number_of(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text != nullptr ? int(strtol(text, nullptr, 10)) : otherwise;
}

// The number of processes that somebody has started together with this one and that speak MPI; 1 if nobody has.
static int started_by_mpi() {
  const int ranks = number_of("OMPI_COMM_WORLD_SIZE", 0);  // mpirun
  if (ranks > 0) return ranks;
  return getenv("PMIX_RANK") != nullptr ? number_of("SLURM_STEP_NUM_TASKS", 1) : 1;  // srun --mpi=pmix
}

static Ranks ranks_of_mpi() {
  Ranks r;
#ifdef SLA_MPI
  MPI_Init(nullptr, nullptr);
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

Ranks join_ranks(const RankOptions& o) {
  if (o.rendezvous.empty()) {
    if (o.rank || o.ranks || o.local_rank)
      user_error("--rank, --ranks and --local-rank belong to --rendezvous; mpirun's processes know theirs");
    const int processes = started_by_mpi();
    if (processes == 1) return {};
#ifndef SLA_MPI
    user_error("started as one of %d processes, but this program was built without MPI; install OpenMPI (libopenmpi-dev) and build "
               "again, or give --rendezvous", processes);
#endif
    return ranks_of_mpi();
  }
  if (o.rendezvous.rfind("file:", 0) != 0 && o.rendezvous.rfind("tcp:", 0) != 0)
    user_error("--rendezvous %s: it must be file:PATH or tcp:HOST:PORT", o.rendezvous.c_str());
  Ranks r;
  r.rendezvous = o.rendezvous;
  r.rank = o.rank.value_or(number_of("SLURM_PROCID", -1));
  r.size = o.ranks.value_or(number_of("SLURM_NTASKS", -1));
  r.local_rank = o.local_rank.value_or(number_of("SLURM_LOCALID", 0));
  if (r.rank < 0 || r.size < 1)
    user_error("--rendezvous: which of how many processes is this? Give --rank and --ranks, or start it with srun");
  if (r.rank >= r.size) user_error("--rank %d: with --ranks %d it must be below that", r.rank, r.size);
  if (r.local_rank < 0) user_error("--local-rank %d: it must be at least 0", r.local_rank);
  return r;
}

// ----------------------------------------------------------------------------
// Meeting without MPI

namespace {

constexpr double patience_seconds = 300;

struct Patience {
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  // Sleeps a little. Throws UserError once it has been too long.
  void wait(const Ranks& ranks, const char* for_whom) const {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > patience_seconds)
      user_error("--rendezvous %s: rank %d of %d has waited %.0f s for %s; were all processes started, with the same --rendezvous?",
                 ranks.rendezvous.c_str(), ranks.rank, ranks.size, patience_seconds, for_whom);
    usleep(20000);
  }
};

std::string contents(const std::string& path) {  // "" if there is no such file
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_at_once(const std::string& path, const std::string& text) {
  write_file_durably(path + ".new", text);
  rename_durably(path + ".new", path);
}

// Every other rank lays down PATH.rank with a number drawn for this run. Rank 0 publishes in PATH the numbers it has seen and the bytes;
// who finds its own number there takes the bytes and removes its file, and rank 0 is done when all files are gone. A file that an
// earlier run has left is overwritten by its rank or holds a number of nobody's, so it can make nobody believe anything.
void share_by_file(const Ranks& ranks, const std::string& path, std::string& bytes) {
  const Patience patience;
  constexpr size_t ticket_size = 16;
  const auto ticket_of = [&](int rank) { return path + "." + std::to_string(rank); };
  if (ranks.rank > 0) {
    std::random_device random;
    const std::string ticket = format("%08x%08x", random(), random());
    write_at_once(ticket_of(ranks.rank), ticket);
    const size_t header = size_t(ranks.size) * ticket_size;
    std::string published;
    while (published.size() != header + bytes.size() || published.compare(size_t(ranks.rank) * ticket_size, ticket_size, ticket) != 0) {
      patience.wait(ranks, "rank 0");
      published = contents(path);
    }
    bytes = published.substr(header);
    unlink(ticket_of(ranks.rank).c_str());
    return;
  }
  std::vector<std::string> tickets(size_t(ranks.size), std::string(ticket_size, '-'));
  std::vector<bool> done(size_t(ranks.size), false);
  for (int missing = ranks.size - 1; missing > 0; patience.wait(ranks, "the others")) {
    bool changed = false;
    for (int rank = 1; rank < ranks.size; rank++) {
      const std::string ticket = contents(ticket_of(rank));
      const bool known = tickets[size_t(rank)][0] != '-';
      if (ticket.size() == ticket_size && ticket != tickets[size_t(rank)]) tickets[size_t(rank)] = ticket, changed = true;
      else if (known && !done[size_t(rank)] && access(ticket_of(rank).c_str(), F_OK) != 0) done[size_t(rank)] = true, missing--;
    }
    if (!changed) continue;
    std::string all;
    for (const std::string& ticket : tickets) all += ticket;
    write_at_once(path, all + bytes);
  }
  unlink(path.c_str());
}

struct Socket {
  int fd;
  explicit Socket(int descriptor) : fd(descriptor) {}
  Socket(const Socket&) = delete;
  ~Socket() {
    if (fd >= 0) close(fd);
  }
};

bool transfer(int fd, void* bytes, size_t count, bool sends) {
  for (size_t done = 0; done < count;) {
    char* at = static_cast<char*>(bytes) + done;
    const ssize_t n = sends ? send(fd, at, count - done, MSG_NOSIGNAL) : recv(fd, at, count - done, 0);
    if (n <= 0) return false;
    done += size_t(n);
  }
  return true;
}

// Rank 0 listens; the others say which rank they are and are sent the bytes. They try until somebody listens.
void share_by_tcp(const Ranks& ranks, const std::string& address, std::string& bytes) {
  const Patience patience;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) user_error("--rendezvous %s: it must be tcp:HOST:PORT", ranks.rendezvous.c_str());
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = ranks.rank == 0 ? AI_PASSIVE : 0;
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  const int error = getaddrinfo(ranks.rank == 0 ? nullptr : host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) user_error("--rendezvous %s: %s", ranks.rendezvous.c_str(), gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> to(found, freeaddrinfo);
  const timeval seconds = {5, 0};  // for a peer that stops in the middle
  if (ranks.rank > 0) {
    int32_t rank = ranks.rank;
    for (;; patience.wait(ranks, "rank 0")) {
      const Socket s(socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      setsockopt(s.fd, SOL_SOCKET, SO_RCVTIMEO, &seconds, sizeof seconds);
      if (connect(s.fd, to->ai_addr, to->ai_addrlen) == 0 && transfer(s.fd, &rank, sizeof rank, true) &&
          transfer(s.fd, bytes.data(), bytes.size(), false)) return;
    }
  }
  const Socket listener(socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  setsockopt(listener.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(listener.fd, to->ai_addr, to->ai_addrlen) != 0 || listen(listener.fd, ranks.size) != 0)
    user_error("--rendezvous %s: cannot listen: %s", ranks.rendezvous.c_str(), strerror(errno));
  std::vector<bool> served(size_t(ranks.size), false);
  for (int missing = ranks.size - 1; missing > 0;) {
    const Socket s(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC));
    if (s.fd < 0) {
      patience.wait(ranks, "the others");
      continue;
    }
    setsockopt(s.fd, SOL_SOCKET, SO_RCVTIMEO, &seconds, sizeof seconds);
    int32_t rank = 0;
    if (!transfer(s.fd, &rank, sizeof rank, false) || rank < 1 || rank >= ranks.size || !transfer(s.fd, bytes.data(), bytes.size(), true))
      continue;
    if (!served[size_t(rank)]) served[size_t(rank)] = true, missing--;
  }
}

}  // namespace

void share_from_first_rank(const Ranks& ranks, void* bytes, size_t count) {
  if (ranks.size == 1) return;
  if (ranks.by_mpi) {
#ifdef SLA_MPI
    MPI_Bcast(bytes, int(count), MPI_BYTE, 0, MPI_COMM_WORLD);
#endif
    return;
  }
  std::string text(static_cast<const char*>(bytes), count);
  if (ranks.rendezvous.rfind("file:", 0) == 0) share_by_file(ranks, ranks.rendezvous.substr(5), text);
  else share_by_tcp(ranks, ranks.rendezvous.substr(4), text);
  memcpy(bytes, text.data(), count);
}

void leave_ranks(const Ranks& ranks) {
#ifdef SLA_MPI
  if (ranks.by_mpi) MPI_Finalize();
#else
  (void)ranks;
#endif
}
