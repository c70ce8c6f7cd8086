// The small parts: shapes, wiring, layout, random numbers, schedules, sampling, models on disk, the log.
#include <gtest/gtest.h>          // TEST
#include <filesystem>             // create_directories, remove_all
#include <fstream>                // std::ifstream, std::ofstream
#include <map>                    // std::map
#include <nlohmann/json.hpp>      // nlohmann::json
#include <set>                    // std::set
#include "llmc/arena.h"           // ArenaLayout
#include "llmc/checkpoint.h"      // write_checkpoint, newest_checkpoint
#include "llmc/config.h"          // ModelConfig
#include "llmc/kv_plan.h"         // make_kv_plan
#include "llmc/logger.h"          // RunLog
#include "llmc/model_io.h"        // read_config_json, read_tensors
#include "llmc/options.h"         // parse_options
#include "llmc/parameters.h"      // make_parameter_table
#include "llmc/random.h"          // philox
#include "llmc/safetensors.h"     // SafetensorsWriter
#include "llmc/sampler.h"         // sample_token
#include "llmc/schedule.h"        // Schedule

namespace fs = std::filesystem;

// A folder that lives as long as the test.
struct TemporaryFolder {
  std::string path;
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "gpt2_sla_test_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) abort();
    path = name;
  }
  ~TemporaryFolder() { fs::remove_all(path); }
};

static std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The message of the UserError that `f` throws; "" if it throws none.
template <class F>
static std::string error_of(F f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_ERROR(statement, part)                                                             \
  do {                                                                                            \
    std::string message = error_of([&] { statement; });                                           \
    EXPECT_NE(message.find(part), std::string::npos) << "the message is: \"" << message << "\"";  \
  } while (0)

static ModelConfig make_config(int L, int h, int C, int n_l, int n_h) {
  ModelConfig c;
  c.num_layers = L, c.num_heads = h, c.channels = C, c.num_skip_layer = n_l, c.num_skip_head = n_h;
  return c;
}

// ----------------------------------------------------------------------------
// Config

TEST(Config, PresetsAreGpt2AndGpt3) {
  ModelConfig c;
  ASSERT_TRUE(config_from_preset("d36", c));
  EXPECT_EQ(c.num_layers, 36);
  EXPECT_EQ(c.num_heads, 20);
  EXPECT_EQ(c.channels, 1280);
  EXPECT_EQ(c.max_seq_len, 1024);
  EXPECT_EQ(c.num_skip_layer, 27);
  EXPECT_EQ(c.num_skip_head, 15);
  for (const char* name : {"d12", "d24", "d36", "d48", "gpt3:384", "gpt3:768", "gpt3:1024", "gpt3:1536", "gpt3:2048", "gpt3:2560",
                           "gpt3:4096", "gpt3:5120", "gpt3:12288"}) {
    ASSERT_TRUE(config_from_preset(name, c)) << name;
    EXPECT_EQ(error_of([&] { validate(c); }), "") << name;
    EXPECT_EQ(c.num_skip_layer, c.num_layers * 3 / 4) << name;
  }
  EXPECT_FALSE(config_from_preset("d13", c));
  EXPECT_FALSE(config_from_preset("gpt3:", c));
}

TEST(Config, RefusesWhatIsNoModel) {
  EXPECT_ERROR(validate(make_config(12, 12, 770, 9, 9)), "12 heads do not divide 770 channels");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 0, 9)), "--skip-layers 0");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 12, 9)), "--skip-layers 12");
  EXPECT_ERROR(validate(make_config(12, 12, 768, -1, 9)), "--skip-layers -1");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 9, 13)), "--skip-heads 13");
  EXPECT_ERROR(validate(make_config(12, 12, 768, 9, -1)), "--skip-heads -1");
  EXPECT_ERROR(validate(make_config(0, 12, 768, 0, 0)), "--layers");
  EXPECT_ERROR(validate(make_config(1, 12, 768, 1, 1)), "--skip-layers 1");
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 99, 0)); }), "") << "without skip heads any n_l is plain GPT-2";
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 11, 12)); }), "");
}

