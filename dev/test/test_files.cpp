// What is read and written: models, checkpoints, the log, options.
#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>
#include "files.h"
#include "helpers.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/model_file.h"
#include "llmc/formats/safetensors.h"
#include "llmc/formats/config_json.h"
#include "llmc/model/parameters.h"
#include "llmc/base/json.h"
#include "llmc/text/tokenizer.h"
#include "llmc/train/evaluation.h"
#include "llmc/formats/llama_file.h"
#include "llmc/base/crc32c.h"

namespace fs = std::filesystem;

// ----------------------------------------------------------------------------
// Models on disk

TEST(Parameters, HaveNoDeadRowsAndLayOutFilesFullSize) {
  const ModelConfig config = make_config(4, 4, 8, 3, 3);  // layer 3 projects k and v of head 0 alone
  const AttentionPlan plan = make_attention_plan(config);
  const ParameterTable table = make_parameter_table(config, plan);
  for (size_t i = 0; i < table.specs.size(); i++) {
    const TensorSpec& tensor = table.layout.tensors[table.specs[i].tensor];
    if (tensor.name != "h.3.attn.c_attn.weight") continue;
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{8 + 2 * 2, 8}));
    EXPECT_EQ(table.specs[i].file_shape, (std::vector<int64_t>{8, 24}));
    std::vector<float> values(12 * 8), full(8 * 24, -1), back(12 * 8);
    for (size_t j = 0; j < values.size(); j++) values[j] = float(j + 1);
    to_file_layout(table, int(i), whole_weight(table, int(i)), values.data(), full.data());
    // Rows of the arena are columns of the file: q 0-7; k of head 0 at 8, 9; v of head 0 at 16, 17.
    const std::map<int, int> column_of_row = {{0, 0}, {7, 7}, {8, 8}, {9, 9}, {10, 16}, {11, 17}};
    for (auto [row, column] : column_of_row)
      for (int in = 0; in < 8; in++) EXPECT_EQ(full[in * 24 + column], float(row * 8 + in + 1));
    for (int column : {10, 15, 18, 23}) EXPECT_EQ(full[5 * 24 + column], 0.0f) << "dead rows are zeros in files";
    from_file_layout(table, int(i), whole_weight(table, int(i)), full.data(), back.data());
    EXPECT_EQ(back, values);

    // In a file of moments they are its rows.
    EXPECT_EQ(moment_specs(table)[i].name, "h.3.attn.c_attn.weight.m");
    EXPECT_EQ(moment_specs(table)[i].shape, (std::vector<int64_t>{24, 8}));
    full.assign(full.size(), -1);
    to_file_layout(table, int(i), own_moment(table, int(i)), values.data(), full.data());
    for (auto [row, file_row] : column_of_row)
      for (int in = 0; in < 8; in++) EXPECT_EQ(full[file_row * 8 + in], float(row * 8 + in + 1));
    for (int row : {10, 15, 18, 23}) EXPECT_EQ(full[row * 8 + 5], 0.0f) << "dead rows are zeros in files";
    return;
  }
  FAIL() << "no c_attn";
}

struct DiskModel {
  ModelConfig config = make_config(3, 2, 8, 2, 1);
  AttentionPlan plan;
  ParameterTable table;
  explicit DiskModel(bool bias = true, int channels = 8, bool keep_dead_kv = false, Shard shard = {}) {
    config.vocab_size = 11, config.max_seq_len = 5, config.bias = bias, config.channels = channels;
    plan = make_attention_plan(config, keep_dead_kv);
    table = make_parameter_table(config, plan, shard);
  }
  int64_t elements(int index) const { return table.elements(index); }
  FetchTensor fetch(float start) const {
    return [this, start](int index, float* values) {
      for (int64_t i = 0; i < elements(index); i++) values[i] = start + float(index) + float(i) / 1024;
    };
  }
  // The part of the values of fetch(start) in this process's shard, in an arena of state with NaN in its gaps.
  std::vector<float> state(float start) const {
    std::vector<float> arena(size_t(table.state_count), NAN), values;
    for (size_t i = 0; i < table.specs.size(); i++) {
      values.resize(size_t(elements(int(i))));
      fetch(start)(int(i), values.data());
      const ShardRange part = shard_range(table, table.specs[i]);
      const int64_t first = part.begin - table.layout.tensors[table.specs[i].tensor].element_offset();
      if (part.count > 0) std::copy_n(values.data() + first, part.count, arena.data() + part.state);
    }
    return arena;
  }
  std::string write(const std::string& out, const RunState& state_of_run, const OtherShards& others = {}) const {
    const std::vector<float> m = state(2), v = state(3);
    return write_checkpoint(out, table,
                            {state_of_run,
                             {{"config.json", config_json(config)}, {"tokenizer.json", "{}\n"}},
                             fetch(1),
                             m.data(),
                             v.data(),
                             memory},
                            others);
  }
  std::vector<CheckpointTensor> memory = {};
};

