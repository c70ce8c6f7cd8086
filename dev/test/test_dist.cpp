// Several ranks, each a process that mpirun starts with an emulated GPU of its own: what NCCL's stand-in does, and how the trainer trains
// on it. Runs from the repository's root, where build/emu_ranks and build/*/train_gpt2_sla_emu lie.
#include <gtest/gtest.h>   // TEST_F
#include <cstdlib>         // setenv
#include "command_line.h"  // CommandLine, read_log, steps_of, shard_bytes
#include "llmc/error.h"    // format

class Ranks : public CommandLine {
 protected:
  // More processes than cores, as root if need be, on one machine whose processes may not read each other's memory.
  static void SetUpTestSuite() {
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"}) setenv(name, "1", 1);
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
    setenv("SLA_EMU_NCCL_TIMEOUT", "60", 1);
  }
  Outcome run_ranks(int ranks, const std::string& command, const std::string& environment = "") const {
    return run(format("env %s timeout 300 mpirun --oversubscribe -np %d %s", environment.c_str(), ranks, command.c_str()));
  }
  void expect_death(int ranks, const std::string& name, const std::vector<std::string>& parts,
                    const std::string& environment = "") const {
    const Outcome o = run_ranks(ranks, "build/emu_ranks " + name, environment);
    EXPECT_NE(o.exit_status, 0) << name;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  }
};

// ----------------------------------------------------------------------------
// The emulated NCCL

using EmulatedNccl = Ranks;

TEST_F(EmulatedNccl, SumsInTheOrderOfRanksAndMovesWhatNcclMoves) {
  for (int ranks : {1, 2, 3}) {
    const Outcome o = run_ranks(ranks, "build/emu_ranks collectives");
    EXPECT_EQ(o.exit_status, 0) << ranks << "\n" << o.err;
  }
}

TEST_F(EmulatedNccl, MovesWhatLiesBetweenTensorsToo) {
  const Outcome o = run_ranks(2, "build/emu_ranks gaps");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

TEST_F(EmulatedNccl, MissesUnderSomeSeedWhatIsWrittenOnAnotherStreamWithoutAnEvent) {
  const Outcome o = run_ranks(2, "build/emu_ranks events");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

TEST_F(EmulatedNccl, NamesRanksThatCameForDifferentThings) {
  expect_death(2, "other_count", {"ncclAllReduce of 64 elements of type 7 on rank 0", "ncclAllReduce of 32 elements of type 7 on rank 1"});
  expect_death(2, "other_collective", {"ncclAllReduce of 1 elements", "ncclAllGather of 1 elements"});
  expect_death(2, "one_more", {"ncclAllReduce of 64 elements", "ncclCommDestroy"});
}

TEST_F(EmulatedNccl, NamesTheRankThatWaitsInVain) {
  expect_death(2, "stays_away", {"rank 0 of 2 has waited 1 s", "collective number 1, ncclAllReduce of 64 elements"}, "SLA_EMU_NCCL_TIMEOUT=1");
}

TEST_F(EmulatedNccl, ChecksRangesAndOverlaps) {
  expect_death(2, "overrun", {"what is sent", "has 260 bytes, 4 more than are left"});
  expect_death(2, "overlap", {"overlaps what is sent"});
  expect_death(2, "wrong_part", {"overlaps what is sent"});
  expect_death(2, "pending", {"1 collectives that have not run"});
}

TEST_F(EmulatedNccl, MakesNoCommunicatorOfRanksThatDoNotFitTogether) {
  expect_death(2, "wrong_size", {"for 3 ranks, but mpirun has started 2"});
  expect_death(2, "same_rank", {"nobody is rank 1 of 2"});
  expect_death(2, "other_id", {"have not the same id"});
  EXPECT_EQ(run_ranks(2, "build/emu_ranks same_gpu").exit_status, 0);
}
