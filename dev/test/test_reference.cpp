// Is the reference right? Its gradients against central finite differences, everything against the golden cases.
// Run from the repository's root.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "dev/test/golden_case.h"
#include "dev/test/values.h"
#include "dev/test/reference/reference.h"

using reference::AdamWOptions;
using reference::Array;
using reference::Cache;
using reference::Result;
using reference::Tensor;
using reference::Tensors;

// ----------------------------------------------------------------------------
// Small models with random weights

// Uniform in [-1, 1).
double uniform(std::mt19937_64& random) { return double(random() >> 11) * 0x1p-52 - 1; }

struct WiringCase {
  const char* name;
  int num_layers, num_heads;
  const char* wiring;
  // x for each K/V head that no head attends to, k or v if that is its key or its value alone, by layer that has
  // parameters; "": none
  const char* dead_kv = "";
  const char* dead_map = "";  // x for each layer whose q and k nobody uses
  bool bias = true;
};

const WiringCase wirings[] = {
    {"plain_gpt2", 3, 4, "plain"},
    {"three_quarters", 4, 4, "sla(3,3)", ".... .... .... .xxx"},
    {"adjacent", 4, 4, "sla(1,2)", ".... .... .... ..xx"},
    {"chains", 6, 4, "sla(2,3)", ".... .... .... .... .xxx .xxx"},
    {"all_heads", 4, 4, "sla(2,4)", ".... .... xxxx xxxx"},
    {"furthest_layer", 3, 2, "sla(2,1)", ".. .. .x"},
    {"without_biases", 4, 4, "sla(3,3)", ".... .... .... .xxx", "", false},
    {"plain_without_biases", 2, 4, "plain", "", "", false},
    {"ranges", 5, 4, "sla(1,0:1) sla(3,2:4)", ".... .... .... ..xx x.xx"},
    {"values", 4, 4, "sla(2,3,v)", ".... .... .vvv .vvv"},
    {"keys_and_values", 5, 4, "sla(2,3,k) share(2,v)", ".... vvvv .... vxxx .kkk"},
    {"keys_qknorm_rope_gqa", 4, 4, "qknorm rope gqa(2) sla(1,2,k)", ".. .. .. .k"},
    {"values_relative_memory", 4, 4, "relative memory(5) sla(2,2,v)", ".... .... ..vv ..vv"},
    {"also", 3, 4, "also(1,2) also(2,1:3)"},
    {"share", 5, 4, "share(2)", ".... xxxx .... xxxx ...."},
    {"layers", 4, 4, "layers(0_0_2_0)", ".... xxxx .... xxxx"},
    {"gqa", 3, 4, "gqa(2)"},
    {"window", 2, 4, "window(3)"},
    {"window_in_some_layers", 3, 4, "window(2,SL)"},
    {"strided", 2, 3, "strided(3)"},
    {"strided_by_layers", 3, 2, "strided(2,layers)"},
    {"strided_union", 2, 2, "strided(3,union)"},
    {"fixed", 2, 3, "fixed(3,1)"},
    {"fixed_by_layers", 3, 2, "fixed(4,2,layers)"},
    {"fixed_union", 2, 2, "fixed(3,2,union)"},
    {"topk", 3, 4, "topk(3)"},
    {"reuse", 5, 4, "reuse(3)", "", ".xx.x"},
    {"blend", 4, 4, "blend(0.3)"},
    {"gate", 4, 4, "gate"},
    {"gate_without_biases", 3, 4, "gate", "", "", false},
    {"rope", 3, 4, "rope"},
    {"rope_reuse_gqa", 4, 4, "rope(3) reuse(2) gqa(2)", "", ".x.x"},
    {"rope_sla_also", 4, 4, "rope sla(2,2) also(1,1)", ".... .... ..x. ..xx"},
    {"relative", 3, 4, "relative"},
    {"relative_also", 3, 4, "relative also(1,2)"},
    {"relative_gqa_sla_window", 4, 4, "relative gqa(2) sla(2,2) window(5)", ".. .. .x .x"},
    {"gqa_sla_window", 4, 4, "gqa(2) sla(2,2) window(5)", ".. .. .x .x"},
    {"also_strided", 3, 4, "also(1,2) strided(3,union)"},
    {"share_topk", 4, 4, "share(2) topk(4)", ".... xxxx .... xxxx"},
    {"also_topk", 3, 4, "also(1,3) topk(3)"},
    {"reuse_fixed_gqa", 5, 4, "reuse(2) fixed(4,2) gqa(1)", "", ".x.x."},
    {"gate_gqa_window", 4, 4, "gate gqa(2) window(6,SL)"},
    {"memory", 3, 4, "memory(5) rope"},
    {"memory_gqa_sla_window", 4, 4, "memory(11) rope gqa(2) sla(2,2) window(9)", ".. .. .x .x"},
    {"relative_memory_sla", 4, 4, "relative memory(5) sla(2,2)", ".... .... ..xx ..xx"},
    {"route", 4, 4, "route(0.8)", ".... .... .... xxxx"},
    {"route_gqa_window", 4, 4, "route(0.8) gqa(2) window(5)", ".. .. .. xx"},
    {"route_depth_sla_values", 4, 4, "route(0.8) depth sla(2,2,v)", ".... .... ..vv xxxx"},
    {"universal", 3, 4, "universal(1)"},
    {"universal_without_biases", 4, 4, "universal(2)", "", "", false},
    {"universal_sla", 4, 4, "universal(2) sla(2,2)"},
    {"universal_share_sla", 4, 4, "universal(2) share(2) sla(1,1:2)", ".... x.xx"},
    {"universal_rope_gqa_window", 4, 4, "universal(2) rope gqa(2) window(3,SSL)"},
    {"universal_relative_also", 4, 4, "universal(2) relative also(1,2)"},
    {"documents", 3, 4, "documents"},
    {"documents_relative_also_window", 3, 4, "relative documents also(1,2) window(4)"},
    {"documents_gate_fixed", 3, 4, "gate documents fixed(3,1)"},
    {"rmsnorm", 3, 4, "rmsnorm"},
    {"rmsnorm_without_biases", 2, 4, "rmsnorm gru", "", "", false},
    {"qknorm", 3, 4, "qknorm"},
    {"qknorm_rope_memory_sla_gqa", 3, 4, "qknorm rope memory(5) sla(1,2) gqa(2)", ".. .. .x"},
    {"vres", 3, 4, "vres"},
    {"vres_keys_and_values_apart", 4, 4, "vres sla(1,2,k) sla(2,1:3,v)", ".... .... .vv. .vxk"},
    {"router", 3, 4, "router"},
    {"router_qknorm_rope_gqa_sla", 4, 4, "router qknorm rope gqa(2) sla(2,2)"},
    {"vres_rope_gqa_sla_also", 4, 4, "vres rope gqa(2) sla(2,2) also(1,1)", ".. .. .. .x"},
    {"depth", 3, 4, "depth"},
    {"depth_qknorm_rope_sla", 4, 4, "depth qknorm rope sla(2,2)", ".... .... ..xx ..xx"},
    {"depth_keys_and_values_apart", 4, 4, "depth sla(1,2,k) sla(2,1:3,v)", ".... .... .vv. .vx."},
    {"dense", 3, 4, "dense"},
    {"dense_of_one_layer", 1, 4, "dense"},
    {"dense_rope_gqa_sla_also", 4, 4, "dense rope gqa(2) sla(2,2) also(1,1)", ".. .. .. .x"},
    {"relu2", 3, 4, "relu2"},
    {"silu", 3, 4, "silu"},
    {"alibi", 3, 6, "alibi"},
    {"alibi_sinks_topk_gqa_also", 4, 4, "alibi sinks topk(3) gqa(2) also(1,2)"},
    {"sinks", 3, 4, "sinks window(4)"},
    {"sinks_relative_memory", 3, 4, "sinks relative memory(5)"},
    {"swiglu", 2, 4, "swiglu(7)"},
    {"swiglu_without_biases", 2, 4, "swiglu", "", "", false},
    {"softcap", 3, 4, "softcap(1.5)"},
    {"untied", 2, 4, "untied"},
    {"gru", 3, 4, "gru"},
    {"gru_without_biases", 2, 4, "gru", "", "", false},
    {"gru_universal_sla", 4, 4, "gru universal(2) sla(2,2)"},
    {"gru_relative_memory", 3, 4, "gru relative memory(5)"},
    {"act", 6, 4, "universal(1) act(0.05,0.5)"},
    {"act_after_two_layers", 6, 4, "universal(2) act(0.03) rope gqa(2) sla(2,2)"},
    {"act_gru_without_biases", 4, 4, "universal(1) act(0.4,2) relative gru", "", "", false},
    {"lsh", 3, 3, "lsh(6,2)"},
    {"lsh_two_buckets", 3, 4, "lsh(2,3)"},
    {"lsh_without_biases", 3, 4, "lsh(6,2)", "", "", false},
    {"lsh_gru", 2, 4, "gru lsh(6,2)"},
    {"reversible", 3, 4, "reversible"},
    {"reversible_gqa_sla_window", 4, 4, "reversible gqa(2) sla(2,2) window(5)", ".. .. .x .x"},
    {"reversible_rope_also_strided_fixed", 3, 3, "reversible rope also(1,1) strided(3) fixed(4,2,union)"},
    {"reversible_lsh", 3, 3, "reversible lsh(6,2)"},
    {"reversible_lsh_without_biases", 3, 4, "reversible lsh(2,3)", "", "", false},
};

