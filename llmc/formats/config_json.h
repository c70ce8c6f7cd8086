// A model folder's config.json: Hugging Face's GPT-2 keys, the wiring's keys and `bias`. Plain GPT-2 has the
// type "gpt2", which other programs know; another wiring has the type "gpt2_sla", so that none takes it for plain
// GPT-2. The paper's num_skip_layer and num_skip_head are read as sla(n, k).
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>
#include "llmc/wiring/config.h"
#include "llmc/base/files.h"

// Reads FOLDER/config.json. A GPT-2 that says nothing of a wiring is plain. Throws UserError if there is no such file,
// it is not valid, or it describes something that this program does not compute.
ModelConfig read_config_json(const std::string& folder);

// Throws UserError for keys of any model_type that would make weights or function other than the shape says.
void refuse_other_function(const std::string& path, const nlohmann::ordered_json& config);

// The special tokens of a folder's config.json and generation_config.json; either file may lack any of them. Ids beyond
// the vocabulary count as none. Throws UserError for a value that is no id.
void read_special_tokens(const std::string& folder, ModelConfig& config);

// A vocabulary's end of text becomes the begin and the end of texts of a model that has no end. Where the vocabulary is
// new to the model it replaces the model's own, unless it is one of these: then the return value says so; it is ""
// otherwise.
std::string take_end_of_text(ModelConfig& config, int end_of_text, bool is_new);

// The special tokens as config.json, and with `is_generation` as generation_config.json has them, {"eos_token_id":
// ...}.
nlohmann::ordered_json special_tokens_json(const ModelConfig& config, bool is_generation);

// The text of a model's config.json.
std::string config_json(const ModelConfig& config);

// What a model's folder holds beside its weights: config.json; generation_config.json, which tells transformers where
// to stop, if that is known; and for another wiring than plain the modules in Python with which transformers
// loads the model, formats/huggingface/. is_llama: as LlamaForCausalLM (llama_file.h).
std::vector<TextFile> model_text_files(const ModelConfig& config, bool is_llama = false);

// The texts of tokenizer.json, a Tokenizer::to_json(), and of the tokenizer_config.json with which transformers'
// AutoTokenizer reads it: the model's special tokens by name. None for "".
std::vector<TextFile> tokenizer_text_files(const ModelConfig& config, const std::string& tokenizer_json);
