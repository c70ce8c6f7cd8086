// A model folder's config.json: Hugging Face's GPT-2 keys plus num_skip_layer, num_skip_head and bias.
#pragma once
#include <string>    // std::string
#include "config.h"  // ModelConfig

// Reads FOLDER/config.json. A GPT-2 that says nothing of skips has none. Throws UserError if there is no such file, it is not
// valid, or it describes something that this program does not compute.
ModelConfig read_config_json(const std::string& folder);

// Returns the text. Throws UserError if it cannot be written.
std::string write_config_json(const std::string& path, const ModelConfig& config);
