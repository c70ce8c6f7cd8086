// The operands of Muon's operations, the same for every device. All pointers are device pointers.
#pragma once
#include <cstdint>
#include "adamw.h"
#include "muon.h"
#include "precision.h"
#include "step_stats.h"

struct MuonArgs {
  floatX* params;                // an arena of all parameters, as are grads
  float* grads;                  // gradients; from muon_momentum on u
  float *master, *m;             // arenas of state; master is not used if floatX is float
  const ParameterChunk* chunks;  // of the matrices
  int64_t num_chunks;
  const MuonMatrix* matrices;
  int64_t num_matrices;
  double* squares;  // (num_matrices): ||u||^2 of each
  MuonStep* step;   // (1)
  const StepStats* sums;
};