TEST(ModelOnDisk, ComesBackWithMasksIgnoredAndPrefixesStripped) {
  TemporaryFolder folder;
  const DiskModel model;
  const std::string path = folder.path + "/model.safetensors";
  write_weight_file(path, model.table, model.fetch(1));
  // Writes the tensors again, under the names that GPT-2 has on the hub.
  SafetensorsFile file(path);
  std::vector<SafetensorsSpec> specs;
  for (const SafetensorsTensor& tensor : file.tensors()) specs.push_back({"transformer." + tensor.name, tensor.shape});
  specs.push_back({"transformer.h.0.attn.bias", {1, 1, 5, 5}});
  specs.push_back({"lm_head.weight", {11, 8}});
  SafetensorsWriter writer(folder.path + "/hub.safetensors", specs);
  for (size_t i = 0; i + 2 < specs.size(); i++) {
    std::vector<float> values(size_t(file.tensors()[i].num_elements()));
    file.read_f32(file.tensors()[i], values.data());
    writer.write_f32(i, values.data(), 0, int64_t(values.size()));
    if (file.tensors()[i].name == "wte.weight")
      writer.write_f32(specs.size() - 1, values.data(), 0, int64_t(values.size()));
  }
  writer.finish();
  for (const char* name : {"/model.safetensors", "/hub.safetensors"}) {
    int seen = 0;
    read_weight_files({folder.path + name}, model.table, [&](int index, const float* values) {
      std::vector<float> expected(size_t(model.elements(index)));
      model.fetch(1)(index, expected.data());
      EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
      seen++;
    });
    EXPECT_EQ(seen, int(model.table.specs.size()));
  }
}

// The rotations of `lsh` are in a file of weights, whole, and in none of moments.
TEST(ModelOnDisk, HasItsConstants) {
  TemporaryFolder folder;
  DiskModel model;
  model.config.wiring = parse_wiring("lsh(6,2)");
  model.plan = make_attention_plan(model.config), model.table = make_parameter_table(model.config, model.plan);
  ASSERT_EQ(model.table.constants.size(), 3u);
  EXPECT_EQ(model.table.constant(model.table.size() + 1).name, "h.1.attn.rotations");
  EXPECT_EQ(model.table.constants[1].shape, (std::vector<int64_t>{2, 2, 4, 3}));
  const std::string path = folder.path + "/model.safetensors";
  write_weight_file(path, model.table, model.fetch(1));
  int seen = 0;
  read_weight_files({path}, model.table, [&](int index, const float* values) {
    std::vector<float> expected(size_t(model.elements(index)));
    model.fetch(1)(index, expected.data());
    EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected) << index;
    seen++;
  });
  EXPECT_EQ(seen, model.table.file_tensors());
  EXPECT_EQ(moment_specs(model.table).size(), 2 * model.table.specs.size());
  model.config.wiring = parse_wiring("lsh(6,3)");
  const ParameterTable other = make_parameter_table(model.config, make_attention_plan(model.config));
  EXPECT_ERROR(read_weight_files({path}, other, [](int, const float*) {}), "tensor h.0.attn.rotations has shape (2, 2, "
                                                                           "4, 3); by its config.json it is (2, 3, 4, "
                                                                           "3)");
}

// Reads a model from several files with an index, as Hugging Face splits large models.
TEST(ModelOnDisk, ComesBackFromSeveralFilesWithAnIndex) {
  TemporaryFolder folder;
  const DiskModel model;
  write_weight_file(folder.path + "/whole", model.table, model.fetch(1));
  SafetensorsFile whole(folder.path + "/whole");
  const std::vector<SafetensorsTensor>& tensors = whole.tensors();
  const size_t half = tensors.size() / 2;
  nlohmann::json index;
  auto write_half = [&](const std::string& name, size_t begin, size_t end) {
    std::vector<SafetensorsSpec> specs;
    for (size_t i = begin; i < end; i++)
      specs.push_back({tensors[i].name, tensors[i].shape}), index["weight_map"][tensors[i].name] = name;
    SafetensorsWriter writer(folder.path + "/" + name, specs);
    for (size_t i = begin; i < end; i++) {
      std::vector<float> values(size_t(tensors[i].num_elements()));
      whole.read_f32(tensors[i], values.data());
      writer.write_f32(i - begin, values.data(), 0, int64_t(values.size()));
    }
    writer.finish();
  };
  write_half("model-00001-of-00002.safetensors", 0, half);
  write_half("model-00002-of-00002.safetensors", half, tensors.size());
  const std::string index_path = folder.path + "/model.safetensors.index.json";
  write_file(index_path, index.dump());

  int seen = 0;
  read_weight_files(weight_files(folder.path), model.table, [&](int i, const float* values) {
    std::vector<float> expected(size_t(model.elements(i)));
    model.fetch(1)(i, expected.data());
    EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
    seen++;
  });
  EXPECT_EQ(seen, int(model.table.specs.size()));

  auto nothing = [](int, const float*) {};
  write_half("model-00002-of-00002.safetensors", half - 1, tensors.size());
  EXPECT_ERROR(read_weight_files(weight_files(folder.path), model.table, nothing), "is in this file twice, or in "
                                                                                   "another one too");
  std::filesystem::remove(folder.path + "/model-00002-of-00002.safetensors");
  EXPECT_ERROR(read_weight_files(weight_files(folder.path), model.table, nothing), "model-00002-of-00002.safetensors");
  for (const char* text : {"{}", "[]", "{\"weight_map\":{\"wte.weight\":\"../other.safetensors\"}}",
                           "{\"weight_map\":{\"wte.weight\":3}}"}) {
    write_file(index_path, text);
    EXPECT_ERROR(weight_files(folder.path), "has no weight_map of tensors and files beside it");
  }
}

TEST(ModelOnDisk, WithoutBiasesHoldsZerosForThemAndRefusesOthers) {
  TemporaryFolder folder;
  const DiskModel model(/*bias=*/false);
  const std::string path = folder.path + "/model.safetensors";
  auto nothing = [](int, const float*) {};
  write_weight_file(path, model.table, model.fetch(1));
  ASSERT_NE(read_file(path).find("\"h.2.mlp.c_fc.bias\""), std::string::npos);
  EXPECT_EQ(SafetensorsFile(path).tensors().size(), 4u + 12 * 3);
  EXPECT_EQ(error_of([&] { read_weight_files({path}, model.table, nothing); }), "");

  const DiskModel with_biases;
  write_weight_file(path, with_biases.table, with_biases.fetch(1));
  EXPECT_ERROR(read_weight_files({path}, model.table, nothing), "is not zero, but config.json says \"bias\": false");
}

