// What a wiring costs and changes: FLOPs and parameters against counts by hand, plans of very many layers and heads,
// and what is said and done when a model continues with another wiring.
// COVERS llmc/model/attention_pairs.h llmc/model/parts/attention_branch.h llmc/model/parameters.h
// COVERS llmc/model/change_wiring.h
#include <gtest/gtest.h>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <map>
#include "files.h"
#include "helpers.h"
#include "llmc/model/attention_plan.h"
#include "llmc/model/change_wiring.h"
#include "llmc/formats/config_json.h"
#include "llmc/model/flops.h"
#include "llmc/model/kv_cache.h"
#include "llmc/model/parameters.h"

static ModelConfig model_of(const char* wiring, int L = 4, int h = 4) {
  ModelConfig c = make_config(L, h, 8 * h, 0, 0);
  c.vocab_size = 257, c.max_seq_len = 16, c.wiring = parse_wiring(wiring);
  validate(c);
  return c;
}

// ----------------------------------------------------------------------------
// FLOPs

// FLOPs of a layer's attention for a token, counted over the pairs that see each other, one by one: 7 products a pair;
// with topk the scores of all pairs once, and 6 products for a chosen pair; with relative positions 11; with `depth`
// also the pairs of a token with itself in the layers up to l. `segments`: the mean over as many segments of a stream,
// which begins with an empty memory.
static double counted_attention_flops(const ModelConfig& c, int l, int T, int64_t segments = 1) {
  const AttentionPlan plan = make_attention_plan(c);
  double products = 0;
  for (int64_t n = 0; n < segments; n++) {
    const int m = int(std::min<int64_t>(plan.table.memory, n * T));
    for (int i = 0; i < c.num_heads; i++)
      for (int t = m; t < m + T; t++) {
        int keys = 0;
        for (int j = 0; j <= t; j++) keys += plan.table.mask(l, i).sees(t, j) * int(plan.table.sources(l, i).size());
        const int topk = plan.table.topk;
        if (plan.table.depth && l > 0) products += 7.0 * (l + 1);
        products += topk > 0 ? keys + 6.0 * std::min(keys, topk) : (plan.table.relative ? 11.0 : 7.0) * keys;
      }
  }
  return 2 * c.head_size() * products / T / double(segments);
}

TEST(Flops, OfAttentionAreThoseOfEachPair) {
  for (const char* wiring : {"plain",
                             "sla(2,3)",
                             "also(1,2)",
                             "also(1,2) also(2,1:3)",
                             "share(2)",
                             "sla(2,2,v)",
                             "sla(1,3,k) share(2,v)",
                             "gqa(2)",
                             "window(5)",
                             "window(3,SL)",
                             "strided(3)",
                             "fixed(4,2)",
                             "topk(3)",
                             "topk(3) also(1,4)",
                             "rope",
                             "relative",
                             "relative window(6)",
                             "rmsnorm",
                             "qknorm",
                             "vres",
                             "router",
                             "depth",
                             "relu2",
                             "silu",
                             "alibi",
                             "sinks",
                             "swiglu",
                             "untied softcap(15)",
                             "dense",
                             "gru",
                             "universal(2)",
                             "universal(2) act(0.1)",
                             "reversible",
                             "reversible strided(5)"}) {
    const ModelConfig c = model_of(wiring);
    const AttentionPlan plan = make_attention_plan(c);
    for (int T : {1, 7, 16}) {
      double attention = 0;
      for (int l = 0; l < c.num_layers; l++) attention += counted_attention_flops(c, l, T);
      EXPECT_NEAR(flops_per_token(c, plan, T), 6 * matmul_parameters(c, plan) + attention, 1e-6) << wiring << " " << T;
    }
  }
}