// Shapes that are multiples of nothing; T < max_seq_len, so that the last positions go unused. With `memory` it holds
// as many positions as it has room for, with any values: they are constants.
struct Problem {
  ModelConfig config;
  int B = 2, T = 8;
  std::vector<int> inputs, targets;
  Tensors<double> params;
  reference::Memory<double> memory;

  explicit Problem(const WiringCase& wiring) {
    config.num_layers = wiring.num_layers;
    config.num_heads = wiring.num_heads;
    config.channels = 4 * wiring.num_heads;
    config.vocab_size = 13;
    config.max_seq_len = T + 1;
    config.bias = wiring.bias;
    config.wiring = parse_wiring(wiring.wiring);
    validate(config);
    std::mt19937_64 random(1234);
    for (int n = 0; n < B * T; n++) {
      inputs.push_back(random() % config.vocab_size);
      targets.push_back(random() % config.vocab_size);
    }
    config.end_of_text = inputs[4];
    // Much larger than GPT-2's 0.02: attention is far from uniform, GELU far from linear, no gradient near zero.
    params = reference::make_parameters<double>(config);
    for (auto& [name, param] : params) {
      const bool norm_weight = name.find("ln_") != std::string::npos && name.find(".weight") != std::string::npos;
      for (double& w : param.data) w = 0.5 * uniform(random) + (norm_weight ? 1 : 0);
    }
    memory.resize(config.num_layers);
    for (Array<double>& layer : memory) {
      layer.resize(B * config.wiring_table().memory * config.channels);
      for (double& x : layer) x = uniform(random);
    }
  }

  Result<double> forward(Cache<double>* cache = nullptr) const {
    reference::Memory<double> before = memory;
    return reference::forward(config, params, inputs, targets, B, T, cache, &before, nullptr, {0, 7, 3, 0, true});
  }
  double loss() const { return forward().loss; }

  // The objective, whose gradients are checked.
  double objective() const {
    const ActTerm* act = reference::find_term<ActTerm>(config);
    const Result<double> result = forward();
    return result.loss + (act ? act->cost * result.ponder : 0);
  }

  Tensors<double> grads() const {
    Tensors<double> grads = reference::make_parameters<double>(config);
    Cache<double> cache;
    forward(&cache);
    reference::backward(config, params, cache, grads);
    return grads;
  }
};

struct ReferenceWiring : testing::TestWithParam<WiringCase> {};