TEST(ModelOnDisk, RefusesMissingMisshapenAndForeignTensors) {
  TemporaryFolder folder;
  const DiskModel model;
  const std::string path = folder.path + "/model.safetensors";
  auto nothing = [](int, const float*) {};
  auto write_with = [&](const std::string& name, std::vector<int64_t> shape, bool without = false) {
    write_weight_file(path, model.table, model.fetch(1));
    std::vector<SafetensorsSpec> specs;
    {
      SafetensorsFile file(path);
      for (const SafetensorsTensor& tensor : file.tensors())
        if (tensor.name != name) specs.push_back({tensor.name, tensor.shape});
    }
    if (!without) specs.push_back({name, shape});
    SafetensorsWriter(path, specs).finish();
  };
  write_with("h.1.mlp.c_proj.weight", {}, /*without=*/true);
  EXPECT_ERROR(read_weight_files({path}, model.table, nothing), "tensor h.1.mlp.c_proj.weight is missing");
  write_with("h.1.mlp.c_proj.weight", {8, 32});
  EXPECT_ERROR(read_weight_files({path}, model.table, nothing), "has shape (8, 32); by its config.json it is (32, 8)");
  write_with("h.3.ln_1.weight", {8});
  EXPECT_ERROR(read_weight_files({path}, model.table, nothing), "tensor h.3.ln_1.weight is no part of this model");
  write_with("lm_head.weight", {11, 8});
  SafetensorsWriter writer = SafetensorsWriter::attach(path);
  const std::vector<float> ones(88, 1.0f);
  writer.write_f32(model.table.specs.size(), ones.data(), 0, 88);
  writer.finish();
  EXPECT_ERROR(read_weight_files({path}, model.table, nothing), "lm_head.weight is not wte.weight");
}

TEST(ConfigJson, ComesBackAsItWas) {
  TemporaryFolder folder;
  ModelConfig c = make_config(5, 2, 8, 3, 1);
  c.bias = false, c.vocab_size = 257, c.max_seq_len = 77, c.layer_norm_eps = 3e-6;
  std::ofstream(folder.path + "/config.json") << config_json(c);
  const ModelConfig back = read_config_json(folder.path);
  EXPECT_EQ(back.num_layers, 5);
  EXPECT_EQ(back.vocab_size, 257);
  EXPECT_EQ(back.max_seq_len, 77);
  EXPECT_EQ(back.wiring.text, "sla(3,1)");
  EXPECT_EQ(back.layer_norm_eps, 3e-6);
  EXPECT_FALSE(back.bias);
}

// transformers takes a config.json of type "gpt2" for plain GPT-2, whatever else it says.
TEST(ConfigJson, OfAWiringNamesTheModulesThatLoadIt) {
  ModelConfig c = make_config(4, 2, 8, 2, 1);
  auto files_of = [&] {
    std::map<std::string, std::string> files;
    for (const TextFile& file : model_text_files(c)) files[file.name] = file.text;
    return files;
  };
  std::map<std::string, std::string> files = files_of();
  const nlohmann::json config = nlohmann::json::parse(files.at("config.json"));
  EXPECT_EQ(config.at("model_type"), "gpt2_sla");
  for (const auto& [key, module] : config.at("auto_map").items()) {
    const std::string text = module, file = text.substr(0, text.find('.')) + ".py",
                      name = text.substr(text.find('.') + 1);
    EXPECT_NE(files.at(file).find("class " + name), std::string::npos) << key;
  }
  for (const char* name : {"gpt2_sla.py", "configuration_gpt2_sla.py", "modeling_gpt2_sla.py"})
    EXPECT_EQ(files.at(name), read_file(std::string("llmc/formats/huggingface/") + name));
  c.wiring = Wiring();
  files = files_of();
  EXPECT_EQ(files.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(files.at("config.json")).at("model_type"), "gpt2");
}

// Where neither file names an end of text, transformers takes token 50256 for it.
TEST(ConfigJson, NamesTheEndOfTextWhereTheVocabularyIsKnown) {
  ModelConfig c = make_config(4, 2, 8, 2, 1);
  c.vocab_size = 257;
  EXPECT_TRUE(nlohmann::json::parse(config_json(c)).at("eos_token_id").is_null());
  EXPECT_EQ(take_end_of_text(c, 256, /*is_new=*/true), "") << "the model had none";
  const std::vector<TextFile> files = model_text_files(c);
  for (int file : {0, 1}) {
    const nlohmann::json config = nlohmann::json::parse(files[file].text);
    EXPECT_EQ(files[file].name, file == 0 ? "config.json" : "generation_config.json");
    for (const char* key : {"bos_token_id", "eos_token_id"}) EXPECT_EQ(config.at(key), 256) << files[file].name;
  }
  c.vocab_size = 50257, c.special = {};
  EXPECT_FALSE(nlohmann::json::parse(config_json(c)).contains("eos_token_id"));
}