// ----------------------------------------------------------------------------
// The K/V plan, against the design's sentences, one by one

static void check_plan(int L, int h, int n_l, int n_h) {
  SCOPED_TRACE(format("L %d, h %d, n_l %d, n_h %d", L, h, n_l, n_h));
  const KVPlan plan = make_kv_plan(make_config(L, h, h, n_l, n_h));
  for (int l = 0; l < L; l++) {
    std::set<int> readers_seen;
    for (int i = 0; i < h; i++) {
      const bool borrows = i >= h - n_h && l >= n_l;
      EXPECT_EQ(plan.source_of(l, i).layer, borrows ? l - n_l : l);
      EXPECT_EQ(plan.source_of(l, i).head, i);
      const bool dead = i >= h - n_h && l >= n_l && l + n_l >= L;
      EXPECT_EQ(plan.projected_index({l, i}) < 0, n_h > 0 && dead);
      EXPECT_EQ(plan.lent_index({l, i}) >= 0, n_h > 0 && i >= h - n_h && l + n_l < L);
    }
    for (const KVRead& read : plan.reads[l]) {
      for (int head : read.heads) {
        EXPECT_TRUE(readers_seen.insert(head).second) << "a head reads one pair";
        EXPECT_EQ(plan.source_of(l, head).layer, read.pair.layer);
        EXPECT_EQ(plan.source_of(l, head).head, read.pair.head);
      }
      const bool a_higher_layer_reads_it = read.pair.layer == l && plan.lent_index(read.pair) >= 0;
      EXPECT_EQ(read.accumulate, a_higher_layer_reads_it);
      EXPECT_GE(plan.projected_index(read.pair), 0) << "nobody reads what is not projected";
    }
    EXPECT_EQ(int(readers_seen.size()), h);
    EXPECT_TRUE(plan.unread(l).empty());
  }
  // Slabs: a lender has one; while it is in use nobody else has the same.
  for (int s = 0; s < L; s++) {
    const bool lends = n_h > 0 && s + n_l < L;
    EXPECT_EQ(plan.slab[s] >= 0, lends);
    for (int other = s + 1; lends && other < std::min(L, s + n_l); other++)
      EXPECT_NE(plan.slab[other], plan.slab[s]) << "in use from layer s + n_l down to s";
  }
  EXPECT_EQ(plan.num_slabs, n_h > 0 ? std::min(n_l, L - n_l) : 0);
}

TEST(KVPlan, IsTheDesignsForEveryWiringOfSmallModels) {
  for (int L = 1; L <= 8; L++)
    for (int h = 1; h <= 4; h++)
      for (int n_h = 0; n_h <= h; n_h++)
        for (int n_l = n_h > 0 ? 1 : 0; n_l < L; n_l++) check_plan(L, h, n_l, n_h);
}

TEST(KVPlan, KeepsDeadPairsWhenAsked) {
  const KVPlan plan = make_kv_plan(make_config(12, 12, 768, 9, 9), /*keep_dead=*/true);
  EXPECT_EQ(plan.projected[11].size(), 12u);
  EXPECT_EQ(plan.unread(11).size(), 9u);
  EXPECT_EQ(plan.unread(2).size(), 0u);
}

TEST(KVPlan, TakesAnyTableSuchAsMultiQueryHeadsOverSharedLayers) {
  // Four layers, four heads: all heads of layers 2k and 2k + 1 read head 0 of layer 2k, but the top layer's last reads layer 0.
  std::vector<KVPair> table;
  for (int l = 0; l < 4; l++)
    for (int i = 0; i < 4; i++) table.push_back({l == 3 && i == 3 ? 0 : l / 2 * 2, 0});
  const KVPlan plan = kv_plan_from_table(4, 4, table);
  EXPECT_EQ(plan.projected[0], std::vector<int>{0});
  EXPECT_TRUE(plan.projected[1].empty());
  ASSERT_EQ(plan.reads[3].size(), 2u);
  EXPECT_EQ(plan.reads[3][0].pair.layer, 0);
  EXPECT_EQ(plan.reads[3][0].heads, std::vector<int>{3});
  EXPECT_FALSE(plan.reads[3][0].accumulate);
  EXPECT_TRUE(plan.reads[1][0].accumulate) << "layer 3 was there first";
  EXPECT_TRUE(plan.reads[0][0].accumulate);
  EXPECT_EQ(plan.num_slabs, 2);
}

