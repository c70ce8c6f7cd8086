// GGUF, version 3, the format of ggml and llama.cpp (ggml-org/ggml, docs/gguf.md): metadata as typed keys, the list of
// tensors, and their values. A plain GPT-2 gets the keys and tensor names of llama.cpp's architecture "gpt2", a model
// of Llama's architecture the ones of "llama".
#pragma once
#include <string>
#include "llmc/wiring/config.h"
#include "llmc/formats/model_file.h"

enum class GgufType { fp32, bf16 };  // of matrices; vectors and positions are always fp32, as llama.cpp wants them

// Writes the model with its vocabulary, `tokenizer_json` as Tokenizer::to_json makes it; "": llama.cpp then takes and
// gives token ids alone. `table`: the model's for Hugging Face's GPT-2, llama_table's for others. Throws UserError if
// the name is taken, or the disk is full; then nothing is left.
void write_gguf_file(const std::string& path, const ModelConfig& config, const ParameterTable& table,
                     const FetchTensor& fetch, const std::string& tokenizer_json, GgufType type);