std::string wiring_name(const testing::TestParamInfo<WiringCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(All, ReferenceWiring, testing::ValuesIn(wirings), wiring_name);

struct ReferenceGradients : ReferenceWiring {};

// The wirings whose gradients `make test` compares too.
const std::set<std::string> quick_gradients = {"all_heads",           "also_strided",         "gate_gqa_window",
                                               "gate_without_biases", "documents_gate_fixed", "reversible_lsh"};

std::vector<WiringCase> wirings_of_gradients(bool quick) {
  std::vector<WiringCase> some;
  for (const WiringCase& wiring : wirings)
    if (bool(quick_gradients.count(wiring.name)) == quick) some.push_back(wiring);
  return some;
}

INSTANTIATE_TEST_SUITE_P(Quick, ReferenceGradients, testing::ValuesIn(wirings_of_gradients(true)), wiring_name);
INSTANTIATE_TEST_SUITE_P(Long, ReferenceGradients, testing::ValuesIn(wirings_of_gradients(false)), wiring_name);

// How near the sum of a token's halting probabilities, after a cycle that it may halt at, comes to 1 - eps, where N
// changes and the loss is no smooth function; and which N there are. Infinite and none without `act`.
std::pair<double, std::set<int>> halting_distance(const Problem& problem) {
  std::pair<double, std::set<int>> distance = {INFINITY, {}};
  Cache<double> cache;
  problem.forward(&cache);
  const reference::Halting<double>& halting = cache.halting;
  for (size_t n = 0; n < halting.last.size(); n++) {
    double sum = 0;
    for (int cycle = 0; cycle <= halting.last[n] && cycle + 1 < int(halting.p.size()); cycle++) {
      sum += halting.p[cycle][n];
      const double eps = reference::find_term<ActTerm>(problem.config)->eps;
      distance.first = std::min(distance.first, std::fabs(sum - (1 - eps)));
    }
    distance.second.insert(halting.last[n] + 1);
  }
  return distance;
}

// How near the two largest hash values of a key, whose norm is 1, come to each other, where it changes its bucket and
// the loss is no smooth function. Infinite without `lsh`.
double hash_distance(const Problem& problem) {
  const LshTerm* lsh = reference::find_term<LshTerm>(problem.config);
  if (lsh == nullptr) return INFINITY;
  const int64_t hs = problem.config.head_size(), of_round = hs * lsh->buckets / 2;
  double distance = INFINITY;
  Cache<double> cache;
  problem.forward(&cache);
  for (const reference::LayerCache<double>& layer : cache.layers) {
    for (int i = 0; i < problem.config.num_heads * lsh->rounds; i++) {
      const Array<double>& k = layer.heads[i / lsh->rounds].k;
      for (size_t row = 0; row < k.size(); row += hs) {
        Array<double> values = reference::hash_values(&k[row], &layer.rotations[i * of_round], hs, lsh->buckets);
        std::sort(values.rbegin(), values.rend());
        distance = std::min(distance, values[0] - values[1]);
      }
    }
  }
  return distance;
}

// d objective / d (the tensor along `direction`), by central difference. Its error is about h^2/6 times the third
// derivative, plus 1e-16 / h from rounding: the two meet near h = 1e-5.
double directional_derivative(Problem& problem, Tensor<double>& tensor, const std::vector<double>& direction) {
  const double h = 1e-5;
  const std::vector<double> saved = tensor.data;
  double loss[2];
  for (int side = 0; side < 2; side++) {
    for (size_t i = 0; i < saved.size(); i++) tensor.data[i] = saved[i] + (side == 0 ? h : -h) * direction[i];
    loss[side] = problem.objective();
  }
  tensor.data = saved;
  return (loss[0] - loss[1]) / (2 * h);
}

// Each tensor's derivatives are compared as one vector: by all its elements where they are few, else by 12
// drawn ones; and one along a random direction that moves all elements at once, so that no element goes unseen. As a
// vector, because a single true derivative may be zero, like every key bias's, to which softmax is blind.
TEST_P(ReferenceGradients, AreCentralDifferencesOfTheLoss) {
  Problem problem(GetParam());
  const auto [distance, lengths] = halting_distance(problem);
  EXPECT_GT(distance, 1e-3) << "a difference may move a halting decision: draw other parameters";
  EXPECT_NE(lengths.size(), 1) << "all tokens halt after the same cycle";
  EXPECT_GT(hash_distance(problem), 1e-3) << "a difference may move a key to another bucket: draw other parameters";
  const Tensors<double> grads = problem.grads();
  std::mt19937_64 random(99);
  double worst = 0;
  for (auto& [name, param] : problem.params) {
    const size_t size = param.data.size();
    if (reference::is_constant(name)) {
      EXPECT_EQ(grads.at(name).data, std::vector<double>(size)) << name;
      continue;
    }
    std::vector<size_t> elements(size);
    std::iota(elements.begin(), elements.end(), 0);
    for (size_t i = 0; i < size; i++) std::swap(elements[i], elements[i + random() % (size - i)]);
    if (size > 24) elements.resize(12);

    const std::vector<double>& grad = grads.at(name).data;
    std::vector<double> expected, actual;
    for (size_t i : elements) {
      std::vector<double> direction(size);
      direction[i] = 1;
      expected.push_back(directional_derivative(problem, param, direction));
      actual.push_back(grad[i]);
    }
    std::vector<double> direction(size);
    for (double& d : direction) d = uniform(random) / std::sqrt(double(size));
    expected.push_back(directional_derivative(problem, param, direction));
    actual.push_back(std::inner_product(grad.begin(), grad.end(), direction.begin(), 0.0));

    const double error = relative_error(actual, expected);
    worst = std::max(worst, error);
    EXPECT_LE(error, 1e-6) << name;
    double norm = 0;
    for (double g : actual) norm = std::max(norm, std::fabs(g));
    EXPECT_GT(norm, 1e-4) << name << ": too small a gradient to prove anything";
  }
  printf("%s: worst relative error of a tensor's gradient %.1e\n", GetParam().name, worst);
}

// What is dead is written beside the case, and everything else has to matter: each head's q, k and v of each layer,
// moved by themselves.
TEST_P(ReferenceWiring, DeadHeadsHaveNoGradientAndNoEffect) {
  Problem problem(GetParam());
  const ModelConfig& config = problem.config;
  const int hs = config.head_size(), kv_heads = reference::num_kv_heads(config);
  const int layers = reference::layers_in_cycle(config);
  std::string dead_kv = GetParam().dead_kv, dead_map = GetParam().dead_map;
  dead_kv.erase(std::remove(dead_kv.begin(), dead_kv.end(), ' '), dead_kv.end());
  if (dead_kv.empty()) dead_kv.assign(layers * kv_heads, '.');
  if (dead_map.empty()) dead_map.assign(layers, '.');
  ASSERT_EQ(int(dead_kv.size()), layers * kv_heads);
  ASSERT_EQ(int(dead_map.size()), layers);

  const Tensors<double> grads = problem.grads();
  const double loss = problem.loss();
  for (int l = 0; l < layers; l++) {
    const std::string c_attn = "h." + std::to_string(l) + ".attn.c_attn";
    const int width = int(problem.params.at(c_attn + ".weight").shape[1]);
    for (int first = 0; first < width; first += hs) {  // the columns of one head's q, k or v
      const int head = first / hs - config.num_heads;  // of k, then of v; negative for q
      bool dead = head < kv_heads && dead_map[l] == 'x';
      const char dead_parts = head < 0 ? '.' : dead_kv[l * kv_heads + head % kv_heads];
      dead |= dead_parts == 'x' || dead_parts == (head < kv_heads ? 'k' : 'v');
      double largest = 0;
      Problem changed = problem;
      for (const std::string& name : {c_attn + ".weight", c_attn + ".bias"}) {
        Tensor<double>* param = reference::find(changed.params, name);
        if (param == nullptr) continue;
        for (size_t i = 0; i < param->data.size(); i++) {
          if (int(i % width) < first || int(i % width) >= first + hs) continue;
          largest = std::max(largest, std::fabs(grads.at(name).data[i]));
          param->data[i] += 0.3;
        }
      }
      const std::string where = "layer " + std::to_string(l) + ", columns from " + std::to_string(first);
      if (dead) {
        EXPECT_EQ(largest, 0) << where;
        EXPECT_EQ(changed.loss(), loss) << where;
      } else {
        EXPECT_GT(largest, 1e-5) << where;
        EXPECT_GT(std::fabs(changed.loss() - loss), 1e-7) << where;
      }
    }
  }
}

TEST_P(ReferenceWiring, NoLossDependsOnLaterTokens) {
  Problem problem(GetParam());
  const int B = problem.B, T = problem.T;
  auto losses = [&] { return problem.forward().token_losses; };
  const auto before = losses();
  for (int changed = 0; changed < T; changed++) {
    const std::vector<int> inputs = problem.inputs;
    for (int b = 0; b < B; b++) {
      int& token = problem.inputs[b * T + changed];
      token = (token + 1) % problem.config.vocab_size;
    }
    const auto after = losses();
    for (int n = 0; n < B * T; n++) {
      if (n % T < changed) { EXPECT_EQ(after[n], before[n]) << "position " << n % T << " of token " << changed; }
      if (n % T == changed) { EXPECT_NE(after[n], before[n]) << "position " << changed; }
    }
    problem.inputs = inputs;
  }
}

TEST_P(ReferenceWiring, NoLossDependsOnLaterPositions) {
  Problem problem(GetParam());
  if (problem.params.count("wpe.weight") == 0) return;  // the test above is of every wiring
  for (WiringTerm& term : problem.config.wiring.terms)
    if (auto* act = std::get_if<ActTerm>(&term)) act->cost = 0;  // mean N + R has a gradient at every position
  const int B = problem.B, T = problem.T, V = problem.config.vocab_size, C = problem.config.channels;
  Cache<double> cache;
  const Result<double> result =
      reference::forward(problem.config, problem.params, problem.inputs, problem.targets, B, T, &cache);
  for (int t = 0; t < T; t++) {
    // Where the probabilities are set to the targets', a loss has no gradient: what remains is the gradient of the
    // losses at t.
    Cache<double> cache_t = cache;
    for (int n = 0; n < B * T; n++)
      for (int token = 0; n % T != t && token < V; token++) cache_t.probs[n * V + token] = token == problem.targets[n];
    Tensors<double> grads = reference::make_parameters<double>(problem.config);
    reference::backward(problem.config, problem.params, cache_t, grads);
    const std::vector<double>& d_wpe = grads.at("wpe.weight").data;
    double own = 0, later = 0;
    for (size_t i = 0; i < d_wpe.size(); i++) {
      double& largest = int(i) / C == t ? own : later;
      if (int(i) / C >= t) largest = std::max(largest, std::fabs(d_wpe[i]));
    }
    EXPECT_GT(own, 1e-4) << "position " << t;
    EXPECT_EQ(later, 0) << "position " << t;

    Problem changed = problem;
    for (int n = 0; n < B * T; n++)
      if (n % T > t) changed.inputs[n] = (changed.inputs[n] + 1) % V;
    const Array<double> losses =
        reference::forward(changed.config, changed.params, changed.inputs, changed.targets, B, T).token_losses;
    for (int n = 0; n < B * T; n++) {
      if (n % T > t) continue;
      EXPECT_EQ(losses[n], result.token_losses[n]) << "position " << n % T << ", changed after " << t;
    }
  }
}

// ----------------------------------------------------------------------------
// What the terms say

ModelConfig config_of(const std::string& wiring, int num_layers, int num_heads) {
  ModelConfig config;
  config.num_layers = num_layers, config.num_heads = num_heads, config.channels = 4 * num_heads;
  config.wiring = parse_wiring(wiring);
  validate(config);
  return config;
}

// The sources of each head of each layer: layers separated by spaces, heads by bars; k/v where these are of two layers.
std::string sources_text(const std::string& wiring, int num_layers, int num_heads) {
  const ModelConfig config = config_of(wiring, num_layers, num_heads);
  std::string text;
  for (int l = 0; l < num_layers; l++) {
    for (int head = 0; head < num_heads; head++) {
      text += head > 0 ? "|" : l > 0 ? " " : "";
      for (const auto& [k, v] : reference::source_layers(config, l, head))
        text += std::to_string(k) + (k == v ? "" : "/" + std::to_string(v));
    }
  }
  return text;
}

TEST(Reference, SourcesAreTheLayersThatTheTermsName) {
  EXPECT_EQ(sources_text("plain", 2, 3), "0|0|0 1|1|1");
  EXPECT_EQ(sources_text("sla(1,2)", 3, 3), "0|0|0 1|0|0 2|1|1");
  EXPECT_EQ(sources_text("sla(1,0:1) sla(2,1:2)", 3, 3), "0|0|0 0|1|1 1|0|2");
  EXPECT_EQ(sources_text("also(1,2) also(2,1)", 3, 3), "0|0|0 1|01|01 2|12|012");
  EXPECT_EQ(sources_text("also(1,0:2) also(1,1:3)", 2, 3), "0|0|0 01|01|01");  // a layer that is there already
  EXPECT_EQ(sources_text("share(3)", 5, 2), "0|0 0|0 0|0 3|3 3|3");
  EXPECT_EQ(sources_text("layers(0_1_0_2)", 4, 2), "0|0 1|1 0|0 2|2");
  EXPECT_EQ(sources_text("share(2) sla(1,1)", 4, 2), "0|0 0|0 2|1 2|2");
  EXPECT_EQ(sources_text("sla(1,1) share(2)", 4, 2), "0|0 0|0 2|2 2|2");
  EXPECT_EQ(sources_text("layers(0_0_0) also(1,1)", 3, 2), "0|0 0|0 0|01");
  EXPECT_EQ(sources_text("sla(1,1,v)", 3, 2), "0|0 1|1/0 2|2/1");
  EXPECT_EQ(sources_text("share(2,k) sla(2,0:1,v)", 4, 2), "0|0 0/1|0/1 2/0|2 2/1|2/3");
  EXPECT_EQ(sources_text("sla(1,1,k) sla(1,1,v)", 3, 2), "0|0 1|0 2|1");
}

// A row for each of six queries, an x for each key that it sees.
std::string mask_text(const std::string& wiring, int l, int head) {
  const int T = 6;
  ModelConfig config = config_of(wiring, 3, 3);
  config.end_of_text = 1;
  const std::vector<bool> visible = reference::visibility(config, l, head, {0, 0, 1, 0, 1, 0}, 1, 0, T);
  std::string text;
  for (int i = 0; i < T * T; i++) text += std::string(i > 0 && i % T == 0 ? " " : "") + (visible[i] ? "x" : ".");
  return text;
}

TEST(Reference, MasksAreAsDrawn) {
  const char* causal = "x..... xx.... xxx... xxxx.. xxxxx. xxxxxx";
  const char* strided_a1 = "x..... xx.... xxx... .xxx.. ..xxx. ...xxx";
  const char* strided_a2 = "x..... .x.... x.x... .x.x.. x.x.x. .x.x.x";
  const char* strided_union = "x..... xx.... xxx... .xxx.. x.xxx. .x.xxx";
  const char* fixed_a1 = "x..... xx.... xxx... ...x.. ...xx. ...xxx";
  const char* fixed_a2 = "...... ...... ..x... ..x... ..x... ..x..x";
  const char* fixed_union = "x..... xx.... xxx... ..xx.. ..xxx. ..xxxx";
  const char* window = "x..... xx.... .xx... ..xx.. ...xx. ....xx";
  EXPECT_EQ(mask_text("plain", 2, 1), causal);
  EXPECT_EQ(mask_text("window(2)", 1, 0), window);
  EXPECT_EQ(mask_text("window(2,LS)", 0, 0), causal);
  EXPECT_EQ(mask_text("window(2,LS)", 1, 0), window);
  EXPECT_EQ(mask_text("window(2,LS)", 2, 0), causal);
  for (int l = 0; l < 3; l++) {
    for (int head = 0; head < 3; head++) {
      EXPECT_EQ(mask_text("strided(2)", l, head), head < 2 ? strided_a1 : strided_a2);
      EXPECT_EQ(mask_text("strided(2,layers)", l, head), l != 1 ? strided_a1 : strided_a2);
      EXPECT_EQ(mask_text("strided(2,union)", l, head), strided_union);
      EXPECT_EQ(mask_text("fixed(3,1)", l, head), head < 2 ? fixed_a1 : fixed_a2);
      EXPECT_EQ(mask_text("fixed(3,1,layers)", l, head), l != 1 ? fixed_a1 : fixed_a2);
      EXPECT_EQ(mask_text("fixed(3,1,union)", l, head), fixed_union);
    }
  }
  EXPECT_EQ(mask_text("documents", 1, 0), "x..... xx.... ..x... ..xx.. ....x. ....xx");
  EXPECT_EQ(mask_text("fixed(3,1) documents", 0, 0), "x..... xx.... ..x... ...x.. ....x. ....xx");
  // A key is hidden if any of the masks hides it.
  EXPECT_EQ(mask_text("window(4) strided(2)", 0, 2), "x..... .x.... x.x... .x.x.. ..x.x. ...x.x");
  EXPECT_EQ(mask_text("strided(2) window(4)", 0, 2), "x..... .x.... x.x... .x.x.. ..x.x. ...x.x");
}

// Two sources of three positions, all scores equal.
TEST(Reference, TopkTakesTheFirstOfEqualScores) {
  const Array<double> q(3, 0.0), k = {3, 1, 4, 1, 5, 9};
  const std::vector<bool> causal = {true, false, false, true, true, false, true, true, true};
  const double third = 1.0 / 3;
  const Array<double> expected = {0.5,   0,     0,     0.5,   0, 0,   // sees 0 and 3
                                  third, third, 0,     third, 0, 0,   // 0, 1, 3 and 4
                                  third, third, third, 0,     0, 0};  // all
  EXPECT_EQ(reference::attention_map<double>(q, k, {}, causal, 3, nullptr, 1, 3, 1), expected);
}

TEST(Reference, AQueryWithoutKeysGivesZero) {
  const Array<double> q = {2, 3}, k = {1, -1}, v = {5, 7};
  const Array<double> map = reference::attention_map<double>(q, k, {}, {false, false, true, true}, 0, nullptr, 1, 2, 1);
  EXPECT_EQ(Array<double>(map.begin(), map.begin() + 2), Array<double>({0, 0}));
  const Array<double> out = reference::apply_map(map, v, 1, 2, 1);
  EXPECT_EQ(out[0], 0);
  EXPECT_NEAR(out[1], 5 + 2 / (1 + std::exp(6.0)), 1e-14);  // scores 3 and -3
}

// ----------------------------------------------------------------------------
// Hashed attention

// Unit vectors in the plane. The first round's buckets are the quarters around 0, 90, 180 and 270 degrees, the second
// round's those around 45, 135, 225 and 315.
TEST(Reference, AQuerySeesEarlierKeysOfItsBuckets) {
  const double degrees[] = {10, 80, 190, 350, 100, 200};
  Array<double> k;
  for (double angle : degrees) k.push_back(std::cos(angle * M_PI / 180)), k.push_back(std::sin(angle * M_PI / 180));
  const double rotations[] = {1, 0, 0, 1, 1, -1, 1, 1};
  auto seen = [&](int rounds) {
    LshTerm lsh;
    lsh.buckets = 4, lsh.rounds = rounds;
    std::string text;
    for (bool sees : reference::shared_buckets(reference::buckets_of(k, rotations, lsh, 2), 1, 6))
      text += sees ? "x" : ".";
    return text;
  };
  EXPECT_EQ(seen(1), "x....."
                     ".x...."
                     "..x..."
                     "x....."
                     ".x...."
                     "..x...");
  EXPECT_EQ(seen(2), "x....."
                     "x....."
                     "..x..."
                     "x....."
                     ".x...."
                     "..x...");
}

// For a head of layer l: the output of attention over all earlier positions, the first over itself, with k = q / |q|.
Array<double> attention_to_all_earlier(const Problem& problem, const Array<double>& qkv, int head) {
  const int C = problem.config.channels, hs = problem.config.head_size(), T = problem.T;
  auto q = [&](int n, int i) { return qkv[n * 2 * C + head * hs + i]; };
  auto v = [&](int n, int i) { return qkv[n * 2 * C + C + head * hs + i]; };
  Array<double> out;
  for (int n = 0; n < problem.B * T; n++) {
    const int first = n - n % T, end = std::max(n, first + 1);
    std::vector<double> weights;
    for (int j = first; j < end; j++) {
      double dot = 0, squares = 0;
      for (int i = 0; i < hs; i++) dot += q(n, i) * q(j, i), squares += q(j, i) * q(j, i);
      weights.push_back(std::exp(dot / std::sqrt(squares * hs)));
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (int i = 0; i < hs; i++) {
      out.push_back(0);
      for (int j = first; j < end; j++) out.back() += weights[j - first] / sum * v(j, i);
    }
  }
  return out;
}

// A bias brings the angles between keys below 90 degrees, so that each of 16 rounds of 2 buckets has most pairs meet.
TEST(Reference, KeysThatMeetInSomeRoundAreAllSeen) {
  Problem problem({"", 2, 4, "lsh(2,16)"});
  for (const char* name : {"h.0.attn.c_attn.bias", "h.1.attn.c_attn.bias"}) {
    std::vector<double>& bias = problem.params.at(name).data;
    for (int i = 0; i < problem.config.channels; i++) bias[i] += 1;
  }
  const int B = problem.B, T = problem.T, hs = problem.config.head_size();
  Cache<double> cache;
  problem.forward(&cache);
  for (const reference::LayerCache<double>& layer : cache.layers) {
    for (int i = 0; i < problem.config.num_heads; i++) {
      const reference::HeadCache<double>& head = layer.heads[i];
      for (int n = 0; n < B * T; n++)
        for (int j = 0; j < n % T; j++) ASSERT_GT(head.map[n * T + j], 0) << "positions " << j << " and " << n % T;
      const Array<double> out = reference::take_columns<double>({&layer.heads_out}, i * hs, B, T, hs);
      EXPECT_LE(relative_error(out, attention_to_all_earlier(problem, layer.qkv, i)), 1e-14);
    }
  }
}

// They name the buckets otherwise: x R and -x R exchanged, and columns of R in reverse.
TEST(Reference, NamesOfBucketsDoNotMatter) {
  Problem problem({"", 3, 4, "lsh(6,2)"});
  const double loss = problem.loss();
  for (auto& [name, param] : problem.params) {
    if (!reference::is_constant(name)) continue;
    for (size_t row = 0; row < param.data.size(); row += 3) std::swap(param.data[row], param.data[row + 2]);
    if (name[2] == '1')
      for (double& x : param.data) x = -x;
  }
  EXPECT_EQ(problem.loss(), loss);
  std::vector<double>& some = problem.params.at("h.1.attn.rotations").data;
  for (size_t i = 0; i < some.size(); i += 2) some[i] = -some[i];
  EXPECT_NE(problem.loss(), loss);
}

// ----------------------------------------------------------------------------
// Gates and halting where they decide nothing

// Every element of the tensors whose names end so becomes `value`.
void set_all(Problem& problem, const std::string& ending, double value) {
  int count = 0;
  for (auto& [name, param] : problem.params) {
    if (name.size() < ending.size() || name.compare(name.size() - ending.size(), ending.size(), ending) != 0) continue;
    param.data.assign(param.data.size(), value);
    count++;
  }
  ASSERT_GT(count, 0) << ending;
}

// The problem with another wiring and number of layers, and the same values of the parameters that both models have;
// a tensor that is shorter there has the first ones.
Problem with_wiring(const Problem& problem, int num_layers, const char* wiring) {
  Problem other({"", num_layers, problem.config.num_heads, wiring});
  for (auto& [name, param] : other.params) {
    const std::vector<double>& data = problem.params.at(name).data;
    param.data.assign(data.begin(), data.begin() + param.data.size());
  }
  return other;
}

TEST(Reference, ATokenThatNeverHaltsTakesTheLastState) {
  Problem problem({"", 6, 4, "universal(2) act(0.1)"});
  set_all(problem, "halt.bias", -30);
  const Result<double> result = problem.forward();
  EXPECT_NEAR(result.loss, with_wiring(problem, 6, "universal(2)").loss(), 1e-9);
  EXPECT_NEAR(result.ponder, 4, 1e-9);  // three cycles and R = 1
}

TEST(Reference, ATokenThatHaltsAtOnceTakesTheFirstState) {
  Problem problem({"", 6, 4, "universal(2) act(0.1)"});
  set_all(problem, "halt.bias", 30);
  const Result<double> result = problem.forward();
  EXPECT_NEAR(result.loss, with_wiring(problem, 2, "universal(2)").loss(), 1e-9);
  EXPECT_NEAR(result.ponder, 2, 1e-9);
}

// With p_c = 1/2 after every cycle: sums of 1/2, 1, 3/2.
TEST(Reference, ATokenHaltsWhereItsSumReachesOneMinusEps) {
  const std::pair<const char*, std::vector<double>> cases[] = {{"universal(1) act(0.5)", {1, 0, 0}},
                                                               {"universal(1) act(0.49)", {0.5, 0.5, 0}},
                                                               {"universal(1) act(0.001)", {0.5, 0.5, 0}}};
  for (const auto& [wiring, weights] : cases) {
    Problem problem({"", 3, 4, wiring});
    set_all(problem, "halt.weight", 0);
    set_all(problem, "halt.bias", 0);
    Cache<double> cache;
    const double ponder = problem.forward(&cache).ponder;
    EXPECT_EQ(ponder, weights[0] == 1 ? 2 : 2.5) << wiring;
    for (int cycle = 0; cycle < 3; cycle++) EXPECT_EQ(cache.halting.weight(cycle, 5), weights[cycle]) << wiring;
  }
}

TEST(Reference, GatesWithALargeBiasIgnoreTheirBranches) {
  Problem problem({"", 3, 4, "gru"});
  set_all(problem, "gru_1.bias", 30);
  set_all(problem, "gru_2.bias", 30);
  Problem without = with_wiring(problem, 3, "plain");
  set_all(without, "c_proj.weight", 0);
  set_all(without, "c_proj.bias", 0);
  EXPECT_NEAR(problem.loss(), without.loss(), 1e-9);
}

// ----------------------------------------------------------------------------

TEST(Reference, BackwardAddsScaleTimesTheGradient) {
  for (const char* wiring : {"sla(3,3)", "universal(1) act(0.1,0.5) gru", "reversible lsh(4,2)"}) {
    const Problem problem({"", 4, 4, wiring});
    const Tensors<double> once = problem.grads();
    Tensors<double> twice = reference::make_parameters<double>(problem.config);
    Cache<double> cache;
    problem.forward(&cache);
    reference::backward(problem.config, problem.params, cache, twice, 0.25);
    reference::backward(problem.config, problem.params, cache, twice, 1.5);
    for (const auto& [name, grad] : once) {
      std::vector<double> expected = grad.data;
      for (double& g : expected) g *= 1.75;
      EXPECT_LE(relative_error(twice.at(name).data, expected), 1e-14) << wiring << ": " << name;
    }
  }
}

// ----------------------------------------------------------------------------
// AdamW, against its closed form: after steps 1 and 2, m / (1 - beta^t) is a weighted mean of the two gradients.

TEST(Reference, AdamWTakesPyTorchsSteps) {
  Tensors<double> params = {{"matrix", {{1, 2}, {1, -2}}}, {"vector", {{2}, {3, 0.5}}}};
  const Tensors<double> zeros = {{"matrix", {{1, 2}, {0, 0}}}, {"vector", {{2}, {0, 0}}}};
  const Tensors<double> g1 = {{"matrix", {{1, 2}, {0.3, -1.2}}}, {"vector", {{2}, {0.4, 0.0}}}};   // norm 1.3
  const Tensors<double> g2 = {{"matrix", {{1, 2}, {-0.1, 0.2}}}, {"vector", {{2}, {0.2, -0.4}}}};  // norm 0.5
  // The clip factors, 0.75 / (1.3 + 1e-6) and 1. An eps this large makes the size of a gradient matter.
  const AdamWOptions options = {0.1, 0.9, 0.8, 0.05, 0.25, 0.75};
  const double factor1 = 0.75 / 1.300001;

  Tensors<double> m = zeros, v = zeros;
  const Tensors<double> start = params;
  EXPECT_NEAR(reference::adamw(params, g1, m, v, 1, options), 1.3, 1e-15);
  const Tensors<double> middle = params;
  EXPECT_NEAR(reference::adamw(params, g2, m, v, 2, options), 0.5, 1e-15);
  for (const auto& [name, param] : params) {
    const double keep = name == "matrix" ? 1 - 0.1 * 0.25 : 1;
    for (int i = 0; i < 2; i++) {
      const double a = g1.at(name).data[i] * factor1, b = g2.at(name).data[i];
      EXPECT_NEAR(middle.at(name).data[i], start.at(name).data[i] * keep - 0.1 * a / (std::fabs(a) + 0.05), 1e-14);
      const double m_hat = (0.9 * a + b) / 1.9, v_hat = (0.8 * a * a + b * b) / 1.8;
      EXPECT_NEAR(param.data[i], middle.at(name).data[i] * keep - 0.1 * m_hat / (std::sqrt(v_hat) + 0.05), 1e-14);
    }
  }
}

TEST(Reference, AdamWLeavesConstantsAsTheyAre) {
  Tensors<double> params = {{"h.0.attn.rotations", {{1, 1, 1, 2}, {1, -2}}}}, zeros = params;
  zeros.begin()->second.data = {0, 0};
  const Tensors<double> before = params;
  Tensors<double> m = zeros, v = zeros;
  reference::adamw(params, zeros, m, v, 1, AdamWOptions());
  EXPECT_EQ(params.begin()->second.data, before.begin()->second.data);
}

// Where the norm is as small as the 1e-6 beside it, that shows: clip 1e-6 / (3e-6 + 1e-6) is a quarter, not a third.
TEST(Reference, ClippingAddsPyTorchsEpsilonToTheNorm) {
  Tensors<double> params = {{"vector", {{1}, {1}}}}, m = {{"vector", {{1}, {0}}}}, v = m;
  const Tensors<double> grads = {{"vector", {{1}, {3e-6}}}};
  reference::adamw(params, grads, m, v, 1, AdamWOptions{1, 0.9, 0.95, 1e-6, 0, 1e-6});
  EXPECT_NEAR(params.at("vector").data[0], 1 - 0.75 / 1.75, 1e-12);
}

// ----------------------------------------------------------------------------
// Muon, of matrices whose singular values and vectors are known

// The five polynomials act on the singular values alone; by hand, for values s on the diagonal of a matrix with rotated
// rows.
TEST(Reference, MuonBringsSingularValuesNearOne) {
  const double c = std::cos(0.7), s = std::sin(0.7), values[] = {3, 0.2}, norm = std::hypot(3, 0.2);
  const std::vector<double> g = {c * 3, -s * 0.2, 0, s * 3, c * 0.2, 0};  // (2, 3): a rotation times diag(3, 0.2)
  auto polynomials = [](double x) {
    for (int i = 0; i < 5; i++) x = 3.4445 * x - 4.7750 * std::pow(x, 3) + 2.0315 * std::pow(x, 5);
    return x;
  };
  const double p0 = polynomials(values[0] / norm), p1 = polynomials(values[1] / norm);
  for (double p : {p0, p1}) EXPECT_NEAR(p, 0.9, 0.25);
  const std::vector<double> o = {c * p0, -s * p1, 0, s * p0, c * p1, 0};
  std::vector<double> w = {1, 2, 3, 4, 5, 6}, m(6, 0.0);
  reference::muon(w, m, g, 2, 3, {0.01, 0.9, 0.5});
  for (int i = 0; i < 6; i++) {
    // u is g times a number: 0.9 * 0.1 + 0.1.
    EXPECT_NEAR(w[i], (i + 1) * (1 - 0.005) - 0.01 * 0.2 * std::sqrt(3.0) * o[i], 1e-12) << i;
    EXPECT_NEAR(m[i], 0.1 * g[i], 1e-15) << i;
  }
  std::vector<double> transposed_w = {1, 4, 2, 5, 3, 6}, transposed_m(6, 0.0);
  const std::vector<double> transposed_g = {g[0], g[3], g[1], g[4], g[2], g[5]};
  reference::muon(transposed_w, transposed_m, transposed_g, 3, 2, {0.01, 0.9, 0.5});
  for (int i = 0; i < 6; i++) EXPECT_NEAR(transposed_w[i % 3 * 2 + i / 3], w[i], 1e-12) << i;
  // Momentum: the second step's u is momentum m + (1 - momentum) g of the new m, here 0.9 (0.09 - 0.1) + 0.1 (-1) =
  // -0.109 times g.
  std::vector<double> opposite(6), second = w;
  for (int i = 0; i < 6; i++) opposite[i] = -g[i];
  reference::muon(second, m, opposite, 2, 3, {0.01, 0.9, 0});
  for (int i = 0; i < 6; i++) EXPECT_NEAR(second[i], w[i] + 0.01 * 0.2 * std::sqrt(3.0) * o[i], 1e-12) << i;
}

// ----------------------------------------------------------------------------
// The golden cases

// The case's parameters as the reference holds them; without the bias tensors of a model without biases.
template <class Real>
Tensors<Real> golden_parameters(const GoldenCase& golden) {
  Tensors<Real> params = reference::make_parameters<Real>(golden.config);
  for (auto& [name, param] : params) {
    const GoldenTensor& tensor = golden.model.at(name);
    EXPECT_EQ(param.shape, tensor.shape) << name;
    param.data.assign(tensor.data.begin(), tensor.data.end());
  }
  return params;
}

template <class Real>
struct GoldenRun {
  std::vector<double> losses, grad_norms;  // (steps)
  Array<Real> token_losses;                // (B, T)  of the first micro-batch
  Tensors<Real> grads;                     // of step 1
  double val_loss = 0;                     // before training
};

// The case's training run, computed by the reference.
template <class Real>
GoldenRun<Real> run_golden(const GoldenCase& golden) {
  const ModelConfig& config = golden.config;
  const int B = golden.batch_size, T = golden.seq_len, accum = golden.grad_accum_steps;
  const AdamWOptions options = {golden.learning_rate, golden.beta1,        golden.beta2,
                                golden.eps,           golden.weight_decay, golden.grad_clip};
  GoldenRun<Real> run;
  Tensors<Real> params = golden_parameters<Real>(golden);
  std::vector<int> inputs, targets;
  reference::Memory<Real> memory;
  for (int s = 0; s < golden.num_micro_batches(); s++) {
    golden_micro_batch(golden, s, inputs, targets);
    run.val_loss += reference::forward<Real>(config, params, inputs, targets, B, T, nullptr, &memory).loss /
                    golden.num_micro_batches();
  }
  Tensors<Real> m = reference::make_parameters<Real>(config), v = m;
  memory.clear();
  for (int step = 1; step <= golden.steps; step++) {
    Tensors<Real> grads = reference::make_parameters<Real>(config);
    double loss = 0;
    for (int s = 0; s < accum; s++) {
      golden_micro_batch(golden, (step - 1) * accum + s, inputs, targets);
      Cache<Real> cache;
      const reference::UpdateDraw draw = {golden.dropout, golden.seed, step, s * B, /*routes=*/true};
      const Result<Real> result =
          reference::forward(config, params, inputs, targets, B, T, &cache, &memory, nullptr, draw);
      reference::backward(config, params, cache, grads, 1.0 / accum);
      loss += result.loss / accum;
      if (step == 1 && s == 0) run.token_losses = result.token_losses;
    }
    if (step == 1) run.grads = grads;
    run.losses.push_back(loss);
    run.grad_norms.push_back(reference::adamw(params, grads, m, v, step, options));
  }
  return run;
}

struct ReferenceGolden : testing::TestWithParam<std::string> {};
using ReferenceGoldenInFloat = ReferenceGolden;

std::string case_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

INSTANTIATE_TEST_SUITE_P(All, ReferenceGolden, testing::ValuesIn(golden_case_names()), case_name);
INSTANTIATE_TEST_SUITE_P(Long, ReferenceGoldenInFloat, testing::ValuesIn(golden_case_names()), case_name);

TEST_P(ReferenceGolden, InDoubleItComputesWhatTheIndependentImplementationDid) {
  const GoldenCase golden = read_golden_case(GetParam());
  const GoldenRun<double> run = run_golden<double>(golden);
  // expected.json has all digits of what float64 gave on the same weights: 2e-14 is what was seen to differ.
  const double tolerance = 2e-13;
  double loss_error = 0, norm_error = 0, grad_error = 0;
  ASSERT_EQ(run.losses.size(), golden.losses.size());
  for (size_t i = 0; i < golden.losses.size(); i++) {
    EXPECT_NEAR(run.losses[i], golden.losses[i], tolerance) << "step " << i + 1;
    EXPECT_NEAR(run.grad_norms[i] / golden.grad_norms[i], 1, tolerance) << "step " << i + 1;
    loss_error = std::max(loss_error, std::fabs(run.losses[i] - golden.losses[i]));
    norm_error = std::max(norm_error, std::fabs(run.grad_norms[i] / golden.grad_norms[i] - 1));
  }
  EXPECT_NEAR(run.val_loss, golden.val_loss, tolerance);

  const double float_rounding = 0x1.01p-24;  // the files are float32: each number within 2^-24 of itself
  EXPECT_LE(relative_error(run.token_losses, golden.token_losses), float_rounding);
  size_t trained = 0;
  for (const auto& [name, grad] : run.grads) {
    if (reference::is_constant(name)) continue;
    trained++;
    const double error = relative_error(grad.data, golden.grads.at(name).data);
    EXPECT_LE(error, float_rounding) << name;
    grad_error = std::max(grad_error, error);
  }
  EXPECT_EQ(trained, golden.grads.size());
  printf("%s: off by %.1e in a loss, %.1e in a norm, %.1e in a gradient\n", GetParam().c_str(), loss_error, norm_error,
         grad_error);
}

TEST_P(ReferenceGoldenInFloat, InFloatItsLossesAreThoseOfDouble) {
  const GoldenCase golden = read_golden_case(GetParam());
  const GoldenRun<float> run = run_golden<float>(golden);
  // The untrained w_topk has two scores 2.6e-8 apart, and rounding takes the other: the loss of its eighth
  // micro-batch moves by 3.4e-5.
  if (GetParam() != "w_topk") { EXPECT_NEAR(run.val_loss, golden.val_loss, 2e-6); }
  for (size_t i = 0; i < golden.losses.size(); i++)
    EXPECT_NEAR(run.losses[i], golden.losses[i], 2e-6) << "step " << i + 1;
}