TEST(ConfigJson, OfGpt2IsPlainAndOfOtherModelsRefused) {
  TemporaryFolder folder;
  auto config_with = [&](const char* key, nlohmann::json value) {
    nlohmann::json j = {{"n_layer", 12},
                        {"n_head", 12},
                        {"n_embd", 768},
                        {"n_positions", 1024},
                        {"vocab_size", 50257},
                        {"attn_pdrop", 0.1},
                        {"activation_function", "gelu_new"}};
    if (key != nullptr) j[key] = std::move(value);
    std::ofstream(folder.path + "/config.json") << j;
    return read_config_json(folder.path);
  };
  EXPECT_TRUE(config_with(nullptr, {}).wiring.is_plain());
  EXPECT_TRUE(config_with(nullptr, {}).bias);
  EXPECT_ERROR(config_with("activation_function", "relu"), "activation_function is \"relu\"");
  EXPECT_ERROR(config_with("n_inner", 1000), "n_inner");
  EXPECT_ERROR(config_with("tie_word_embeddings", false), "tie_word_embeddings");
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
    EXPECT_ERROR(config_with(key, true), key);
  EXPECT_ERROR(config_with("quantization_config", {{"bits", 4}}), "quantization_config");
  EXPECT_ERROR(config_with("pruned_heads", {{"0", {1}}}), "pruned_heads");
  config_with("pruned_heads", nlohmann::json::object());
  config_with("reorder_and_upcast_attn", true);  // the same function, rounded otherwise
  EXPECT_ERROR(config_with("model_type", "mistral"), "model_type is \"mistral\"; only gpt2 and gpt2_sla are known");
  EXPECT_ERROR(config_with("model_type", "llama"), "convert it first: data/convert " + folder.path + " NEW_FOLDER");
  EXPECT_ERROR(config_with("scale_attn_weights", false), "scale_attn_weights");
  EXPECT_ERROR(config_with("n_layer", "twelve"), "\"n_layer\" is \"twelve\"");
  EXPECT_ERROR(config_with("n_layer", -3), "\"n_layer\" is -3");
  EXPECT_ERROR(config_with("n_head", 7), "7 heads do not divide 768 channels");
  std::ofstream(folder.path + "/config.json") << "{\"n_layer\": 12";
  EXPECT_ERROR(read_config_json(folder.path), "config.json: is JSON that is cut short; make the file again");
  EXPECT_ERROR(read_config_json(folder.path + "/nowhere"), "cannot be read");
}

using JsonFile = FolderTest;

TEST_F(JsonFile, ANumberBeyondADoubleIsNamedWithItsFileAndLine) {
  const std::string number = "{\n \"text\": \"a b\",\n \"n\": 1e999\n}\n", is_huge = "has the number 1e999",
                    in_line_3 = is_huge + " in its line 3, which no floating-point number holds";
  EXPECT_EQ(why_no_json(number), in_line_3);
  EXPECT_EQ(why_no_json("{\"a\": -1e400}"), "has the number -1e400, which no floating-point number holds");
  EXPECT_EQ(why_no_json("{\"a\": 1e-400}"), "");
  write("config.json", number), write("tokenizer.json", number), write("model.safetensors.index.json", number);
  EXPECT_ERROR(read_config_json(folder), in("config.json") + ": " + in_line_3);
  EXPECT_ERROR(read_llama_config(folder), in("config.json") + ": " + in_line_3);
  EXPECT_ERROR(weight_files(folder), "model.safetensors.index.json: " + in_line_3);
  EXPECT_ERROR(Tokenizer::load(in("tokenizer.json")), in("tokenizer.json") + ": " + in_line_3);
  EXPECT_ERROR(read_last_words(write("w", "{\"text\": \"a b\"}\n{\"text\": 1e999}\n")),
               in("w") + ": line 2 " + is_huge);
  EXPECT_ERROR(parse_serve_request("{\"loglikelihood\": [1e999]}"), "it " + is_huge);
  EXPECT_ERROR(parse_serve_request("{\"loglikelihood_rolling\": [5]}"), "item 1 (\"5\"): type must be string");
}

TEST(ConfigJson, KeepsTheDropoutOfTheRun) {
  TemporaryFolder folder;
  ModelConfig c;
  c.attn_pdrop = 0.1, c.embd_pdrop = 0.2, c.resid_pdrop = 0.3;
  auto read_again = [&](nlohmann::json json) {
    std::ofstream(folder.path + "/config.json") << json;
    return read_config_json(folder.path);
  };
  nlohmann::json json = nlohmann::json::parse(config_json(c));
  const ModelConfig same = read_again(json);
  EXPECT_EQ(same.attn_pdrop, 0.1);
  EXPECT_EQ(same.embd_pdrop, 0.2);
  EXPECT_EQ(same.resid_pdrop, 0.3);
  EXPECT_TRUE(same_model(same, ModelConfig()));  // it is the same function
  json.erase("attn_pdrop");
  EXPECT_EQ(read_again(json).attn_pdrop, 0);
  json["resid_pdrop"] = 1;
  EXPECT_ERROR(read_again(json), "\"resid_pdrop\" is 1; it must be a share");
}

