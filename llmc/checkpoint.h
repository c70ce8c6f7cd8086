// Checkpoints: OUT/step_00001000/ with the model (config.json, model.safetensors), AdamW's m and v (optimizer.safetensors, as
// <name>.m and <name>.v in the model's full-size layout) and the run's state (state.json). A checkpoint is written under
// another name, synced, and renamed: a folder that bears its final name is complete.
#pragma once
#include <cstdint>     // int64_t, uint64_t
#include <string>      // std::string
#include "model_io.h"  // ModelLayout, FetchTensor, StoreTensor

// What a run needs, beside weights and moments, to go on as if it had never stopped.
struct RunState {
  int64_t step = 0;          // updates done
  int64_t next_window = 0;   // the data loader's position
  int64_t num_windows = 0;   // windows in an epoch: tells other training data apart
  int64_t seq_len = 0;       // T, the unit of the position
  bool shuffle = false;
  uint64_t seed = 0;
};

// Throws UserError with nothing left behind if it cannot be written. Returns the folder.
std::string write_checkpoint(const std::string& out, const RunState& state, const ModelLayout& model,
                             const FetchTensor& fetch_weight, const FetchTensor& fetch_m, const FetchTensor& fetch_v);

// The newest checkpoint in `out`, or "" if there is none.
std::string newest_checkpoint(const std::string& out);

// Removes what a killed run left half-written.
void remove_unfinished_checkpoints(const std::string& out);

RunState read_run_state(const std::string& checkpoint);
void read_weights(const std::string& folder, const ModelLayout& model, const StoreTensor& store_weight);
void read_moments(const std::string& checkpoint, const ModelLayout& model, const StoreTensor& store_m,
                  const StoreTensor& store_v);
