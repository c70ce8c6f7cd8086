// Checkpoints: OUT/step_00001000/ with the model (config.json, model.safetensors), AdamW's m and v (optimizer.safetensors, as
// <name>.m and <name>.v in the model's full-size layout) and the run's state (state.json). A checkpoint is written under
// another name, synced, and renamed: a folder that bears its final name is complete. It is renamed away before it is removed.
//
// state.json has a CRC-32C of everything in the other files, tensor by tensor, and of itself.
#pragma once
#include <cstdint>     // int64_t, uint64_t, INT64_MAX
#include <string>      // std::string
#include <vector>      // std::vector
#include "model_io.h"  // ModelLayout, FetchTensor, StoreTensor

// What a run needs, beside weights and moments, to go on as if it had never stopped.
struct RunState {
  int64_t step = 0;               // steps done, skipped ones too
  int64_t next_window = 0;        // the data loader's position
  int64_t num_windows = 0;        // windows in an epoch: tells other training data apart
  int64_t seq_len = 0;            // T, the unit of the position
  bool shuffle = false;
  uint64_t seed = 0;
  int64_t skipped_steps = 0;      // steps without an update: their loss or norm was not finite
  int64_t bad_steps_in_row = 0;   // the last so many steps were skipped
};

// Throws UserError with nothing left behind if it cannot be written. Returns the folder.
std::string write_checkpoint(const std::string& out, const RunState& state, const ModelLayout& model,
                             const FetchTensor& fetch_weight, const FetchTensor& fetch_m, const FetchTensor& fetch_v);

// The newest checkpoint in `out` of a step before `before`, or "" if there is none.
std::string newest_checkpoint(const std::string& out, int64_t before = INT64_MAX);

// The step in a checkpoint's name. Throws UserError if `checkpoint` is not the path of one in `out`.
int64_t checkpoint_step(const std::string& out, const std::string& checkpoint);

// Removes all but the newest `keep` checkpoints and those of steps that `keep_every` divides; none if `keep` is 0. Throws UserError.
void remove_old_checkpoints(const std::string& out, int64_t keep, int64_t keep_every);

// Removes what a killed run left half-written or half-removed.
void remove_unfinished_checkpoints(const std::string& out);

// Gives the checkpoints after `step` names that nobody takes for checkpoints. Returns the new paths.
std::vector<std::string> set_aside_checkpoints_after(const std::string& out, int64_t step);

// Throws UserError, naming the file and for tensors the tensor, if a byte of the checkpoint is not as it was written.
void verify_checkpoint(const std::string& checkpoint);

// The checksum of state.json, which has those of all the rest: two checkpoints with the same one are the same. Throws UserError.
std::string checkpoint_checksum(const std::string& checkpoint);

RunState read_run_state(const std::string& checkpoint);
void read_weights(const std::string& folder, const ModelLayout& model, const StoreTensor& store_weight);
void read_moments(const std::string& checkpoint, const ModelLayout& model, const StoreTensor& store_m,
                  const StoreTensor& store_v);
