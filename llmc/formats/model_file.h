// The tensors of models on disk: safetensors with GPT-2's names. Files are full-size: K/V rows of unused heads are
// there, as zeros.
//
// A file of weights is Hugging Face's: linear weights as Conv1D (in, out), no lm_head where that is wte, and the biases
// of a model without any are zeros, so that any implementation of GPT-2 loads it. A file of moments (AdamW's m and v,
// Muon's momentum as m, as <name>.m and <name>.v) has linear weights as the arenas have them, (out, in): what a
// process's shard has of a tensor is one run of the file's elements, which it writes.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>
#include "llmc/ops/parameter_table.h"
#include "safetensors.h"

// Elements begin ... end - 1 of a parameter in the arena, and where they lie in a file's tensor: among elements first
// ... first + count - 1, with the zeros of unused heads.
struct FilePart {
  bool transposed;  // (in, out) in the file, (out, in) in the arena
  int64_t begin, end;
  int64_t first, count;
};

// Which part of the parameter `index` of the table a file holds. whole_weight: all of it, for a file of weights.
// own_moment: this process's shard, for a file of moments, with the rows of unused heads after it, and in the first
// shard those before it too. The parts of all shards, in their order, are the whole tensor.
FilePart whole_weight(const ParameterTable& table, int index);
FilePart own_moment(const ParameterTable& table, int index);

// full (part.count) = the part as the file holds it, from `values` (part.end - part.begin) as the arena does; and back.
void to_file_layout(const ParameterTable& table, int index, const FilePart& part, const float* values, float* full);
void from_file_layout(const ParameterTable& table, int index, const FilePart& part, const float* full, float* values);

// Copies a parameter or a constant to or from host memory: (its index, its elements in the arena's layout).
using FetchTensor = std::function<void(int index, float* values)>;
using StoreTensor = std::function<void(int index, const float* values)>;

// Writes the weights as float32. Returns the checksums of the bytes that were handed to the system: they are not read
// back from the disk.
SafetensorsChecksums write_weight_file(const std::string& path, const ParameterTable& table, const FetchTensor& fetch);

// Reads F32, F16 or BF16, from one file or from several that share the tensors out. Throws UserError, naming file and
// tensor, if one is missing, is there twice or has another shape, if a file holds a tensor that is no part of the
// model, an untied lm_head where it is tied, or non-zero biases for a model without any.
void read_weight_files(const std::vector<std::string>& paths, const ParameterTable& table, const StoreTensor& store);

// Some tensors of those files, in the order of `specs`. Throws UserError if one is missing or has another shape.
std::vector<std::vector<float>> read_tensors(const std::vector<std::string>& paths,
                                             const std::vector<SafetensorsSpec>& specs);

// A model folder's files of weights: model.safetensors, or those that its model.safetensors.index.json names, as
// Hugging Face splits large models. Throws UserError for an index that names none, or files elsewhere.
std::vector<std::string> weight_files(const std::string& folder);

// The tensors of a file of moments, in its order: every m, then every v.
std::vector<SafetensorsSpec> moment_specs(const ParameterTable& table);

// Makes that file, on disk and of full size, for the processes that then write their shards of it. Returns its header's
// checksum.
uint32_t lay_out_moment_file(const std::string& path, const ParameterTable& table);

// What a process has written of a tensor.
struct MomentPiece {
  int64_t count;      // elements; 0 of a tensor that has nothing in the shard
  uint32_t checksum;  // CRC-32C of their bytes, as handed to the system
};

// Writes this process's shard of m and v, host copies of arenas of state, and forces them to the disk. Returns the
// pieces in the order of moment_specs. Throws UserError.
std::vector<MomentPiece> write_moment_shard(const std::string& path, const ParameterTable& table, const float* m,
                                            const float* v);

// Reads this process's shard alone: `store_m` and `store_v` get (index, the values of that parameter in the shard), and
// are not called for a parameter that has nothing in it. Throws UserError like read_weight_files.
void read_moment_shard(const std::string& path, const ParameterTable& table, const StoreTensor& store_m,
                       const StoreTensor& store_v);
