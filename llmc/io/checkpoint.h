// Checkpoints: OUT/step_00001000/ with the model (config.json, model.safetensors, and tokenizer.json if its vocabulary is known), AdamW's m
// and v (optimizer.safetensors, as <name>.m and <name>.v, full-size, linear weights (out, in); see model_io.h) and the run's state
// (state.json). Nothing in it depends on the number of ranks that wrote it. A checkpoint is written under another name, synced, and
// renamed: a folder that bears its final name is complete. It is renamed away before it is removed.
//
// state.json has a CRC-32C of everything in the other files, tensor by tensor, and of itself.
//
// Where ranks have slices of the optimizer's state, each writes its own: rank 0 lays optimizer.safetensors out and tells the others to
// begin; they report what they wrote; rank 0 makes the tensors' checksums of theirs and gives the folder its name.
#pragma once
#include <cstdint>     // int64_t, uint64_t, INT64_MAX
#include <functional>  // std::function
#include <string>      // std::string
#include <vector>      // std::vector
#include "model_io.h"  // ModelLayout, FetchTensor, StoreTensor

// What a run needs, beside weights and moments, to go on as if it had never stopped.
struct RunState {
  int64_t step = 0;               // steps done, skipped ones too
  int64_t next_sequence = 0;        // the data loader's position
  int64_t num_sequences = 0;        // windows in an epoch: tells other training data apart
  int64_t seq_len = 0;            // T, the unit of the position
  bool shuffle = false;
  uint64_t seed = 0;
  int64_t skipped_steps = 0;      // steps without an update: their loss or norm was not finite
  int64_t bad_steps_in_row = 0;   // the last so many steps were skipped
};

// Rank 0's way to the ranks that write slices beside it; empty where it has all of the state.
struct OtherRanks {
  std::function<void(bool begin)> tell;                // each of them, once: to write_checkpoint_part, or that there is nothing to write
  std::function<std::vector<std::string>()> reports;   // what write_checkpoint_part returned on ranks 1, 2, ...; waits for it
};

// Rank 0: writes a checkpoint and returns its folder. `m` and `v`: host copies of this process's arenas of state; `tokenizer`: the text of
// tokenizer.json, or "". Throws UserError with nothing left behind if somebody, whom it names, cannot write, when no rank writes any more
// and each report has been taken.
std::string write_checkpoint(const std::string& out, const RunState& state, const ModelLayout& model, const FetchTensor& fetch_weight,
                             const float* m, const float* v, const OtherRanks& others = {}, const std::string& tokenizer = "");

// The others, told to begin: writes this rank's slices of m and v. Returns its report: the pieces' lengths and checksums, by tensor, or
// "error: " and what went wrong. Throws nothing.
std::string write_checkpoint_part(const std::string& out, int64_t step, const ModelLayout& model, const float* m, const float* v);

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
// Of this process's slices; see read_moment_shard.
void read_moments(const std::string& checkpoint, const ModelLayout& model, const StoreTensor& store_m, const StoreTensor& store_v);