// The memory of the first segments of a stream is empty, or not full. k and v are computed at its positions as well.
TEST(Flops, WithMemoryGrowAsItFills) {
  const int T = 16;
  for (const char* wiring : {"memory(5) rope", "memory(16) rope", "memory(40) rope", "memory(40) relative",
                             "memory(48) rope window(20)", "memory(48) rope gqa(2)", "memory(48) rope sla(2,3)"}) {
    const ModelConfig c = model_of(wiring);
    const AttentionPlan plan = make_attention_plan(c);
    auto expected = [&](int64_t segments) {
      double memory = 0, elements = double(c.vocab_size) * c.channels, attention = 0;
      for (int64_t n = 0; n < segments; n++)
        memory += double(std::min<int64_t>(plan.table.memory, n * T)) / double(segments);
      for (int l = 0; l < c.num_layers; l++) {
        const double C = c.channels, kv = double(qkv_rows(c, plan, l)) - C;
        elements += 10 * C * C + kv * C * (1 + memory / T);
        attention += counted_attention_flops(c, l, T, segments);
      }
      return 6 * elements + attention;
    };
    for (int64_t segments : {1, 2, 3, 4, 9})
      EXPECT_NEAR(flops_per_token(c, plan, T, {0, segments}), expected(segments), 1e-6) << wiring << " " << segments;
    for (int64_t n : {1, 2, 3, 8})
      EXPECT_NEAR(flops_per_token(c, plan, T, {n, n + 1}), double(n + 1) * expected(n + 1) - double(n) * expected(n),
                  1e-3)
          << wiring << " " << n;
    EXPECT_EQ(flops_per_token(c, plan, T), flops_per_token(c, plan, T, {4, 5})) << "the memory is full: " << wiring;
  }
}

TEST(Wiring, TakesASourceOnceHoweverOftenItIsNamed) {
  for (const char* wiring : {"also(1,4)", "also(1,4) also(1,4)", "also(1,2) also(1,4)", "also(1,4) also(1,1:3)"}) {
    const WiringTable table = make_attention_plan(model_of(wiring)).table;
    for (int l = 0; l < 4; l++)
      for (int i = 0; i < 4; i++)
        EXPECT_EQ(table.sources(l, i), l == 0 ? std::vector<KVSource>{0} : (std::vector<KVSource>{l - 1, l})) << wiring;
  }
  const WiringTable table = make_attention_plan(model_of("sla(2,4) also(2,4) also(1,4)")).table;
  EXPECT_EQ(table.sources(3, 0), (std::vector<KVSource>{1, 2}));
  EXPECT_EQ(table.sources(1, 0), (std::vector<KVSource>{0, 1}));
}

// ----------------------------------------------------------------------------
// Parameters

// The wirings of one term each, and some of several.
static const char* const all_terms[] = {"plain",
                                        "sla(2,3)",
                                        "also(1,2)",
                                        "share(2)",
                                        "layers(0_0_2_2)",
                                        "sla(2,2,v)",
                                        "share(2,k)",
                                        "gqa(2)",
                                        "window(5)",
                                        "strided(3)",
                                        "fixed(4,2)",
                                        "topk(3)",
                                        "reuse(2)",
                                        "blend(0.3)",
                                        "gate",
                                        "rope",
                                        "relative",
                                        "memory(16) rope",
                                        "universal(1)",
                                        "universal(2)",
                                        "universal(4)",
                                        "universal(1) act(0.1)",
                                        "documents",
                                        "rmsnorm",
                                        "qknorm",
                                        "vres",
                                        "vres sla(2,2) gqa(2)",
                                        "route(0.3) sla(2,2)",
                                        "router",
                                        "router sla(2,2) gqa(2)",
                                        "depth",
                                        "depth sla(2,2)",
                                        "relu2",
                                        "silu",
                                        "alibi",
                                        "sinks",
                                        "swiglu",
                                        "swiglu(8)",
                                        "untied",
                                        "untied softcap(15)",
                                        "dense",
                                        "dense sla(2,2) gqa(2)",
                                        "gru",
                                        "universal(1) gru",
                                        "lsh(4,2)",
                                        "lsh(4,2) reversible",
                                        "reversible",
                                        "relative universal(2)"};