TEST(Checkpoint, IsFoundByItsStepAndComesBackWhole) {
  TemporaryFolder folder;
  const DiskModel model;
  EXPECT_EQ(newest_checkpoint(folder.path), "");
  const std::vector<std::pair<std::string, Scalar>> options = {{"seed", int64_t(123456789012345)},
                                                               {"shuffle", true},
                                                               {"learning_rate", 1e-310},
                                                               {"optimizer", std::string("a")}};
  for (int64_t step : {9, 1000, 200}) {
    const RunState state = {step, 3 * step, 77, 8, 2, options};
    model.write(folder.path, state);
  }
  fs::create_directories(folder.path + "/unfinished_step_00002000");
  fs::create_directories(folder.path + "/step_of_another_kind");
  const std::string newest = newest_checkpoint(folder.path);
  EXPECT_EQ(newest, folder.path + "/step_00001000");
  EXPECT_EQ(newest_checkpoint(folder.path, 1000), folder.path + "/step_00000200");
  EXPECT_EQ(newest_checkpoint(folder.path, 9), "");
  EXPECT_EQ(checkpoint_step(folder.path,
                            folder.path + "/../" + fs::path(folder.path).filename().string() + "/step_00000200/"),
            200);
  EXPECT_ERROR(checkpoint_step(folder.path, folder.path + "/step_of_another_kind"), "is not a checkpoint in");
  EXPECT_ERROR(model.write(folder.path + "/gone", {9, 27, 77}), "/gone: is no longer there");
  EXPECT_FALSE(fs::exists(folder.path + "/gone")) << "a folder that was renamed meanwhile";
  remove_unfinished_checkpoints(folder.path);
  EXPECT_FALSE(fs::exists(folder.path + "/unfinished_step_00002000"));
  EXPECT_TRUE(fs::exists(folder.path + "/step_of_another_kind"));

  EXPECT_ERROR(read_run_state(model.write(folder.path, {2000, int64_t(1) << 60, 77})), "holds an impossible state");
  const RunState state = read_run_state(newest);
  EXPECT_EQ(state.step, 1000);
  EXPECT_EQ(state.next_sequence, 3000);
  EXPECT_EQ(state.num_sequences, 77);
  EXPECT_EQ(state.options, options);
  EXPECT_EQ(state.skipped_steps, 8);
  EXPECT_EQ(state.bad_steps_in_row, 2);
  auto expect_values = [&](float start) {
    return [&model, start](int index, const float* values) {
      std::vector<float> expected(size_t(model.elements(index)));
      model.fetch(start)(index, expected.data());
      EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
    };
  };
  read_weights(newest, model.table, expect_values(1));
  read_moments(newest, model.table, expect_values(2), expect_values(3));
  std::ofstream(newest + "/state.json") << "{\"format\": 1}";
  EXPECT_ERROR(read_run_state(newest), "state.json: is damaged, or of another version of this program");
}

// ----------------------------------------------------------------------------
// Ranks that write their shards

// The ranks of a run: rank 0 and, when it has laid the checkpoint out, a thread for each of the others.
struct WritingRanks {
  std::deque<DiskModel> models;
  std::vector<std::string> outs;                         // the output folder as each of them sees it
  std::function<void()> before_weights = [] {};          // is called on rank 0 while the others write
  std::function<void(std::vector<std::string>&)> alter;  // the reports, before rank 0 reads them
  std::vector<std::string> errors;                       // of the other ranks

  WritingRanks(const std::string& out, int count, bool bias = true, bool keep_dead_kv = false,
               bool whole_matrices = false)
      : outs(size_t(count), out) {
    for (int rank = 0; rank < count; rank++)
      models.emplace_back(bias, /*channels=*/20, keep_dead_kv, Shard{rank, count, whole_matrices});
  }

  // Rank 0's error, if there is one.
  std::string write(int64_t step) {
    const std::string unfinished = outs[0] + format("/unfinished_step_%08d", int(step));
    std::vector<std::future<std::string>> parts;
    auto begin = [&] {
      for (size_t rank = 1; rank < models.size(); rank++)
        parts.push_back(std::async(std::launch::async, [this, rank, step] {
          const DiskModel& model = models[rank];
          std::this_thread::sleep_for(std::chrono::milliseconds(2 * rank));
          return error_of([&] {
            write_checkpoint_shard(outs[rank], step, model.table, model.state(2).data(), model.state(3).data());
          });
        }));
    };
    auto are_written = [&] {
      if (parts.empty()) return true;
      EXPECT_TRUE(fs::exists(unfinished)) << "another rank could still have written to it";
      for (std::future<std::string>& part : parts)
        if (part.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
      errors.clear();
      for (std::future<std::string>& part : parts) errors.push_back(part.get());
      parts.clear();
      if (!alter) return true;
      std::vector<std::string> reports;
      const auto path = [&](size_t rank) { return unfinished + format("/rank_%zu.json", rank); };
      for (size_t rank = 1; rank < models.size(); rank++) reports.push_back(read_file(path(rank)));
      alter(reports);
      for (size_t rank = 1; rank < models.size(); rank++) write_file(path(rank), reports[rank - 1]);
      return true;
    };
    auto fetch = [this](int index, float* values) {
      before_weights();
      models[0].fetch(1)(index, values);
    };
    return error_of([&] {
      const RunState state = {step, 1, 2};
      const std::vector<float> m = models[0].state(2), v = models[0].state(3);
      OtherShards others;
      if (models.size() > 1) others = {lay_out_checkpoint(outs[0], step, models[0].table), are_written}, begin();
      write_checkpoint(outs[0], models[0].table,
                       {state, {{"config.json", config_json(models[0].config)}}, fetch, m.data(), v.data()}, others);
    });
  }
};

// All of a checkpoint, by file.
static std::map<std::string, std::string> files_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename()] = read_file(entry.path());
  return files;
}

static const std::vector<Shard> shards_of_rank_0 = {{0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 7}, {0, 3, true}, {0, 7, true}};