TEST(KVPlan, IsDrawnWithTheLayersThatAreRead) {
  const std::string text = draw(make_kv_plan(make_config(4, 4, 8, 3, 3)));
  EXPECT_NE(text.find("3 |  .  0  0  0 | projects 1 of 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find("0 |  .  .  .  . | projects 4 of 4, lends 3\n"), std::string::npos) << text;
}

// ----------------------------------------------------------------------------
// Layout

TEST(Arena, TensorsAreAlignedAndDoNotOverlap) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  const ParameterTable table = make_parameter_table(config, make_kv_plan(config), 4);
  size_t end = 0;
  for (const TensorSpec& tensor : table.layout.tensors) {
    EXPECT_EQ(tensor.offset % 256, 0u) << tensor.name;
    EXPECT_GE(tensor.offset, end) << tensor.name;
    EXPECT_LT(tensor.offset, end + 256) << tensor.name;
    end = tensor.offset + tensor.bytes();
  }
  EXPECT_GE(table.layout.bytes, end);
}

TEST(Parameters, HaveNoDeadRowsAndLayOutFilesFullSize) {
  const ModelConfig config = make_config(4, 4, 8, 3, 3);  // layer 3 projects k and v of head 0 alone
  const KVPlan plan = make_kv_plan(config);
  const ParameterTable table = make_parameter_table(config, plan, 4);
  const ModelLayout model = {config, plan, table};
  for (size_t i = 0; i < table.specs.size(); i++) {
    const TensorSpec& tensor = table.layout.tensors[table.specs[i].tensor];
    if (tensor.name != "h.3.attn.c_attn.weight") continue;
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{8 + 2 * 2, 8}));
    EXPECT_EQ(table.specs[i].file_shape, (std::vector<int64_t>{8, 24}));
    std::vector<float> values(12 * 8), full(8 * 24, -1), back(12 * 8);
    for (size_t j = 0; j < values.size(); j++) values[j] = float(j + 1);
    to_file_layout(model, int(i), values.data(), full.data());
    // Rows of the arena are columns of the file: q 0-7; k of head 0 at 8, 9; v of head 0 at 16, 17.
    const std::map<int, int> column_of_row = {{0, 0}, {7, 7}, {8, 8}, {9, 9}, {10, 16}, {11, 17}};
    for (auto [row, column] : column_of_row)
      for (int in = 0; in < 8; in++) EXPECT_EQ(full[in * 24 + column], float(row * 8 + in + 1));
    for (int column : {10, 15, 18, 23}) EXPECT_EQ(full[5 * 24 + column], 0.0f) << "dead rows are zeros in files";
    from_file_layout(model, int(i), full.data(), back.data());
    EXPECT_EQ(back, values);
    return;
  }
  FAIL() << "no c_attn";
}

// ----------------------------------------------------------------------------
// Random numbers, schedules, sampling

