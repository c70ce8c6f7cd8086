// The processes of a data-parallel run, one per GPU: which rank this one is, and where it finds the others. NCCL moves
// everything between them (collectives.h); before that they need NCCL's ID, from rank 0.
//
//   scripts/launch.sh 8 ./train_gpt2_sla ...   sets RANK, WORLD_SIZE and LOCAL_RANK, as torchrun does
//   mpirun -np 8 ./train_gpt2_sla ...          MPI says which rank this is, and broadcasts the ID
//   srun --ntasks=8 ./train_gpt2_sla ...       by MPI if Slurm has PMIx (--mpi=pmix), otherwise by its variables
//
// Without MPI they meet in a folder (rank_folder.h).
#pragma once
#include <cstddef>
#include <string>

struct Ranks {
  int rank = 0, size = 1;
  int local_rank = 0;       // among the processes on this machine: the index of its GPU
  bool by_mpi = false;      // started by MPI, which has been initialized
  std::string folder = {};  // of this run, for its ranks' files; "": there is none
};

// Determines this process's rank from the variables of its launcher, and initializes MPI if that has started it. The
// folder is one of this run in `rendezvous`; by default in the system's temporary folder if all ranks are on this
// machine, else in the output folder `out`. Throws UserError, with what to type, for half a set of variables, for those
// of a launcher that it does not know, and if there is neither MPI nor a folder.
Ranks init_ranks(const std::string& rendezvous, const std::string& out);

// "rank 3 of 8 (pid 1234 on node7)": this process.
std::string rank_name(const Ranks& ranks);

// bytes (count) = rank 0's. Called by every rank that MPI has started.
void broadcast_by_mpi(void* bytes, size_t count);

// Clean shutdown of MPI, if it is used: a process that ends without it is reported by mpirun as having died.
void finalize_ranks(const Ranks& ranks);