TEST(Shard, OfAnyNumberOfRanksWriteTheSameFiles) {
  for (bool bias : {true, false}) {
    for (bool keep_dead_kv : {true, false}) {
      TemporaryFolder folder;
      std::map<std::string, std::string> whole;
      const std::string checkpoint = folder.path + "/step_00000007";
      for (const Shard& shard : shards_of_rank_0) {
        SCOPED_TRACE(format("%d ranks, %s, %s, %s", shard.count, bias ? "biases" : "no biases",
                            keep_dead_kv ? "dead K/V" : "no dead K/V",
                            shard.whole_matrices ? "whole matrices" : "equal parts"));
        fs::remove_all(checkpoint);
        ASSERT_EQ(WritingRanks(folder.path, shard.count, bias, keep_dead_kv, shard.whole_matrices).write(7), "");
        EXPECT_EQ(error_of([&] { verify_checkpoint(checkpoint); }), "");
        if (shard.count == 1) whole = files_in(checkpoint);
        EXPECT_EQ(whole.size(), 4u);
        for (const auto& [name, text] : files_in(checkpoint)) EXPECT_TRUE(whole.at(name) == text) << name;
      }
      for (Shard shard : shards_of_rank_0) {
        for (shard.index = 0; shard.index < shard.count; shard.index++) {
          const DiskModel model(bias, 20, keep_dead_kv, shard);
          std::vector<float> m(model.state(2).size(), NAN), v(m.size(), NAN);
          auto store_to = [&](std::vector<float>& arena) -> StoreTensor {
            return [&](int index, const float* values) {
              const ShardRange part = shard_range(model.table, model.table.specs[index]);
              std::copy_n(values, part.count, arena.data() + part.state);
            };
          };
          read_moments(checkpoint, model.table, store_to(m), store_to(v));
          for (const auto& [found, start] : {std::pair(&m, 2.0f), {&v, 3.0f}})
            EXPECT_EQ(memcmp(found->data(), model.state(start).data(), m.size() * sizeof(float)), 0)
                << shard.index << " of " << shard.count;
        }
      }
    }
  }
}

TEST(Shard, ThatCannotBeWrittenEndTheCheckpointNamingTheRank) {
  TemporaryFolder folder;
  WritingRanks ranks(folder.path, 4);
  ASSERT_EQ(ranks.write(1), "");
  const auto older = files_in(folder.path + "/step_00000001");
  auto expect_error = [&](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(part), std::string::npos) << "the message is: \"" << error << "\"";
    EXPECT_EQ(names_in(folder.path), (std::set<std::string>{"step_00000001"}));
    EXPECT_TRUE(files_in(folder.path + "/step_00000001") == older);
  };
  for (size_t rank : {1, 2, 3}) {
    ranks.outs[rank] = folder.path + "/nowhere";
    expect_error(ranks.write(2), format("rank %zu could not write its shard of %s/unfinished_step_00000002", rank,
                                        folder.path.c_str()));
    EXPECT_EQ(ranks.errors[rank - 1], folder.path + "/nowhere/unfinished_step_00000002/optimizer.safetensors: no such "
                                                    "file");
    ranks.outs[rank] = folder.path;
  }
  // Rank 0 itself: while the others write, and before they are told to.
  ranks.before_weights = [] { user_error("rank 0's disk is full"); };
  expect_error(ranks.write(2), "rank 0's disk is full");
  ranks.before_weights = [] {};
  std::ofstream(folder.path + "/unfinished_step_00000002") << "in the way";
  expect_error(ranks.write(2), "unfinished_step_00000002: the folder cannot be made");

  ASSERT_EQ(ranks.write(2), "");
  EXPECT_EQ(error_of([&] { verify_checkpoint(folder.path + "/step_00000002"); }), "");
}

TEST(Shard, WhoseReportsAreNotOfThemAreRefused) {
  TemporaryFolder folder;
  WritingRanks ranks(folder.path, 3);
  using Json = nlohmann::ordered_json;
  auto with_report = [&](std::function<void(Json&)> change) {  // of rank 2
    ranks.alter = [change](std::vector<std::string>& reports) {
      Json report = Json::parse(reports[1]);
      change(report);
      reports[1] = report.dump();
    };
    const std::string error = ranks.write(5);
    EXPECT_EQ(names_in(folder.path), std::set<std::string>{}) << error;
    return error;
  };
  const std::string tensor = "h.1.mlp.c_proj.weight.v";
  auto wrong_piece = [&](Json piece) {
    const std::string error = with_report([&](Json& report) { report["pieces"][tensor] = piece; });
    EXPECT_NE(error.find("rank 2 reports " + piece.dump() + " for tensor " + tensor), std::string::npos) << error;
  };
  int64_t count = 0;
  const std::string stale = with_report([&](Json& report) {
    count = report["pieces"][tensor][0];
    report["step"] = 4;
  });
  EXPECT_NE(stale.find("rank 2 reports on step 4, not on 5"), std::string::npos) << stale;
  ASSERT_GT(count, 0);
  wrong_piece({count + 1, 5});
  wrong_piece({0, 5});
  wrong_piece({count, 1ll << 32});
  wrong_piece({count, -1});
  wrong_piece({count, 5, 5});
  const std::vector<std::function<void(Json&)>> omissions = {[](Json& report) { report.erase("step"); },
                                                             [](Json& report) { report.erase("pieces"); },
                                                             [&](Json& report) { report["pieces"].erase(tensor); },
                                                             [&](Json& report) { report["pieces"][tensor].erase(1); }};
  for (const auto& omit : omissions) {
    const std::string error = with_report(omit);
    EXPECT_NE(error.find("rank 2 did not report what it wrote"), std::string::npos) << error;
  }
  for (const char* report : {"", "[]", "{\"step\": 5, \"pieces\": {\"wte.weight.m\": [1"}) {
    ranks.alter = [&](std::vector<std::string>& reports) { reports[0] = report; };
    EXPECT_NE(ranks.write(5).find("rank 1 did not report what it wrote"), std::string::npos) << report;
  }
  ranks.alter = [](std::vector<std::string>& reports) { std::swap(reports[0], reports[1]); };
  EXPECT_NE(ranks.write(5).find("rank 1 reports "), std::string::npos);
  EXPECT_EQ(names_in(folder.path), std::set<std::string>{});

  // What a rank says to have written and the disk does not have is found like any damage.
  ranks.alter = [&](std::vector<std::string>& reports) {
    Json report = Json::parse(reports[1]);
    report["pieces"][tensor][1] = report["pieces"][tensor][1].get<uint32_t>() ^ 1;
    reports[1] = report.dump();
  };
  EXPECT_EQ(ranks.write(5), "");
  EXPECT_ERROR(verify_checkpoint(folder.path + "/step_00000005"), "tensor " + tensor + " is damaged");
}

