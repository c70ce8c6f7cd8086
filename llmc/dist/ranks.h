// The processes of a data-parallel run, one per GPU: which rank this one is, and how they find each other. NCCL moves
// tensors between them (collectives.h); a TCP channel carries control messages (rank_channel.h).
//
//   scripts/launch.sh 8 ./train_gpt2_sla ...   on one machine: the ranks meet at a file
//   mpirun -np 8 ./train_gpt2_sla ...          MPI assigns the ranks, and tells where rank 0 is
//   srun, torchrun or mpiexec ...              their variables assign the ranks, which on one machine meet at a file
//   ... --rendezvous file:/shared/run7         without MPI: a path that all can read and write
//   ... --rendezvous tcp:node1:29500           or the address at which rank 0 listens
#pragma once
#include <optional>
#include <string>

// From the command line; what is missing comes from the launcher's environment variables.
struct RankOptions {
  std::string rendezvous;  // empty: MPI, a launcher on this machine, or a single process
  std::optional<int> rank, ranks, local_rank;
  std::string secret_file;  // empty: the secret is that of SLA_RENDEZVOUS_SECRET, or there is none
};

struct Ranks {
  int rank = 0, size = 1;
  int local_rank = 0;  // among the processes on this machine: the index of its GPU
  std::string rendezvous;
  bool by_mpi = false;   // started by MPI, which has been initialized
  std::string secret{};  // by which ranks that find each other by TCP know each other; empty: there is none
};

// Determines this process's rank, and initializes MPI if MPI has started it. Throws UserError if the options and the
// environment do not determine the rank, or where the others are.
Ranks init_ranks(const RankOptions& options);

// The bytes of a file of at most 64 KiB that belongs to this user, and that no other can read or write. Throws
// UserError with the path and the reason if it is another, or cannot be read; it advises `otherwise`.
std::string read_private_file(const std::string& path, const char* otherwise);

// text = rank 0's text. Called by every rank that MPI has started; otherwise it does nothing.
void broadcast_by_mpi(std::string& text);

// Clean shutdown of MPI, if it is used: a process that ends without it is reported by mpirun as having died.
void finalize_ranks(const Ranks& ranks);