TEST(Parameters, AreAtLeastAsManyAsTheBoundForEveryTerm) {
  for (const char* wiring : all_terms) {
    const ModelConfig c = model_of(wiring);
    const ParameterTable table = make_parameter_table(c, make_attention_plan(c));
    EXPECT_LE(least_parameters(c) * sizeof(float), double(table.layout.bytes)) << wiring;
    EXPECT_LE(least_parameters(c, 0), double(table.num_parameters_full)) << wiring;
  }
}

// What Muon makes orthogonal is one matrix, (C, C), for each gate of `gru`, and each of q, k and v.
TEST(Parameters, HaveTheMatricesThatMuonUpdates) {
  const int64_t C = 32;
  using Rows = std::vector<int64_t>;
  const std::map<std::string, Rows> rows = {{"attn.c_attn.weight", {C, C, C}}, {"attn.c_proj.weight", {C}},
                                            {"mlp.c_fc.weight", {4 * C}},      {"mlp.c_proj.weight", {C}},
                                            {"gru_1.y.weight", {C, C, C}},     {"gru_1.x.weight", {C, C}},
                                            {"gru_1.rx.weight", {C}},          {"gru_2.y.weight", {C, C, C}},
                                            {"gru_2.x.weight", {C, C}},        {"gru_2.rx.weight", {C}},
                                            {"attn.relative.weight", {C}}};
  for (const char* wiring : {"gru", "gru relative", "gru universal(2) act(0.1)", "gate", "swiglu(80)"}) {
    const ModelConfig c = model_of(wiring);
    const ParameterTable table = make_parameter_table(c, make_attention_plan(c));
    for (int i = 0; i < table.size(); i++) {
      const std::string& name = table.tensor(i).name;
      const bool is_gate = std::string(wiring) == "swiglu(80)" && name.find("c_fc.weight") != std::string::npos;
      if (is_gate) { EXPECT_EQ(table.specs[i].matrix_rows, (Rows{80, 80})) << name; }
      if (is_gate) continue;
      const auto it = rows.find(table.specs[i].layer >= 0 ? name.substr(name.find('.', 2) + 1) : name);
      EXPECT_EQ(table.specs[i].matrix_rows, it == rows.end() ? Rows() : it->second) << wiring << ": " << name;
    }
  }
}

