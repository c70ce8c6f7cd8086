// data/convert: models from and to the files of other programs. IN is a model's folder (Hugging Face's GPT-2 format, in
// which the trainer saves, or its LlamaForCausalLM) or a model of llm.c; OUT's name says what is written: NAME.bin a
// model of llm.c, NAME.gguf one for llama.cpp, another a folder. And multiple-choice questions: from HellaSwag's
// NAME.jsonl to llm.c's NAME.bin.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/config_json.h"
#include "llmc/formats/gguf_file.h"
#include "llmc/formats/llama_file.h"
#include "llmc/formats/llmc_file.h"
#include "llmc/model/parameters.h"
#include "llmc/text/choice_file.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/command_line.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/meminfo.h"
#include "llmc/base/program.h"
#include "llmc/base/text.h"

struct Options {
  std::string in, out, tokenizer, type;
  bool llama = false;
};

// A model in host memory, full-size: with the rows of dead K/V.
struct HostModel {
  ModelConfig config;
  ParameterTable table;
  std::vector<float> values;   // of the table's layout, and after it the constants
  std::string tokenizer_json;  // "": the vocabulary is not known

  void allocate() {
    table = make_parameter_table(config, make_attention_plan(config, /*keep_dead=*/true));
    values.assign(table.layout.bytes / sizeof(float) + size_t(table.constant_count), 0.0f);
  }
  float* tensor(int index) {
    if (!table.is_constant(index)) return values.data() + table.tensor(index).element_offset();
    return values.data() + table.layout.bytes / sizeof(float) + table.constant(index).offset;
  }
  StoreTensor store() {
    return [this](int i, const float* from) { memcpy(tensor(i), from, size_t(table.elements(i)) * sizeof(float)); };
  }
  FetchTensor fetch() {
    return [this](int i, float* to) { memcpy(to, tensor(i), size_t(table.elements(i)) * sizeof(float)); };
  }
};

static HostModel read_model(const Options& o) {
  HostModel model;
  const bool from_folder = is_folder(o.in);
  if (!from_folder && !is_llmc_file(o.in)) user_error("%s: neither a model's folder nor a model of llm.c", o.in);
  const bool from_llama = from_folder && is_llama_folder(o.in);
  model.config = from_llama ? read_llama_config(o.in) : from_folder ? read_config_json(o.in) : read_llmc_config(o.in);
  check_parameters_fit(model.config, sizeof(float), "weights", host_memory_available(), "machine");
  model.allocate();
  if (from_llama) {
    const ParameterTable table = std::exchange(model.table, llama_table(model.config, model.table));
    read_weights(o.in, model.table, model.store());
    model.table = table;
  } else if (from_folder) read_weights(o.in, model.table, model.store());
  else read_llmc_weights(o.in, model.config, model.table, model.store());

  const auto tokenizer = Tokenizer::of_model(o.tokenizer, {from_folder ? o.in : ""}, model.config.vocab_size);
  if (!tokenizer) return model;
  model.tokenizer_json = tokenizer->to_json();
  if (tokenizer->is_assumed())
    printf("%s: has no vocabulary; as a model of 257 tokens it is written with that of bytes (--tokenizer names "
           "another)\n",
           o.in.c_str());
  const std::string said =
      take_end_of_text(model.config, tokenizer->end_of_text(), tokenizer->is_new_to(from_folder ? o.in : ""));
  if (!said.empty()) printf("%s: %s\n", o.in.c_str(), said.c_str());
  return model;
}

// Whether a file's name ends so, in capital letters or not.
static bool has_ending(const std::string& name, const std::string& end) {
  return name.size() > end.size() && strcasecmp(name.c_str() + name.size() - end.size(), end.c_str()) == 0;
}

static void write_folder(const std::string& path, HostModel& model, bool is_llama) {
  make_folders(parent_folder(path));
  NewFolder folder(path);
  write_weight_file(folder.unfinished() + "/model.safetensors", model.table, model.fetch());
  std::vector<TextFile> files = model_text_files(model.config, is_llama);
  for (TextFile& file : tokenizer_text_files(model.config, model.tokenizer_json)) files.push_back(std::move(file));
  for (const auto& [name, text] : files) write_file_in_unfinished_folder(folder.unfinished() + "/" + name, text);
  folder.finish();
}

// A line of HellaSwag: the text in "ctx", four or so in "endings", and the index of the right one in "label". As llm.c
// has it, the endings are encoded by themselves, after a space.
static ChoiceQuestion read_question(const std::string& line, Encoder& encoder) {
  const nlohmann::json json = parse_json_or_throw<nlohmann::json>(line);
  ChoiceQuestion question;
  question.right = int(whole_number(json.at("label"), "label", 0, UINT16_MAX));
  encoder.encode(json.at("ctx").get<std::string>(), question.context);
  for (const std::string ending : json.at("endings")) encoder.encode(" " + ending, question.answers.emplace_back());
  if (question.context.empty() || question.answers.size() < 2 || question.right >= int(question.answers.size()))
    user_error("ctx must be a text, endings two or more, and label the index of one");
  return question;
}

