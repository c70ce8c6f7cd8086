// llm.c's files of models, such as gpt2_124M.bin: a header of 256 int32 (20240326; the version, 3 for fp32 and 5 for
// bf16; the context length, V, L, h, C, and V padded to a multiple of 128), then the tensors, each of all layers
// together, linear weights as (out, in). As llm.c's train_gpt2.py writes and train_gpt2.cu reads them (karpathy/llm.c).
#pragma once
#include <string>
#include "llmc/wiring/config.h"
#include "llmc/formats/model_file.h"

enum class LlmcType { fp32, bf16 };

// Whether the file begins like one.
bool is_llmc_file(const std::string& path);

// The model that the header describes: plain GPT-2. Throws UserError for another version, an impossible shape, or a
// file that is shorter or longer than the header says.
ModelConfig read_llmc_config(const std::string& path);

// Hands every weight to `store`. `table`: that config's. Throws UserError if the file cannot be read.
void read_llmc_weights(const std::string& path, const ModelConfig& config, const ParameterTable& table,
                       const StoreTensor& store);

// Writes the file; bf16 values are rounded to the nearest. Throws UserError if the model is not plain, the name is
// taken, or the disk is full; then nothing is left.
void write_llmc_file(const std::string& path, const ModelConfig& config, const ParameterTable& table,
                     const FetchTensor& fetch, LlmcType type);