// ----------------------------------------------------------------------------
// Damage

TEST(Crc32c, IsTheStandardsByInstructionAndByTableInPiecesOfAnyLength) {
  std::string ascending(32, '\0'), text(1000, '\0');
  for (int i = 0; i < 32; i++) ascending[i] = char(i);
  // RFC 3720, B.4, and the check value of the catalogues.
  const std::map<std::string, uint32_t> known = {{std::string(32, '\0'), 0x8a9136aau},
                                                 {std::string(32, '\xff'), 0x62a8ab43u},
                                                 {ascending, 0x46dd794eu},
                                                 {"123456789", 0xe3069283u},
                                                 {"", 0}};
  for (const auto& [bytes, crc] : known) {
    EXPECT_EQ(crc32c(bytes.data(), bytes.size()), crc);
    EXPECT_EQ(crc32c_by_table(bytes.data(), bytes.size()), crc);
  }
  for (size_t i = 0; i < text.size(); i++) text[i] = char(i * i * 7 + i / 3);
  const uint32_t whole = crc32c(text.data(), text.size());
  for (size_t cut = 0; cut <= text.size(); cut++) {
    EXPECT_EQ(crc32c(text.data() + cut, text.size() - cut, crc32c(text.data(), cut)), whole);
    EXPECT_EQ(crc32c_by_table(text.data() + cut, text.size() - cut, crc32c_by_table(text.data(), cut)), whole);
  }
}

TEST(Crc32c, OfTwoPiecesTogetherIsMadeOfThoseOfEach) {
  std::string text(100000, '\0');
  std::mt19937 random(1);
  for (char& c : text) c = char(random());
  for (int i = 0; i < 2000; i++) {
    const size_t end = i < 20 ? size_t(i) : random() % (text.size() + 1), begin = i % 7 == 0 ? 0 : random() % (end + 1);
    const size_t cut = i % 5 == 0 ? begin : i % 5 == 1 ? end : begin + random() % (end - begin + 1);
    const uint32_t a = crc32c(text.data() + begin, cut - begin), b = crc32c(text.data() + cut, end - cut);
    ASSERT_EQ(crc32c_combine(a, b, end - cut), crc32c(text.data() + begin, end - begin))
        << begin << " " << cut << " " << end;
  }
  // 8 GiB of zeros, by the MiB and by doubling: a length that does not fit into 32 bits.
  const std::string zeros(1 << 20, '\0');
  const uint32_t mebibyte = crc32c(zeros.data(), zeros.size());
  uint32_t added = 0, doubled = mebibyte;
  for (int i = 0; i < 8192; i++) added = crc32c_combine(added, mebibyte, zeros.size());
  for (int i = 0; i < 13; i++) doubled = crc32c_combine(doubled, doubled, uint64_t(zeros.size()) << i);
  EXPECT_EQ(doubled, added);
}

TEST(Checkpoint, WithAFlippedByteIsRefusedNamingFileAndTensor) {
  TemporaryFolder folder;
  DiskModel model(/*bias=*/false);  // with tensors that are not written
  for (const char* name : {"h.0.memory", "h.2.memory"})
    model.memory.push_back({name, {2, 5, 8}, std::vector<float>(80, name[2] == '2' ? 0.5f : 3)});
  const std::string checkpoint = model.write(folder.path, {7, 1, 2});
  EXPECT_EQ(error_of([&] { verify_checkpoint(checkpoint); }), "");
  const std::vector<CheckpointTensor> memory = read_memory(checkpoint);
  ASSERT_EQ(memory.size(), 2u);
  for (size_t i = 0; i < 2; i++)
    EXPECT_TRUE(memory[i].name == model.memory[i].name && memory[i].shape == model.memory[i].shape &&
                memory[i].values == model.memory[i].values);
  int flips = 0;
  std::set<std::string> damaged;
  for (const char* name : {"config.json", "tokenizer.json", "state.json", "model.safetensors", "optimizer.safetensors",
                           "memory.safetensors"}) {
    const std::string path = checkpoint + "/" + name, whole = read_file(path);
    const bool is_safetensors = std::string(name).find(".safetensors") != std::string::npos;
    const size_t header = is_safetensors ? SafetensorsFile(path).data_offset() : whole.size();
    for (size_t at = 0; at < whole.size(); at += at >= header ? 101 : header < 1000 ? 1 : 11) {
      std::string flipped = whole;
      flipped[at] = char(flipped[at] ^ 1 << flips++ % 8);
      std::ofstream(path, std::ios::binary) << flipped;
      const std::string message = error_of([&] { verify_checkpoint(checkpoint); });
      ASSERT_EQ(message.compare(0, path.size(), path), 0)
          << "byte " << at << " of " << name << ": \"" << message << "\"";
      if (at < header) continue;
      std::string expected;
      const SafetensorsFile file(path);
      for (const SafetensorsTensor& t : file.tensors())
        if (t.begin <= at - header && at - header < t.end) expected = t.name;
      ASSERT_NE(message.find(": tensor " + expected + " is damaged"), std::string::npos) << message;
      damaged.insert(expected);
    }
    std::ofstream(path, std::ios::binary) << whole;
  }
  EXPECT_GT(flips, 1500);
  EXPECT_TRUE(damaged.count("wte.weight") && damaged.count("h.2.mlp.c_fc.bias") &&
              damaged.count("h.1.attn.c_attn.weight.v") && damaged.count("h.2.memory"));
  EXPECT_EQ(error_of([&] { verify_checkpoint(checkpoint); }), "");
  for (const char* name : {"tokenizer.json", "config.json"}) {
    fs::remove(checkpoint + "/" + name);
    EXPECT_ERROR(verify_checkpoint(checkpoint), std::string(name) + ": cannot be read");
  }
}