static void convert_questions(const Options& o) {
  if (o.tokenizer.empty()) user_error("%s: questions become tokens; name the vocabulary with --tokenizer", o.in);
  if (o.llama || !o.type.empty()) user_error("%s: questions have no weights; leave out --llama and --type", o.in);
  if (!has_ending(o.out, ".bin")) user_error("%s: a file of questions is NAME.bin", o.out);
  const Tokenizer tokenizer = Tokenizer::load(o.tokenizer);
  Encoder encoder(tokenizer);
  std::vector<ChoiceQuestion> questions;
  size_t number = 0;
  for (const std::string& line : lines_of(read_whole_file(o.in, most_text_bytes))) {
    number++;
    if (is_blank(line)) continue;
    try {
      questions.push_back(read_question(line, encoder));
    } catch (const std::exception& e) {
      user_error("%s: line %zu is no question of HellaSwag: %s", o.in, number, words_of(e));
    }
  }
  if (questions.empty()) user_error("%s: has no line", o.in);
  write_choice_file(o.out, questions);
  printf("%s: %zu questions\n", o.out.c_str(), questions.size());
}

static void convert_model(const Options& o) {
  const bool to_llmc = has_ending(o.out, ".bin"), to_gguf = has_ending(o.out, ".gguf"), is_bf16 = o.type == "bf16";
  if (!to_llmc && !to_gguf && is_bf16)
    user_error("--type bf16: a folder has float32 weights; it is for NAME.bin and NAME.gguf");
  if (o.llama && to_llmc) user_error("--llama: NAME.bin is a model of llm.c, which knows plain GPT-2 only");
  HostModel model = read_model(o);
  const int64_t num_parameters =
      make_parameter_table(model.config, make_attention_plan(model.config)).num_parameters;  // as the trainer counts
  if (o.llama || (to_gguf && !is_hugging_face_gpt2(model.config))) {
    check_is_llama(model.config);
    model.table = llama_table(model.config, model.table);
  }
  if (to_llmc)
    write_llmc_file(o.out, model.config, model.table, model.fetch(), is_bf16 ? LlmcType::bf16 : LlmcType::fp32);
  else if (to_gguf)
    write_gguf_file(o.out, model.config, model.table, model.fetch(), model.tokenizer_json,
                    is_bf16 ? GgufType::bf16 : GgufType::fp32);
  else write_folder(o.out, model, o.llama);
  const ModelConfig& c = model.config;
  printf("%s: %lld parameters, %d layers, %d heads, %d channels, vocabulary %d (%s), context length %d, wiring %s, "
         "%s\n",
         o.out.c_str(), (long long)num_parameters, c.num_layers, c.num_heads, c.channels, c.vocab_size,
         to_llmc                        ? "a file of its own in llm.c"
         : model.tokenizer_json.empty() ? "unknown"
                                        : "written with it",
         c.max_seq_len, c.wiring.text.c_str(), is_bf16 ? "bf16" : "float32");
  if (to_gguf && !c.whole_model().untied)
    printf("the embedding is its output head, too (no output.weight): llama.cpp of March 2025 or later loads that\n");
}

static int run_convert(int argc, char** argv) {
  Options o;
  CLI::App app("Models from and to the files of other programs, and multiple-choice questions.\n"
               "Example: data/convert gpt2_124M.bin models/gpt2; data/convert runs/plain/step_00002000 plain.gguf "
               "--type bf16");
  app.add_option("IN", o.in,
                 "a model's folder (config.json, model.safetensors), of GPT-2 or LlamaForCausalLM, or a model of llm.c "
                 "(version 3 or 5); or NAME.jsonl, questions like HellaSwag's")
      ->required();
  app.add_option("OUT", o.out,
                 "NAME.bin: a model or questions of llm.c; NAME.gguf: one for llama.cpp of March 2025 or "
                 "later; otherwise a folder. Must not exist")
      ->required();
  app.add_option("--tokenizer", o.tokenizer,
                 "the vocabulary to write with it, in any format that data/tokenize takes, or none; default: the "
                 "folder's");
  app.add_flag("--llama", o.llama,
               "write the folder as LlamaForCausalLM: of rmsnorm, rope and swiglu, with gqa and untied or without, and "
               "no biases");
  app.add_option("--type", o.type, "of weights in NAME.bin and NAME.gguf; bf16 rounds them")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->default_str("fp32");
  if (!parse_command_line(app, argc, argv)) return 0;
  if (o.out.empty()) user_error("OUT is empty; name a folder, NAME.bin or NAME.gguf");
  o.out = without_end_slashes(o.out);
  if (!has_ending(o.in, ".jsonl")) o.in = model_folder(o.in);
  check_free_name(o.out);
  interrupt_by_signals();
  has_ending(o.in, ".jsonl") ? convert_questions(o) : convert_model(o);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_convert(argc, argv); });
}
