// The processes that train together: who this one is, and how they find each other. One process a GPU; NCCL moves what they compute
// (cuda/collectives.h), and what they tell each other beside it has a channel (rank_channel.h).
//
//   mpirun -np 8 ./train_gpt2_sla ...          MPI says who is who, and where rank 0 is
//   ... --rendezvous file:/shared/run7         where MPI does not reach: a path that all can read and write
//   ... --rendezvous tcp:node1:29500           or an address at which rank 0 listens
#pragma once
#include <optional>  // std::optional
#include <string>    // std::string

// What the command line says; what it does not say comes from Slurm's variables.
struct RankOptions {
  std::string rendezvous;  // empty: MPI, or a process alone
  std::optional<int> rank, ranks, local_rank;
};

struct Ranks {
  int rank = 0, size = 1;
  int local_rank = 0;      // among the processes on this machine: picks the GPU
  std::string rendezvous;
  bool by_mpi = false;
};

// Throws UserError if the options and the environment do not say who this process is, or if this program was built without what it takes.
Ranks init_ranks(const RankOptions& options);

// text = rank 0's, on every rank that MPI has started; all call it.
void broadcast_by_mpi(std::string& text);

// Leaves in peace: without it mpirun takes a process that ends for one that died.
void finalize_ranks(const Ranks& ranks);
