// data/convert: models from and to the files of other programs. IN is a model's folder (Hugging Face's GPT-2 format, in
// which the trainer saves) or a model of llm.c; OUT's name says what is written: NAME.bin a model of llm.c, NAME.gguf
// one for llama.cpp, another a folder. And multiple-choice questions: from HellaSwag's NAME.jsonl to llm.c's NAME.bin.
#include <CLI/CLI.hpp>               // CLI::App
#include <csignal>                   // signal
#include <cstdio>                    // printf, fprintf
#include <cstring>                   // memcpy
#include <filesystem>                // is_directory, exists, remove_all
#include <new>                       // std::bad_alloc
#include <nlohmann/json.hpp>         // nlohmann::json
#include <sstream>                   // std::istringstream
#include "llmc/io/checkpoint.h"      // read_weights
#include "llmc/model/config_json.h"  // read_config_json, model_text_files
#include "llmc/model/gguf_file.h"    // write_gguf_file
#include "llmc/model/llmc_file.h"    // read_llmc_config, read_llmc_weights, write_llmc_file
#include "llmc/model/parameters.h"   // make_parameter_table
#include "llmc/text/choice_file.h"   // ChoiceQuestion, write_choice_file
#include "llmc/text/tokenizer.h"     // Tokenizer, Encoder
#include "llmc/utils/error.h"        // user_error, UserError
#include "llmc/utils/files.h"        // read_whole_file, write_file_durably, rename_durably

struct Options {
  std::string in, out, tokenizer, type;
};

// A model in host memory, full-size: with the rows of dead K/V.
struct HostModel {
  ModelConfig config;
  ParameterTable table;
  std::vector<float> values;   // of the table's layout
  std::string tokenizer_json;  // "": the vocabulary is not known

  void allocate() {
    table = make_parameter_table(config, make_attention_plan(config, /*keep_dead=*/true));
    values.assign(table.layout.bytes / sizeof(float), 0.0f);
  }
  float* tensor(int index) { return values.data() + table.tensor(index).element_offset(); }
  StoreTensor store() {
    return [this](int i, const float* from) { memcpy(tensor(i), from, table.tensor(i).bytes()); };
  }
  FetchTensor fetch() {
    return [this](int i, float* to) { memcpy(to, tensor(i), table.tensor(i).bytes()); };
  }
};

static HostModel read_model(const Options& o) {
  HostModel model;
  const bool is_folder = std::filesystem::is_directory(o.in);
  if (!is_folder && !is_llmc_file(o.in)) user_error("%s: neither a model's folder nor a model of llm.c", o.in.c_str());
  model.config = is_folder ? read_config_json(o.in) : read_llmc_config(o.in);
  model.allocate();
  if (is_folder) read_weights(o.in, model.table, model.store());
  else read_llmc_weights(o.in, model.config, model.table, model.store());

  const std::string vocabulary = !o.tokenizer.empty() ? o.tokenizer : is_folder ? Tokenizer::file_in(o.in) : "";
  if (vocabulary.empty()) return model;
  const Tokenizer tokenizer = Tokenizer::load(vocabulary);
  if (tokenizer.vocab_size() > model.config.vocab_size)
    user_error("%s has %d tokens, the model %d", vocabulary.c_str(), tokenizer.vocab_size(), model.config.vocab_size);
  model.tokenizer_json = tokenizer.to_json();
  return model;
}

