// A model folder's config.json: Hugging Face's GPT-2 keys plus those of the wiring and `bias`. Plain GPT-2 is of the
// type "gpt2", which other programs know; another wiring is of the type "gpt2_sla", so that none takes it for plain
// GPT-2. The paper's num_skip_layer and num_skip_head are read as sla(n, k).
#pragma once
#include <optional>
#include <string>
#include <vector>
#include "config.h"
#include "llmc/utils/files.h"

// Reads FOLDER/config.json. A GPT-2 that says nothing of a wiring is plain. Throws UserError if there is no such file,
// it is not valid, or it describes something that this program does not compute.
ModelConfig read_config_json(const std::string& folder);

// The text of a model's config.json. end_of_text: the token that ends and begins texts, if the vocabulary is known.
std::string config_json(const ModelConfig& config, std::optional<int> end_of_text = {});

// What a model's folder holds beside its weights: config.json; generation_config.json, which tells transformers where
// to stop, if the vocabulary is known; and for another wiring than plain the modules in Python with which transformers
// loads the model, model/huggingface/.
std::vector<TextFile> model_text_files(const ModelConfig& config, std::optional<int> end_of_text = {});