// Projections into the residual stream begin as normal(0, 0.02 / sqrt(2 L)), for all layers that run, also where they
// repeat; other matrices as normal(0, 0.02), LayerNorms' weights as ones, and biases as zeros, but not the gates'.
TEST(Parameters, BeginAsInGpt2ForEveryTerm) {
  auto ends_with = [](const std::string& name, const std::string& end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  for (const char* wiring : all_terms) {
    const ModelConfig c = model_of(wiring);
    const ParameterTable table = make_parameter_table(c, make_attention_plan(c));
    for (int i = 0; i < table.size(); i++) {
      const std::string& name = table.tensor(i).name;
      const ParameterSpec& spec = table.specs[i];
      const bool is_matrix = table.tensor(i).shape.size() == 2, is_norm = name.find("ln_") != std::string::npos;
      EXPECT_EQ(spec.decay, is_matrix) << name;
      EXPECT_DOUBLE_EQ(spec.init_std, !is_matrix                         ? 0
                                      : ends_with(name, "c_proj.weight") ? 0.02 / std::sqrt(8.0)
                                                                         : 0.02)
          << wiring << ": " << name;
      const double mean = is_norm && ends_with(name, "weight")                                ? 1
                          : name.find("gru_") != std::string::npos && ends_with(name, "bias") ? 2
                          : name == "halt.bias"                                               ? 1
                                                                                              : 0;
      EXPECT_EQ(spec.init_mean, mean) << wiring << ": " << name;
      const size_t ones = ends_with(name, "value_mix") || ends_with(name, ".dense") ? 1
                          : ends_with(name, "router")                               ? c.wiring_table().num_kv_heads
                                                                                    : 0;
      EXPECT_EQ(spec.ones.size(), ones) << name;
      if (ends_with(name, ".dense")) { EXPECT_EQ(spec.ones[0], spec.layer + 1); }
    }
  }
}

// ----------------------------------------------------------------------------
// Very many layers and heads

TEST(Plan, OfManyLayersOrHeadsTakesLinearTime) {
  for (const auto& [wiring, L, h] : {std::tuple("plain", 10000, 1),
                                     {"share(10000)", 10000, 8},
                                     {"universal(1)", 10000, 16},
                                     {"plain", 1, 1 << 16},
                                     {"gqa(1)", 1, 1 << 16}}) {
    const clock_t start = clock();
    const ModelConfig c = model_of(wiring, L, h);
    const AttentionPlan plan = make_attention_plan(c);
    EXPECT_EQ(plan_kv_cache(plan, 1, 16, 16).groups.size(), std::string(wiring) == "share(10000)" ? 1 : size_t(L));
    for (Qkv which : all_qkv) EXPECT_TRUE(plan.unused_but_projected(which, L - 1).empty());
    EXPECT_EQ(layer_change(plan_wiring_change(c, plan), L - 1).fresh, 0);
    EXPECT_LT(double(clock() - start) / CLOCKS_PER_SEC, 2) << wiring << ", " << L << " layers of " << h;
  }
}

TEST(Config, RefusesModelsWhosePlanFillsMemory) {
  auto validate_model = [](const char* wiring, int L, int h) {
    ModelConfig c = make_config(L, h, h, 0, 0);
    c.wiring = parse_wiring(wiring);
    validate(c);
  };
  EXPECT_ERROR(validate_model("plain", 10001, 1), "10001 layers are more than a model can have, 10000");
  EXPECT_ERROR(validate_model("universal(1)", 1 << 29, 1), "layers are more than a model can have");
  EXPECT_ERROR(validate_model("gate", 3000, 4), "3000 layers of 4 heads with this wiring have 18006000 heads");
  EXPECT_ERROR(validate_model("blend(0.5)", 3000, 4), "heads of attention");
  EXPECT_ERROR(validate_model("gqa(3)", 1, 1 << 30), "heads of attention");
  EXPECT_ERROR(validate_model("also(1,1) also(2,1)", 10000, 40), "have 1200000 heads");
  EXPECT_EQ(error_of([&] { validate_model("gate", 96, 96); }), "") << "the largest GPT-3";
}

TEST(Flops, OfAVeryLongMemoryAreCountedAtOnce) {
  const clock_t start = clock();
  const ModelConfig c = model_of("memory(67108864) rope");
  const double causal = 2.0 * 7 * c.head_size() * c.num_heads * c.num_layers * double(1 << 26);
  EXPECT_GT(flops_per_token(c, make_attention_plan(c), 16), causal);
  EXPECT_LT(double(clock() - start) / CLOCKS_PER_SEC, 1);
}

// ----------------------------------------------------------------------------
// Another wiring than a model was trained with

static WiringChange change_of(const ModelConfig& before, const ModelConfig& now) {
  return plan_wiring_change(before, make_attention_plan(now));
}

// Each number of each term, changed, changes what the model computes. What is said of that is not "nothing", and the
// same wiring changes nothing.
TEST(WiringChange, IsSaidOfEveryNumberOfEveryTerm) {
  const std::vector<std::vector<const char*>> same_terms =
      {{"plain", "sla(2,3)", "sla(1,3)", "sla(2,2)", "sla(2,0:2)", "sla(2,1:2)"},
       {"plain", "also(2,3)", "also(1,3)", "also(2,2)", "also(2,0:2)"},
       {"plain", "share(2)", "share(4)", "layers(0_0_1_1)", "layers(0_1_1_1)"},
       {"plain", "gqa(2)", "gqa(1)"},
       {"plain", "window(5)", "window(6)", "window(5,SL)", "window(5,LS)"},
       {"plain", "strided(3)", "strided(4)", "strided(3,layers)", "strided(3,union)"},
       {"plain", "fixed(4,2)", "fixed(5,2)", "fixed(4,1)", "fixed(4,2,layers)", "fixed(4,2,union)"},
       {"plain", "topk(3)", "topk(4)", "sinks"},
       {"plain", "reuse(2)", "reuse(4)"},
       {"plain", "blend(0.3)", "blend(0.5)", "gate"},
       {"plain", "rope", "rope(50)", "relative", "alibi"},
       {"rope", "memory(8) rope", "memory(9) rope"},
       {"plain", "universal(1)", "universal(2)", "universal(4)"},
       {"universal(1)", "universal(1) act(0.1)", "universal(1) act(0.2)", "universal(1) act(0.1,0.5)"},
       {"plain", "gru", "reversible", "rmsnorm", "qknorm", "vres", "router", "depth", "relu2", "silu", "swiglu",
        "swiglu(64)", "route(0.3)", "route(0.5)", "softcap(15)", "softcap(16)", "untied", "dense"},
       {"plain", "lsh(4,2)", "lsh(8,2)", "lsh(4,1)"}};
  for (const std::vector<const char*>& wirings : same_terms)
    for (const char* before : wirings)
      for (const char* now : wirings)
        EXPECT_EQ(describe(change_of(model_of(before), model_of(now))) == "  nothing\n", before == now)
            << before << " to " << now;
}

// Six heads with two K/V heads instead of three: each new K/V head is a mean, and the middle old one is in both.
TEST(WiringChange, TellsMeansFromCopies) {
  const LayerChange fewer = layer_change(change_of(model_of("gqa(3)", 1, 6), model_of("gqa(2)", 1, 6)), 0);
  EXPECT_EQ(fewer.averaged, 4);  // of k and of v
  EXPECT_EQ(std::pair(fewer.least, fewer.most), std::pair(2, 2));
  EXPECT_EQ(fewer.repeated, 0);
  const LayerChange more = layer_change(change_of(model_of("gqa(2)", 1, 6), model_of("gqa(3)", 1, 6)), 0);
  EXPECT_EQ(more.averaged, 2) << "the second of three has query heads of both";
  EXPECT_EQ(more.repeated, 0);
  const LayerChange all = layer_change(change_of(model_of("gqa(2)", 1, 6), model_of("plain", 1, 6)), 0);
  EXPECT_EQ(all.averaged, 0);
  EXPECT_EQ(all.repeated, 8);
}

using WiringChangeOnDisk = FolderTest;

// Rotations for another number of rounds or buckets start as in a new model; for the same numbers they are read.
TEST_F(WiringChangeOnDisk, KeepsRotationsOfTheSameShapeAlone) {
  const ModelConfig before = model_of("lsh(4,2)");
  const ParameterTable old_table = make_parameter_table(before, make_attention_plan(before));
  write_weight_file(in("model.safetensors"), old_table,
                    [&](int index, float* values) { std::fill_n(values, old_table.elements(index), 3.0f); });
  for (const auto& [wiring, kept] : {std::pair("lsh(4,2)", true),
                                     {"lsh(4,2) reversible", true},
                                     {"lsh(4,1)", false},
                                     {"lsh(4,3)", false},
                                     {"lsh(2,2)", false},
                                     {"lsh(8,1)", false}}) {
    const ModelConfig now = model_of(wiring);
    const AttentionPlan plan = make_attention_plan(now);
    const ParameterTable table = make_parameter_table(now, plan);
    std::set<int> stored;
    read_weights_for_new_wiring(
        folder, plan_wiring_change(before, plan), table,
        [&](int index) { return std::vector<float>(size_t(table.elements(index)), 5.0f); },
        [&, kept = kept](int index, const float* values) {
          EXPECT_TRUE(stored.insert(index).second) << index;
          if (table.is_constant(index)) {
            EXPECT_EQ(values[0], kept ? 3 : 5);
            EXPECT_EQ(values[table.elements(index) - 1], kept ? 3 : 5);
          }
        });
    EXPECT_EQ(int(stored.size()), table.file_tensors()) << wiring;
  }
}