TEST(Checkpoint, OfAModelWithoutAVocabularyHasNone) {
  TemporaryFolder folder;
  const DiskModel model;
  const std::vector<float> m = model.state(2), v = model.state(3);
  const std::string checkpoint =
      write_checkpoint(folder.path, model.table,
                       {{7, 1, 2}, model_text_files(model.config), model.fetch(1), m.data(), v.data()});
  EXPECT_FALSE(fs::exists(checkpoint + "/tokenizer.json"));
  EXPECT_EQ(error_of([&] { verify_checkpoint(checkpoint); }), "");
}

// ----------------------------------------------------------------------------
// Which checkpoints stay

static void make_checkpoint_folders(const std::string& out, const std::vector<int>& steps) {
  for (int step : steps) {
    fs::create_directories(out + format("/step_%08d", step));
    std::ofstream(out + format("/step_%08d/state.json", step)) << "{}";
  }
}

TEST(OldCheckpoints, GoAndTheNewestAndMilestonesStay) {
  TemporaryFolder folder;
  make_checkpoint_folders(folder.path, {2, 4, 6, 10, 12, 20, 22});
  std::ofstream(folder.path + "/log.jsonl") << "";
  remove_old_checkpoints(folder.path, 0, 10);
  EXPECT_EQ(names_in(folder.path).size(), 8u) << "0 keeps all";
  remove_old_checkpoints(folder.path, 7, 0);
  EXPECT_EQ(names_in(folder.path).size(), 8u);
  remove_old_checkpoints(folder.path, 3, 6);
  EXPECT_EQ(names_in(folder.path),
            (std::set<std::string>{"log.jsonl", "step_00000006", "step_00000012", "step_00000020", "step_00000022"}));
  remove_old_checkpoints(folder.path, 1, 0);
  EXPECT_EQ(names_in(folder.path), (std::set<std::string>{"log.jsonl", "step_00000022"}));
}

TEST(OldCheckpoints, AreRenamedBeforeRemovalAndRemainsAreRemoved) {
  TemporaryFolder folder;
  make_checkpoint_folders(folder.path, {0, 1, 2});
  std::ofstream(folder.path + "/removed_step_00000000") << "in the way";
  EXPECT_ERROR(remove_old_checkpoints(folder.path, 1, 0), "removed_step_00000000: cannot be put in place");
  EXPECT_TRUE(fs::exists(folder.path + "/step_00000000/state.json")) << "it cannot be renamed, so it stays whole";
  EXPECT_FALSE(fs::exists(folder.path + "/step_00000001")) << "others go";
  fs::remove(folder.path + "/removed_step_00000000");
  fs::rename(folder.path + "/step_00000000", folder.path + "/step_00000001");
  fs::rename(folder.path + "/step_00000001", folder.path + "/removed_step_00000001");  // killed there
  EXPECT_EQ(newest_checkpoint(folder.path, 2), "");
  remove_unfinished_checkpoints(folder.path);
  EXPECT_EQ(names_in(folder.path), (std::set<std::string>{"step_00000002"}));
}

// What the program has not made: other names, no state, links, files.
TEST(OldCheckpoints, AreNoFoldersOfAUser) {
  TemporaryFolder folder;
  make_checkpoint_folders(folder.path, {2, 3});
  fs::create_directory_symlink("step_00000003", folder.path + "/step_00000000");
  for (const char* name : {"step_5", "step_00000001", "removed_step_x", "unfinished_step_00000004.old"})
    fs::create_directory(folder.path + "/" + name);
  std::ofstream(folder.path + "/step_5/state.json") << "{}";
  std::ofstream(folder.path + "/unfinished_step_00000005") << "";
  std::set<std::string> names = names_in(folder.path);
  remove_unfinished_checkpoints(folder.path);
  remove_old_checkpoints(folder.path, 2, 0);
  EXPECT_EQ(names_in(folder.path), names);
  remove_old_checkpoints(folder.path, 1, 0);
  names.erase("step_00000002");
  EXPECT_EQ(names_in(folder.path), names);
}

TEST(Checkpoints, AreSetAsideUnderNamesOfTheirOwn) {
  TemporaryFolder folder;
  for (int again = 0; again < 2; again++) {
    make_checkpoint_folders(folder.path, {1, 2, 3});
    EXPECT_EQ(set_aside_checkpoints_after(folder.path, 2).size(), 1u);
    EXPECT_EQ(newest_checkpoint(folder.path), folder.path + "/step_00000002");
  }
  EXPECT_EQ(names_in(folder.path), (std::set<std::string>{"set_aside_step_00000003", "set_aside_step_00000003.1",
                                                          "step_00000001", "step_00000002"}));
}
