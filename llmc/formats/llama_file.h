// Models of Llama's architecture, as Hugging Face's LlamaForCausalLM has them: models with the terms rmsnorm, rope and
// swiglu, with or without gqa and untied, and without biases. A folder has config.json and safetensors files.
#pragma once
#include <string>
#include "llmc/wiring/config.h"
#include "llmc/ops/parameter_table.h"

// Throws UserError, with what stands in the way, for a model that is not of that architecture.
void check_is_llama(const ModelConfig& config);

// Whether the folder's config.json is of the type "llama".
bool is_llama_folder(const std::string& folder);

// The model that a folder's config.json describes. Throws UserError for one that is not computed here.
ModelConfig read_llama_config(const std::string& folder);

std::string llama_config_json(const ModelConfig& config);

// The parameters of such a model by Llama's names: a view of `table`, a full-size one of that config, in whose arena
// they lie. q, k and v are parts of c_attn, the gate and the other product parts of c_fc.
ParameterTable llama_table(const ModelConfig& config, const ParameterTable& table);