TEST(Random, IsPhilox4x32WithItsPublishedKnownAnswers) {
  // From Random123's kat_vectors, philox4x32-10: zeros, ones, and digits of pi.
  auto expect = [](Philox x, std::vector<uint32_t> words) {
    EXPECT_EQ(std::vector<uint32_t>(x.word, x.word + 4), words);
  };
  expect(philox(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(philox(~0ull, ~0ull, ~0ull), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88), {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Random, NormalsHaveMeanZeroAndVarianceOne) {
  double sum = 0, squares = 0, fourth = 0;
  const int n = 200000;
  for (int i = 0; i < n; i++) {
    double x = random_normal(3, RandomStream::test, 0, uint64_t(i));
    sum += x, squares += x * x, fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 1, 0.02);
  EXPECT_NEAR(fourth / n, 3, 0.1);
}

TEST(Schedule, WarmsUpThenFollowsItsShape) {
  Schedule s = {"cosine", 1.0, 0.1, 10, 110};
  EXPECT_DOUBLE_EQ(s(1), 0.1);
  EXPECT_DOUBLE_EQ(s(10), 1.0);
  EXPECT_DOUBLE_EQ(s(11), 1.0);
  EXPECT_NEAR(s(61), 0.55, 1e-12);
  EXPECT_NEAR(s(111), 0.1, 1e-12);
  s.kind = "linear";
  EXPECT_NEAR(s(36), 0.1 + 0.9 * 0.75, 1e-12);
  s.kind = "constant";
  EXPECT_DOUBLE_EQ(s(1), 0.1);
  EXPECT_DOUBLE_EQ(s(110), 1.0);
  s.kind = "wsd";  // decays over the last 22 of 110 steps
  EXPECT_DOUBLE_EQ(s(89), 1.0);
  EXPECT_NEAR(s(100), 0.1 + 0.9 * (1 - std::sqrt(0.5)), 1e-12);
  EXPECT_NEAR(s(111), 0.1, 1e-12);
}

TEST(Sampler, DrawsByTheCumulativeDistribution) {
  const float logits[] = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  EXPECT_EQ(sample_token(logits, 3, 0.0), 0);
  EXPECT_EQ(sample_token(logits, 3, 0.19), 0);
  EXPECT_EQ(sample_token(logits, 3, 0.21), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.69), 1);
  EXPECT_EQ(sample_token(logits, 3, 0.71), 2);
  EXPECT_EQ(sample_token(logits, 3, 0.9999999999999999), 2);
}

// ----------------------------------------------------------------------------
// Models on disk

struct DiskModel {
  ModelConfig config = make_config(3, 2, 8, 2, 1);
  KVPlan plan;
  ParameterTable table;
  explicit DiskModel(bool bias = true) {
    config.vocab_size = 11, config.max_seq_len = 5, config.bias = bias;
    plan = make_kv_plan(config);
    table = make_parameter_table(config, plan, 4);
  }
  ModelLayout layout() const { return {config, plan, table}; }
  int64_t elements(int index) const { return table.layout.tensors[table.specs[index].tensor].num_elements(); }
  FetchTensor fetch(float start) const {
    return [this, start](int index, float* values) {
      for (int64_t i = 0; i < elements(index); i++) values[i] = start + float(index) + float(i) / 1024;
    };
  }
};

TEST(ModelOnDisk, ComesBackAsItWasWithMasksIgnoredAndPrefixesStripped) {
  TemporaryFolder folder;
  const DiskModel model;
  const std::string path = folder.path + "/model.safetensors";
  write_tensors(path, model.layout(), {{"", model.fetch(1)}}, true);
  // The same under the names that GPT-2 has on the hub.
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
    if (file.tensors()[i].name == "wte.weight") writer.write_f32(specs.size() - 1, values.data(), 0, int64_t(values.size()));
  }
  writer.finish();
  for (const char* name : {"/model.safetensors", "/hub.safetensors"}) {
    int seen = 0;
    read_tensors(folder.path + name, model.layout(), {{"", [&](int index, const float* values) {
      std::vector<float> expected(size_t(model.elements(index)));
      model.fetch(1)(index, expected.data());
      EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
      seen++;
    }}});
    EXPECT_EQ(seen, int(model.table.specs.size()));
  }
}

TEST(ModelOnDisk, WithoutBiasesHoldsZerosForThemAndRefusesOthers) {
  TemporaryFolder folder;
  const DiskModel model(/*bias=*/false);
  const std::string path = folder.path + "/model.safetensors";
  auto nothing = [](int, const float*) {};
  write_tensors(path, model.layout(), {{"", model.fetch(1)}}, true);
  ASSERT_NE(SafetensorsFile(path).find("h.2.mlp.c_fc.bias"), nullptr);
  EXPECT_EQ(SafetensorsFile(path).tensors().size(), 4u + 12 * 3);
  EXPECT_EQ(error_of([&] { read_tensors(path, model.layout(), {{"", nothing}}); }), "");

  const DiskModel with_biases;
  write_tensors(path, with_biases.layout(), {{"", with_biases.fetch(1)}}, true);
  EXPECT_ERROR(read_tensors(path, model.layout(), {{"", nothing}}), "is not zero, but config.json says \"bias\": false");
}

TEST(ModelOnDisk, RefusesMissingMisshapenAndForeignTensors) {
  TemporaryFolder folder;
  const DiskModel model;
  const std::string path = folder.path + "/model.safetensors";
  auto nothing = [](int, const float*) {};
  auto write_with = [&](const std::string& name, std::vector<int64_t> shape, bool without = false) {
    write_tensors(path, model.layout(), {{"", model.fetch(1)}}, true);
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
  EXPECT_ERROR(read_tensors(path, model.layout(), {{"", nothing}}), "tensor h.1.mlp.c_proj.weight is missing");
  write_with("h.1.mlp.c_proj.weight", {8, 32});
  EXPECT_ERROR(read_tensors(path, model.layout(), {{"", nothing}}), "has shape (8, 32); by its config.json it is (32, 8)");
  write_with("h.3.ln_1.weight", {8});
  EXPECT_ERROR(read_tensors(path, model.layout(), {{"", nothing}}), "tensor h.3.ln_1.weight is no part of this model");
  write_with("lm_head.weight", {11, 8});
  SafetensorsWriter writer = SafetensorsWriter::attach(path);
  const std::vector<float> ones(88, 1.0f);
  writer.write_f32(model.table.specs.size(), ones.data(), 0, 88);
  writer.finish();
  EXPECT_ERROR(read_tensors(path, model.layout(), {{"", nothing}}), "lm_head.weight is not wte.weight");
}

TEST(ConfigJson, ComesBackAsItWas) {
  TemporaryFolder folder;
  ModelConfig c = make_config(5, 2, 8, 3, 1);
  c.bias = false, c.vocab_size = 257, c.max_seq_len = 77, c.layer_norm_eps = 3e-6;
  write_config_json(folder.path + "/config.json", c);
  const ModelConfig back = read_config_json(folder.path);
  EXPECT_EQ(back.num_layers, 5);
  EXPECT_EQ(back.vocab_size, 257);
  EXPECT_EQ(back.max_seq_len, 77);
  EXPECT_EQ(back.num_skip_layer, 3);
  EXPECT_EQ(back.num_skip_head, 1);
  EXPECT_EQ(back.layer_norm_eps, 3e-6);
  EXPECT_FALSE(back.bias);
}

TEST(ConfigJson, OfPlainGpt2HasNoSkipsAndOfOtherModelsIsRefused) {
  TemporaryFolder folder;
  auto config_with = [&](const char* key, nlohmann::json value) {
    nlohmann::json j = {{"n_layer", 12}, {"n_head", 12}, {"n_embd", 768}, {"n_positions", 1024}, {"vocab_size", 50257},
                        {"attn_pdrop", 0.1}, {"activation_function", "gelu_new"}};
    if (key != nullptr) j[key] = std::move(value);
    std::ofstream(folder.path + "/config.json") << j;
    return read_config_json(folder.path);
  };
  EXPECT_EQ(config_with(nullptr, {}).num_skip_head, 0);
  EXPECT_TRUE(config_with(nullptr, {}).bias);
  EXPECT_ERROR(config_with("activation_function", "relu"), "activation_function is \"relu\"");
  EXPECT_ERROR(config_with("n_inner", 1000), "n_inner");
  EXPECT_ERROR(config_with("tie_word_embeddings", false), "tie_word_embeddings");
  EXPECT_ERROR(config_with("scale_attn_by_inverse_layer_idx", true), "scaled otherwise");
  EXPECT_ERROR(config_with("n_layer", "twelve"), "\"n_layer\" is \"twelve\"");
  EXPECT_ERROR(config_with("n_layer", -3), "\"n_layer\" is -3");
  EXPECT_ERROR(config_with("n_head", 7), "7 heads do not divide 768 channels");
  std::ofstream(folder.path + "/config.json") << "{\"n_layer\": 12";
  EXPECT_ERROR(read_config_json(folder.path), "not a JSON object");
  EXPECT_ERROR(read_config_json(folder.path + "/nowhere"), "cannot be read");
}

TEST(Checkpoint, IsFoundByItsStepAndComesBackWhole) {
  TemporaryFolder folder;
  const DiskModel model;
  EXPECT_EQ(newest_checkpoint(folder.path), "");
  for (int64_t step : {9, 1000, 200}) {
    const RunState state = {step, 3 * step, 77, 5, true, 123456789012345ull};
    write_checkpoint(folder.path, state, model.layout(), model.fetch(1), model.fetch(2), model.fetch(3));
  }
  fs::create_directories(folder.path + "/unfinished_step_00002000");
  fs::create_directories(folder.path + "/step_of_another_kind");
  const std::string newest = newest_checkpoint(folder.path);
  EXPECT_EQ(newest, folder.path + "/step_00001000");
  remove_unfinished_checkpoints(folder.path);
  EXPECT_FALSE(fs::exists(folder.path + "/unfinished_step_00002000"));
  EXPECT_TRUE(fs::exists(folder.path + "/step_of_another_kind"));

  const RunState state = read_run_state(newest);
  EXPECT_EQ(state.step, 1000);
  EXPECT_EQ(state.next_window, 3000);
  EXPECT_EQ(state.num_windows, 77);
  EXPECT_EQ(state.seq_len, 5);
  EXPECT_TRUE(state.shuffle);
  EXPECT_EQ(state.seed, 123456789012345ull);
  auto expect_values = [&](float start) {
    return [&model, start](int index, const float* values) {
      std::vector<float> expected(size_t(model.elements(index)));
      model.fetch(start)(index, expected.data());
      EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
    };
  };
  read_weights(newest, model.layout(), expect_values(1));
  read_moments(newest, model.layout(), expect_values(2), expect_values(3));
  std::ofstream(newest + "/state.json") << "{\"format\": 1}";
  EXPECT_ERROR(read_run_state(newest), "is not a run's state");
}

// ----------------------------------------------------------------------------
// The log

TEST(Log, WritesNumbersWithAllTheirDigits) {
  TemporaryFolder folder;
  const double loss = 0.1 + 0.2;
  {
    RunLog log;
    log.create(folder.path);
    log.write("run", {{"model", std::string("a \"quoted\" name")}, {"bias", true}, {"steps", int64_t(1) << 40}});
    log.write({{"step", int64_t(1)}, {"loss", loss}});
  }
  std::ifstream file(folder.path + "/log.jsonl");
  std::string line;
  std::getline(file, line);
  const auto run = nlohmann::json::parse(line);
  EXPECT_EQ(run["run"]["model"], "a \"quoted\" name");
  EXPECT_EQ(run["run"]["steps"], int64_t(1) << 40);
  std::getline(file, line);
  EXPECT_EQ(nlohmann::json::parse(line)["loss"].get<double>(), loss);
}

TEST(Log, OfAnEarlierRunIsKeptAndOfAResumedOneGoesOn) {
  TemporaryFolder folder;
  {
    RunLog log;
    log.create(folder.path);
    log.write("run", {{"n", int64_t(1)}});
  }
  {
    RunLog log;
    log.create(folder.path);
    log.write("run", {{"n", int64_t(2)}});
    for (int64_t step = 1; step <= 4; step++) log.write({{"step", step}});
  }
  EXPECT_EQ(read_text(folder.path + "/log.1.jsonl"), "{\"run\":{\"n\":1}}\n");
  std::ofstream(folder.path + "/log.jsonl", std::ios::app) << "{\"step\":5,\"lo";  // killed in mid-line
  {
    RunLog log;
    log.resume(folder.path, 2);
    log.write({{"step", int64_t(3)}, {"again", true}});
  }
  EXPECT_EQ(read_text(folder.path + "/log.jsonl"),
            "{\"run\":{\"n\":2}}\n{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"again\":true}\n");
}

TEST(Log, ThatCannotBeWrittenIsAnError) {
  TemporaryFolder folder;
  EXPECT_ERROR(RunLog().create(folder.path + "/nowhere"), "nowhere/log.jsonl: cannot be written");
}

// ----------------------------------------------------------------------------
// Options

static TrainOptions parse(std::vector<std::string> words) {
  std::vector<char*> argv = {const_cast<char*>("train_gpt2_sla")};
  for (std::string& word : words) argv.push_back(word.data());
  TrainOptions options;
  parse_options(int(argv.size()), argv.data(), options);
  return options;
}

TEST(Options, WrittenAsTomlReadBackTheSame) {
  TemporaryFolder folder;
  const TrainOptions first = parse({"-i", "data/*.bin", "-e", "d24", "--layers", "8", "--shuffle", "-l", "0.00015", "-t", "77", "-k",
                                    "wsd", "--skip-heads", "0", "-d", "154", "-b", "2", "--seed", "9"});
  std::ofstream(folder.path + "/config.toml") << first.as_toml;
  const TrainOptions second = parse({"--config", folder.path + "/config.toml"});
  EXPECT_EQ(second.as_toml, first.as_toml);
  EXPECT_EQ(second.train_data, "data/*.bin");
  EXPECT_EQ(second.learning_rate, 0.00015);
  EXPECT_EQ(second.layers, 8);
  EXPECT_FALSE(second.heads.has_value());
  EXPECT_EQ(second.skip_heads, 0);
  EXPECT_TRUE(second.shuffle);
  EXPECT_FALSE(second.no_bias);
  EXPECT_EQ(parse({"--config", folder.path + "/config.toml", "-l", "0.5"}).learning_rate, 0.5) << "the command line wins";
}

TEST(Options, ResumeIsAFlagOrLlmcsNumber) {
  EXPECT_FALSE(parse({"-i", "x"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "-y"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-y", "1", "-o", "out"}).resume);
  EXPECT_FALSE(parse({"-i", "x", "-y", "0"}).resume);
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "-y", "2"}), "-y 2");
}

TEST(Options, ThatMakeNoSenseAreRefused) {
  EXPECT_ERROR(parse({}), "no training data");
  EXPECT_ERROR(parse({"-i", "x", "--colour"}), "--colour");
  EXPECT_ERROR(parse({"-i", "x", "-b", "many"}), "many");
  EXPECT_ERROR(parse({"-i", "x", "-b", "4.5"}), "4.5");
  EXPECT_ERROR(parse({"-i", "x", "-b", "0"}), "-b 0");
  EXPECT_ERROR(parse({"-i", "x", "-l", "1e-4x"}), "1e-4x");
  EXPECT_ERROR(parse({"-i", "x", "-l", "nan"}), "-l nan");
  EXPECT_ERROR(parse({"-i", "x", "-k", "cosin"}), "-k cosin");
  EXPECT_ERROR(parse({"-i", "x", "-x", "-1"}), "-x -1");
  EXPECT_ERROR(parse({"-i", "x", "--beta1", "1"}), "--beta1 1");
  EXPECT_ERROR(parse({"-i", "x", "-n", "5"}), "-n: checkpoints need a folder");
  EXPECT_ERROR(parse({"-i", "x", "--config", "/nowhere.toml"}), "nowhere.toml");
}