static bool ends_with(const std::string& text, const std::string& end) {
  return text.size() > end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The folder is written under another name: one of this name is complete.
static void write_folder(const std::string& folder, HostModel& model) {
  const std::string temporary = folder + ".tmp";
  std::error_code ignored;
  std::filesystem::remove_all(temporary, ignored);  // what an interrupted run left
  make_folders(temporary);
  try {
    write_weight_file(temporary + "/model.safetensors", model.table, model.fetch());
    std::vector<TextFile> files = model_text_files(model.config);
    if (!model.tokenizer_json.empty()) files.push_back({"tokenizer.json", model.tokenizer_json});
    for (const auto& [name, text] : files) write_file_durably(temporary + "/" + name, text);
    rename_durably(temporary, folder);
  } catch (const UserError&) {
    std::filesystem::remove_all(temporary, ignored);
    throw;
  }
}

// A line of HellaSwag: the text in "ctx", four or so in "endings", and the index of the right one in "label". As llm.c
// has it, the endings are encoded by themselves, after a space.
static ChoiceQuestion read_question(const std::string& line, Encoder& encoder) {
  const nlohmann::json json = nlohmann::json::parse(line);
  ChoiceQuestion question;
  question.right = json.at("label");
  encoder.encode(json.at("ctx").get<std::string>(), question.context);
  for (const std::string ending : json.at("endings")) encoder.encode(" " + ending, question.answers.emplace_back());
  if (question.context.empty() || question.answers.size() < 2 || question.right < 0 ||
      question.right >= int(question.answers.size()))
    user_error("ctx must be a text, endings two or more, and label the index of one");
  return question;
}

static void convert_questions(const Options& o) {
  if (o.tokenizer.empty())
    user_error("%s: questions become tokens; name the vocabulary with --tokenizer", o.in.c_str());
  if (!ends_with(o.out, ".bin")) user_error("%s: a file of questions is NAME.bin", o.out.c_str());
  const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);
  Encoder encoder(tokenizer);
  std::vector<ChoiceQuestion> questions;
  std::istringstream lines(read_whole_file(o.in));
  for (std::string line; std::getline(lines, line);) {
    try {
      questions.push_back(read_question(line, encoder));
    } catch (const std::exception& e) {
      user_error("%s: line %zu is no question of HellaSwag: %s", o.in.c_str(), questions.size() + 1, e.what());
    }
  }
  if (questions.empty()) user_error("%s: has no line", o.in.c_str());
  write_choice_file(o.out, questions);
  printf("%s: %zu questions\n", o.out.c_str(), questions.size());
}

static void convert_model(const Options& o) {
  const bool to_llmc = ends_with(o.out, ".bin"), to_gguf = ends_with(o.out, ".gguf"), is_bf16 = o.type == "bf16";
  if (!to_llmc && !to_gguf && is_bf16)
    user_error("--type bf16: a folder has float32 weights; it is for NAME.bin and NAME.gguf");
  HostModel model = read_model(o);
  if (to_llmc)
    write_llmc_file(o.out, model.config, model.table, model.fetch(), is_bf16 ? LlmcType::bf16 : LlmcType::fp32);
  else if (to_gguf)
    write_gguf_file(o.out, model.config, model.table, model.fetch(), model.tokenizer_json,
                    is_bf16 ? GgufType::bf16 : GgufType::fp32);
  else write_folder(o.out, model);
  const ModelConfig& c = model.config;
  printf("%s: %lld parameters, %d layers, %d heads, %d channels, vocabulary %d (%s), context length %d, wiring %s, "
         "%s\n",
         o.out.c_str(), (long long)model.table.num_parameters, c.num_layers, c.num_heads, c.channels, c.vocab_size,
         to_llmc                        ? "a file of its own in llm.c"
         : model.tokenizer_json.empty() ? "unknown"
                                        : "written with it",
         c.max_seq_len, c.wiring.text.c_str(), is_bf16 ? "bf16" : "float32");
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Models from and to the files of other programs, and multiple-choice questions.\n"
               "Example: data/convert gpt2_124M.bin models/gpt2; data/convert runs/plain/step_00002000 plain.gguf "
               "--type bf16");
  app.add_option("IN", o.in,
                 "a model's folder (config.json, model.safetensors), or a model of llm.c (version 3 or 5); or "
                 "NAME.jsonl, questions like "
                 "HellaSwag's")
      ->required();
  app.add_option("OUT", o.out,
                 "NAME.bin: a model or questions of llm.c; NAME.gguf: one for llama.cpp; otherwise a folder. Must not "
                 "exist")
      ->required();
  app.add_option("--tokenizer", o.tokenizer,
                 "the vocabulary to write with it, in any format that data/tokenize takes; default: the folder's");
  app.add_option("--type", o.type, "of weights in NAME.bin and NAME.gguf; bf16 rounds them")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->default_val("fp32");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    fprintf(stderr, "error: %s; data/convert --help lists the options\n", e.what());
    return 1;
  }
  while (o.out.size() > 1 && o.out.back() == '/') o.out.pop_back();
  signal(SIGXFSZ, SIG_IGN);  // a file-size limit is then an error of write(), with a message and a clean exit
  try {
    if (std::filesystem::exists(o.out))
      user_error("%s: exists already; remove it, or choose another name", o.out.c_str());
    ends_with(o.in, ".jsonl") ? convert_questions(o) : convert_model(o);
  } catch (const UserError& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  } catch (const std::bad_alloc&) {
    fprintf(stderr, "error: out of memory: the model's weights take 4 bytes each\n");
    return 1;
  }
  return 0;
}
