// Checkpoints: OUT/step_00001000/ with the model (model.safetensors, config.json and other small files of text, such as
// tokenizer.json), AdamW's m and v (optimizer.safetensors, as <name>.m and <name>.v, full-size, linear weights (out,
// in); see model_io.h) and the run's state (state.json). From the same values, any number of ranks writes the same
// bytes. A checkpoint is written under another name, synced, and renamed: a folder with its final name is complete. It
// is renamed before it is removed.
//
// state.json has a CRC-32C of everything in the other files, tensor by tensor, and of itself.
//
// Where the optimizer's state is sharded (ZeRO-1), each rank writes its own: rank 0 lays optimizer.safetensors out and
// tells the others to begin; they report what they wrote; rank 0 makes the tensors' checksums of theirs and gives the
// folder its name.
#pragma once
#include <cstdint>              // int64_t, uint64_t, INT64_MAX
#include <functional>           // std::function
#include <map>                  // std::map
#include <string>               // std::string
#include <vector>               // std::vector
#include "llmc/utils/files.h"   // TextFile
#include "llmc/utils/scalar.h"  // Scalar
#include "model_file.h"         // ParameterTable, FetchTensor, StoreTensor

// What a run needs, beside weights and moments, to resume with the bits of one that never stopped.
struct RunState {
  int64_t step = 0;              // steps done, skipped ones too
  int64_t next_sequence = 0;     // the data loader's position
  int64_t num_sequences = 0;     // in an epoch: tells other training data apart
  int64_t skipped_steps = 0;     // steps without an update: their loss or norm was not finite
  int64_t bad_steps_in_row = 0;  // the last so many steps were skipped
  // Options that must be the same in a run that is resumed, or whose change should be noticed; each is a member of
  // state.json beside those above. A file of an older version of this program may lack some.
  std::vector<std::pair<std::string, Scalar>> options = {};
};

// What a checkpoint is made of, in host memory or a copy away.
struct CheckpointContents {
  RunState state;
  std::vector<TextFile> files;  // config.json, and what else belongs to the model
  FetchTensor fetch_weight;
  const float *m, *v;  // this process's arenas of state
};

// How rank 0 talks to the ranks that write their shards beside it; empty where it has all of the state.
struct OtherRanks {
  std::function<void(bool begin)> tell;  // each of them, once: to write_checkpoint_shard, or that there is nothing to
                                         // write
  std::function<std::vector<std::string>()> reports;  // what write_checkpoint_shard returned on ranks 1, 2, ...; waits
                                                      // for it
};

// Rank 0: writes a checkpoint and returns its folder. Throws UserError with nothing left behind if a rank, which it
// names, cannot write, once no rank writes any more and each report has been taken.
std::string write_checkpoint(const std::string& out, const ParameterTable& table, const CheckpointContents& contents,
                             const OtherRanks& others = {});

// The other ranks, told to begin: writes this rank's shard of m and v. Returns its report: the pieces' lengths and
// checksums, by tensor, or "error: " and what went wrong. Throws nothing.
std::string write_checkpoint_shard(const std::string& out, int64_t step, const ParameterTable& table, const float* m,
                                   const float* v);

// The checkpoints in `out`: their folders, by step.
std::map<int64_t, std::string> checkpoints_in(const std::string& out);

// The newest checkpoint in `out` of a step before `before`, or "" if there is none.
std::string newest_checkpoint(const std::string& out, int64_t before = INT64_MAX);

// The step in a checkpoint's name. Throws UserError if `checkpoint` is not the path of one in `out`.
int64_t checkpoint_step(const std::string& out, const std::string& checkpoint);

// Removes all but the newest `keep` checkpoints and those of steps that `keep_every` divides; none if `keep` is 0.
// Throws UserError.
void remove_old_checkpoints(const std::string& out, int64_t keep, int64_t keep_every);

// Removes what a killed run left half-written or half-removed.
void remove_unfinished_checkpoints(const std::string& out);

// Renames the checkpoints after `step` to set_aside_..., which no function here takes for checkpoints. Returns the new
// paths.
std::vector<std::string> set_aside_checkpoints_after(const std::string& out, int64_t step);

// Throws UserError, naming the file and for tensors the tensor, if a byte of the checkpoint is not what was written.
void verify_checkpoint(const std::string& checkpoint);

// The checksum of state.json, which has those of all the rest: two checkpoints with the same one are the same. Throws
// UserError.
std::string checkpoint_checksum(const std::string& checkpoint);

RunState read_run_state(const std::string& checkpoint);
void read_weights(const std::string& folder, const ParameterTable& table, const StoreTensor& store_weight);
// This process's shard; see read_moment_shard.
void read_moments(const std::string& checkpoint, const ParameterTable& table, const StoreTensor& store_m,
                  const StoreTensor& store_v);
