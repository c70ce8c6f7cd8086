// Checkpoints: OUT/step_00001000/ with the model (model.safetensors, config.json and other small files of text, such as
// tokenizer.json), AdamW's m and v (optimizer.safetensors, as <name>.m and <name>.v, full-size, linear weights (out,
// in); see model_file.h) and the run's state (state.json). From the same values, any number of ranks writes the same
// bytes. A checkpoint is written under another name, synced, and renamed: a folder with its final name is complete.
// Removal renames it first.
//
// A model that is trained with a memory of earlier segments has that in memory.safetensors, for each stream of text.
// There are as many streams as all ranks have rows.
//
// state.json has a CRC-32C of everything in the other files, tensor by tensor, and of itself.
//
// Where the optimizer's state is sharded (ZeRO-1), rank 0 lays optimizer.safetensors out; then each rank writes its own
// shard, and a report of it, rank_3.json, from which rank 0 computes the tensors' checksums before it gives the folder
// its name.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>
#include "llmc/base/files.h"
#include "llmc/base/scalar.h"
#include "model_file.h"

// What a run needs, beside weights and moments, to resume with the bits of one that never stopped.
struct RunState {
  int64_t step = 0;              // steps done, skipped ones too
  int64_t next_sequence = 0;     // the data loader's position
  int64_t num_sequences = 0;     // sequences in an epoch: detects other training data
  int64_t skipped_steps = 0;     // steps without an update: their loss or norm was not finite
  int64_t bad_steps_in_row = 0;  // the last so many steps were skipped
  // Options that must be the same in a run that is resumed, or whose change should be noticed; each is a member of
  // state.json beside those above. A file of an older version of this program may lack some.
  std::vector<std::pair<std::string, Scalar>> options = {};
  int64_t loss_scale = 0, good_updates = 0;  // in fp16, of the next step; else 0
};

struct CheckpointTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// What a checkpoint is made of: values in host memory, and weights that fetch_weight copies there.
struct CheckpointContents {
  RunState state;
  std::vector<TextFile> files;  // config.json, and what else belongs to the model
  FetchTensor fetch_weight;
  const float *m, *v;  // this process's shard of AdamW's moments
  // (streams, positions, C) each; none where the streams begin, and in models without memory.
  std::vector<CheckpointTensor> memory = {};
};

// The shards that other ranks write beside rank 0's.
struct OtherShards {
  uint32_t header = 0;                  // what lay_out_checkpoint returned
  std::function<bool()> are_written{};  // whether each has been written, or has failed; empty: there are none
};

// Called by rank 0 where the state has several shards, before any of them is written: makes the checkpoint's folder,
// and in it the file of moments, on the disk. Returns the checksum of that file's header. Throws UserError; nothing of
// the folder remains then.
uint32_t lay_out_checkpoint(const std::string& out, int64_t step, const ParameterTable& table);

// Called by rank 0: writes a checkpoint, waits for the other shards, and returns the folder. If one was not written,
// throws a UserError that names the rank; no part of the checkpoint remains then.
std::string write_checkpoint(const std::string& out, const ParameterTable& table, const CheckpointContents& contents,
                             const OtherShards& others = {});

// Called by ranks 1, 2, ... when rank 0 has laid the checkpoint out: writes this rank's shard of m and v, and its
// report: the lengths and checksums of the pieces, by tensor. Throws UserError.
void write_checkpoint_shard(const std::string& out, int64_t step, const ParameterTable& table, const float* m,
                            const float* v);

// The checkpoints in `out`: their folders, by step.
std::map<int64_t, std::string> checkpoints_in(const std::string& out);

// The newest checkpoint in `out` of a step before `before`, or "" if there is none.
std::string newest_checkpoint(const std::string& out, int64_t before = INT64_MAX);

// The folder of the model that a user names: `path` itself or, where that is a run's folder, its newest checkpoint,
// which a line on stderr says.
std::string model_folder(const std::string& path);

// What a model's folder has, and what its run has beside it: files that no other output may replace.
std::vector<std::string> files_of_model(const std::string& folder);

// The step in a checkpoint's name. Throws UserError if `checkpoint` is not the path of one in `out`.
int64_t checkpoint_step(const std::string& out, const std::string& checkpoint);

// Removes all checkpoints but the newest `keep` and the ones at steps that `keep_every` divides; nothing if `keep` is
// 0. What is no checkpoint of this program's, and links, stay and do not count. If one cannot be removed the others
// are, and then a UserError is thrown.
void remove_old_checkpoints(const std::string& out, int64_t keep, int64_t keep_every);

// Removes what a killed run left half-written or half-removed.
void remove_unfinished_checkpoints(const std::string& out);

// Renames the checkpoints after `step` to set_aside_..., which no function here takes for checkpoints. Returns the new
// paths.
std::vector<std::string> set_aside_checkpoints_after(const std::string& out, int64_t step);

// Throws UserError, naming the file and for tensors the tensor, if a byte of the checkpoint is not what was written.
void verify_checkpoint(const std::string& checkpoint);

// As verify_checkpoint, but only for the files that make it a model: all but moments and memory, or without weights the
// texts alone. Does nothing for a folder that is no checkpoint, which has no checksums.
void verify_model(const std::string& folder, bool with_weights = true);

// The checksum of state.json, which has the checksums of all other files: two checkpoints with the same one are the
// same. Throws UserError.
std::string checkpoint_checksum(const std::string& checkpoint);

// The CRC-32C of the weights in a model's folder. Throws UserError.
uint32_t weights_checksum(const std::string& folder);

RunState read_run_state(const std::string& checkpoint);
// Hands the weights in a model's folder to store_weight, once verify_model has found nothing.
void read_weights(const std::string& folder, const ParameterTable& table, const StoreTensor& store_weight);
// Reads this process's shard of m and v; see read_moment_shard in model_file.h.
void read_moments(const std::string& checkpoint, const ParameterTable& table, const StoreTensor& store_m,
                  const StoreTensor& store_v);
// CheckpointContents::memory. Throws UserError.
std::vector<CheckpointTensor> read_memory(const std::string& checkpoint);
