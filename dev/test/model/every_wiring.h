// Wirings drawn at random against the reference, and what must hold for every kind of wiring.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/model/losses.h"
#include "dev/test/long.h"
#include "dev/test/model/model.h"
#include "dev/test/random_wirings.h"
#include "dev/test/values.h"

// `lsh`, and terms that it goes with.
inline std::vector<std::string> hashing_terms(Draw& draw, int T) {
  std::vector<std::string> terms = {format("lsh(%d,%d)", 2 * draw(1, std::min(T, 16)), draw(1, 5))};
  if (draw.one_in(2)) terms.insert(terms.begin() + draw(0, 1), draw.one_in(2) ? "gru" : "reversible");
  return terms;
}

inline bool none_begins_with(const std::vector<std::string>& terms, const std::vector<std::string>& names) {
  for (const std::string& term : terms)
    for (const std::string& name : names)
      if (term.compare(0, name.size(), name) == 0) return false;
  return true;
}

// Whether terms make a wiring of L layers and h heads.
inline bool fit(const std::vector<std::string>& terms, int L, int h) {
  std::string wiring;
  for (const std::string& t : terms) wiring += " " + t;
  try {
    validate(parse_wiring(wiring), L, h);
  } catch (const UserError&) { return false; }
  return true;
}

// Some of the terms get k or v alone, where the wiring still fits a model of L layers and h heads.
inline void take_keys_or_values_alone(Draw draw, std::vector<std::string>& terms, int L, int h) {
  for (std::string& term : terms) {
    if (none_begins_with({term}, {"sla(", "share("}) || draw.one_in(3)) continue;
    const std::string both = term;
    term.insert(term.size() - 1, draw.one_in(2) ? ",k" : ",v");
    if (!fit(terms, L, h)) term = both;
  }
}

// Half of the wirings that `route` goes with have it.
inline void route_some(Draw draw, std::vector<std::string>& terms, int L, int h) {
  terms.push_back(format("route(0.%d)", draw(3, 9)));
  if (draw.one_in(2) || !fit(terms, L, h)) terms.pop_back();
}

// A case with a random shape, and a wiring with a term of each kind that it may have, in random order.
struct RandomCase {
  std::string wiring;
  GraphCase c;

  explicit RandomCase(uint64_t seed) {
    Draw draw = {seed};
    // In 16 bits every activation is rounded: in a norm over few numbers these errors do not average out.
    const int L = draw(1, is_16_bit ? 4 : 5), h = draw(is_16_bit ? 4 : 1, 6), shortest = is_16_bit ? 40 : 1;
    const int T = draw.one_in(4) ? draw(shortest, 300) : draw(shortest, 70);
    std::vector<std::string> terms;
    auto add = [&](const std::string& term) { terms.insert(terms.begin() + draw(0, int(terms.size())), term); };
    // In shorter sequences maps are almost equal, and a gate's gradient is rounding errors.
    const bool moves_maps = draw.one_in(3) && T >= 8;
    auto heads = [&] {
      const int first = draw(0, h - 1);
      return draw.one_in(2) ? format("%d", draw(1, h)) : format("%d:%d", first, draw(first + 1, h));
    };
    for (int n = draw(0, 2); n > 0 && L > 1 && !moves_maps; n--)
      add(format("%s(%d,%s)", draw.one_in(2) ? "sla" : "also", draw(1, L - 1), heads().c_str()));
    if (!moves_maps && draw.one_in(4)) add(format("share(%d)", draw(1, L)));
    if (!moves_maps && draw.one_in(4)) {
      std::string layers;
      for (int l = 0; l < L; l++) layers += (l > 0 ? "_" : "") + std::to_string(draw(0, l));
      add("layers(" + layers + ")");
    }
    if (moves_maps)
      add(draw.of<std::string>({format("reuse(%d)", draw(1, L)), format("blend(0.%d)", draw(0, 9)), "gate"}));
    std::vector<int> divisors;
    for (int k = 1; k <= h; k++)
      if (h % k == 0) divisors.push_back(k);
    const bool has_groups = draw.one_in(2);
    if (has_groups) add(format("gqa(%d)", draw.of(divisors)));
    if (draw.one_in(2))
      add(format("window(%d%s)", draw(moves_maps ? 4 : 1, T + 3),
                 draw.of<std::string>({"", ",S", ",SL", ",LSS"}).c_str()));
    const std::string how = draw.of<std::string>({"", ",heads", ",layers", ",union"});
    const int s = draw(1, 20), c = draw(1, s);
    const bool is_strided = draw.one_in(4);
    const bool is_fixed = draw.one_in(3);
    if (is_strided) add(format("strided(%d%s)", s, how.c_str()));
    if (is_fixed) add(format("fixed(%d,%d%s)", is_strided ? s + 2 : s, c, how.c_str()));
    const bool rotates = draw.one_in(3);  // pairs of channels
    // In 16 bits gradients that come through gates are less exact, and so must not be small differences.
    const bool is_gated = draw.one_in(4) && (!is_16_bit || terms.empty());
    if (is_gated) add("gru");
    if (rotates) add(draw.of<std::string>({"rope", "rope(50)", "rope(1000000)"}));
    const bool may_have_memory = !moves_maps && !is_strided && !is_fixed;  // or repeat layers
    const bool is_relative = !rotates && may_have_memory && !(is_gated && is_16_bit) && draw.one_in(2);
    if (is_relative) add("relative");
    const bool has_memory = (rotates || is_relative) && may_have_memory && draw.one_in(2);
    std::vector<int> cycles;
    for (int k = 1; k <= L; k++)
      if (L % k == 0) cycles.push_back(k);
    if (has_memory) add(format("memory(%d)", draw(1, 2 * T)));
    else if (may_have_memory && draw.one_in(2)) {
      add(format("universal(%d)", draw.of(cycles)));
      // With weights as small as in 16 bits, all probabilities are nearly 1/2, and their sums stay away from 1 - eps.
      if (draw.one_in(2)) add(format("act(0.%d%s)", draw(2, 4), draw.one_in(2) ? "" : ",0.5"));
    } else if (!is_16_bit && !is_relative && T <= 40 && draw.one_in(6)) add(format("topk(%d)", draw(1, 12)));
    Draw others = {seed + 1000};  // so that what is drawn above and below does not depend on it
    const bool may_be_reversible = !moves_maps && !is_gated && !has_memory;
    if (others.one_in(6)) terms = hashing_terms(others, T);
    else if (may_be_reversible && others.one_in(3) && none_begins_with(terms, {"relative", "universal", "act", "topk"}))
      add("reversible");
    Draw parts = {seed + 2000};
    if (!is_16_bit && parts.one_in(4)) terms.push_back("rmsnorm");
    if (parts.one_in(3)) terms.push_back(parts.of<std::string>({"relu2", "swiglu", "swiglu(56)"}));
    // Through gates, silu and swiglu left gradients of `relative` at a single token that were off by up to 2e-4 in
    // fp32.
    if (!is_gated && !terms.empty() && terms.back() == "relu2" && Draw{seed + 10000}.one_in(2)) terms.back() = "silu";
    if (parts.one_in(4) && none_begins_with(terms, {"relative", "lsh"})) terms.push_back("qknorm");
    if (parts.one_in(4)) terms.push_back("untied");
    // A cap far below the logits passes on 1 - tanh^2 of their quotient, which is near 0, so that the logits' rounding
    // weighs as many times as much as they are larger: in fp16, where 0.5 and no cap left all other gradients off by
    // less than 1.5e-3, a layer's sinks were off by 2.7e-3 with 0.2, and its qkv by 2.7e-3 with 0.1.
    if (parts.one_in(4)) terms.push_back(format("softcap(0.%d)", parts(is_16_bit ? 5 : 1, 9)));
    if (!has_memory && none_begins_with(terms, {"lsh"}) && Draw{seed + 3000}.one_in(4)) terms.push_back("documents");
    if (!moves_maps && Draw{seed + 6000}.one_in(3) &&
        none_begins_with(terms, {"relative", "memory", "universal", "gru", "lsh", "reversible"}))
      terms.push_back("dense");
    take_keys_or_values_alone(Draw{seed + 4000}, terms, L, h);
    if (!moves_maps && Draw{seed + 5000}.one_in(3) &&
        none_begins_with(terms, {"relative", "memory", "universal", "gru", "lsh", "reversible"}))
      terms.push_back(!has_groups && Draw{seed + 7000}.one_in(2) ? "depth"
                      : Draw{seed + 6000}.one_in(2)              ? "router"
                                                                 : "vres");
    if (!moves_maps && !rotates && !is_relative && Draw{seed + 8000}.one_in(3) && none_begins_with(terms, {"lsh"}))
      terms.push_back("alibi");
    if (!moves_maps && Draw{seed + 9000}.one_in(4) && none_begins_with(terms, {"lsh"})) terms.push_back("sinks");
    route_some(Draw{seed + 11000}, terms, L, h);
    for (const std::string& term : terms) wiring += (wiring.empty() ? "" : " ") + term;
    if (terms.empty()) wiring = "plain";
    const WiringTable table = wiring_table(parse_wiring(wiring), L, h);
    // In 16 bits sizes are a GPU's, on the CPU too: in tensors of fewer numbers roundings do not average out.
    constexpr int multiple = std::max(head_size_multiple, is_16_bit ? 8 : 1);
    int hs = multiple > 1 ? multiple * draw(1, 2) : draw(4, 12) + (h < 4 ? 8 : 0);
    if (!table.learns_positions()) hs = hs / 2 * 2;
    // Without biases rounding decides on which side of zero the outputs of branches are, which a gate rectifies.
    const bool has_biases = !draw.one_in(4) || (table.gru && is_16_bit);
    this->c = {"", L, h, h * hs, 61, 300, "", has_biases, T > 70 ? 1 : draw(1, 2), T, table.memory > 0 ? 3 : 1};
  }
};

// A term that is new is drawn above, too.
TEST(RandomWirings, HaveEveryTerm) {
  std::set<std::string> missing;
  for (const WiringTerm& term : known_terms())
    if (!std::holds_alternative<PlainTerm>(term)) missing.insert(info_of(term).syntax.name());
  missing.insert({"keys alone", "values alone"});
  if (is_16_bit) missing.erase("topk"), missing.erase("rmsnorm");  // drawn in fp32 alone
  for (uint64_t seed = 1; seed <= 200; seed++)
    for (const WiringTerm& term : parse_wiring(RandomCase(seed).wiring).terms) {
      missing.erase(info_of(term).syntax.name());
      if (const auto* sla = std::get_if<SlaTerm>(&term); sla && sla->part.is_one())
        missing.erase(sla->part.k ? "keys alone" : "values alone");
    }
  EXPECT_EQ(missing, std::set<std::string>());
}

TEST(LongRandomWirings, HaveTheReferencesLossesAndGradients) {
  constexpr int cases = head_size_multiple > 1 || is_16_bit ? 30 : 200;
  for (uint64_t seed = 1; seed <= cases; seed++) {
    RandomCase random(seed);
    const std::string trace =
        format("seed %d: %s; %d layers, %d heads of %d, B %d, T %d", int(seed), random.wiring.c_str(), random.c.L,
               random.c.h, random.c.C / random.c.h, random.c.B, random.c.T);
    SCOPED_TRACE(trace);
    random.c.name = trace.c_str(), random.c.wiring = random.wiring.c_str();
    expect_equal_to_reference(random.c, int(seed % 5), /*keep_dead_kv=*/seed % 7 == 0);
  }
}

// Heads as large as wgmma's kernels take, and wirings whose attention is their kind: all keys before the query, of one
// source.
TEST(LongRandomWirings, OfLargeHeadsHaveThemToo) {
  uint64_t seed = 1000;
  for (int cases = 0; cases < 6; seed++) {
    RandomCase random(seed);
    GraphCase& c = random.c;
    const WiringTable table = wiring_table(parse_wiring(random.wiring), c.L, c.h);
    bool is_plain = table.topk == 0 && table.lsh_buckets == 0 && table.memory == 0 && !table.documents &&
                    !table.relative && !table.sinks && table.mix == WiringTable::Mix::none;
    for (const AttentionMask& mask : table.masks) is_plain &= mask.is_causal() && mask.slope() == 0;
    for (const auto& sources : table.source_layers) is_plain &= sources.size() == 1;
    Draw draw = {seed + 12000};
    const int hs = draw.of<int>({40, 56, 64, 104, 128});
    if (!is_plain || c.h * hs > 256) continue;
    c.C = c.h * hs, c.T = draw(60, 200), c.B = draw(1, 2), cases++;
    const std::string trace = format("seed %d: %s; %d layers, %d heads of %d, B %d, T %d", int(seed),
                                     random.wiring.c_str(), c.L, c.h, hs, c.B, c.T);
    SCOPED_TRACE(trace);
    c.name = trace.c_str(), c.wiring = random.wiring.c_str();
    expect_equal_to_reference(c, int(seed % 5));
  }
}

// A wiring for each term, and combinations. The emulated GPU, where each takes seconds, has every second one: in bf16
// not the same as in fp32.
const char* const every_term[] = {"plain",
                                  "sla(3,2)",
                                  "also(1,2) also(2,1:3)",
                                  "share(2)",
                                  "layers(0_0_1_3)",
                                  "gqa(1)",
                                  "window(9,SSL)",
                                  "strided(6)",
                                  "strided(5,union)",
                                  "fixed(8,3)",
                                  "fixed(6,2,union)",
                                  "topk(4)",
                                  "reuse(2)",
                                  "blend(0.4)",
                                  "gate",
                                  "gqa(2) sla(2,3) window(11)",
                                  "share(2) strided(7,layers)",
                                  "also(2,4) topk(6)",
                                  "reuse(3) fixed(9,1) gqa(2)",
                                  "gate window(10,SL) gqa(2)",
                                  "blend(0.7) topk(5)",
                                  "rope",
                                  "rope(100) sla(2,3) gqa(2) window(9,SL)",
                                  "rope reuse(2)",
                                  "relative",
                                  "relative sla(2,3) gqa(2) window(9,SL)",
                                  "universal(2) sla(3,2)",
                                  "rope universal(1) gqa(2) window(9,SL)",
                                  "alibi",
                                  "alibi sinks strided(8) also(1,2)",
                                  "sinks window(9,SL) gqa(2)",
                                  "documents sla(3,2)",
                                  "documents strided(8) also(1,2)",
                                  "relative documents window(9,SL) gqa(2)",
                                  "gate documents fixed(7,2,union)",
                                  "documents also(2,4) topk(4)",
                                  "documents universal(2) rope",
                                  "rmsnorm",
                                  "rmsnorm reversible sla(1,2) rope",
                                  "qknorm",
                                  "qknorm rope gqa(2) sla(2,3) window(9,SL)",
                                  "vres",
                                  "vres rope gqa(2) sla(2,3) also(1,1)",
                                  "vres sla(1,1:2,k) share(2,v)",
                                  "depth",
                                  "depth rope sla(2,3) also(1,1) qknorm",
                                  "depth sla(1,1:2,k) share(2,v)",
                                  "route(0.5) sla(2,3)",
                                  "router gqa(2)",
                                  "router qknorm rope sla(2,3) window(9,SL)",
                                  "relu2 gqa(2)",
                                  "swiglu gate",
                                  "softcap(0.5)",
                                  "untied universal(2)",
                                  "modern sla(2,3)",
                                  "dense",
                                  "dense rope gqa(2) sla(2,3) also(1,1)",
                                  "gru",
                                  "universal(2) gru relative also(1,2)",
                                  "universal(1) act(0.3)",
                                  "universal(2) act(0.3) relative sla(2,3)",
                                  "reversible",
                                  "reversible rope sla(3,2) gqa(2) window(9,SL)",
                                  "lsh(4,2)",
                                  "lsh(6,1) reversible",
                                  "strided(3) fixed(8,3)",
                                  "fixed(7,2,union) strided(4,union) gqa(2)"};

inline std::vector<std::string> wirings_to_try() {
  std::vector<std::string> wirings;
  const size_t step = head_size_multiple > 1 ? 2 : 1;
  for (size_t i = is_16_bit ? 1 : 0; i < std::size(every_term); i += step) {
    const bool rounding_changes_the_choice = is_16_bit && std::string(every_term[i]).find("topk") != std::string::npos;
    if (!rounding_changes_the_choice) wirings.push_back(every_term[i]);
  }
  return wirings;
}

// If the loss is position t's alone, what comes after has a gradient of exactly zero.
TEST(LONG_ON_EMU(EveryWiring), IsCausal) {
  for (const std::string& wiring : wirings_to_try()) {
    SCOPED_TRACE(wiring);
    auto model = make_model(four_layers(wiring), 1, 33);
    set_weights(*model, random_parameters(model->config, 9));
    const auto tokens = random_tokens(33, model->config, 3);
    const size_t C = 32;
    for (int t : {7, 32}) {
      gpt2_zero_grad(*model);
      gpt2_forward(*model, tokens.data(), {1, 33});
      std::vector<floatX> dlnf(33 * C, floatX(0.0f));
      for (size_t c = 0; c < C; c++) dlnf[size_t(t) * C + c] = floatX(float(c % 5) - 2);
      copy_to_device(model->sublayers.head.din, dlnf.data(), dlnf.size() * sizeof(floatX));
      gpt2_backward(*model, {1, 33});
      // The gradients of the embedded tokens.
      const std::vector<float> dembedded = to_floats(model->acts.dresidual, 33 * C);
      double at_t = 0;
      for (size_t c = 0; c < C; c++) at_t += std::abs(dembedded[size_t(t) * C + c]);
      EXPECT_GT(at_t, 0) << t;
      for (size_t i = size_t(t + 1) * C; i < 33 * C; i++)
        EXPECT_EQ(dembedded[i], 0) << "of position " << i / C << ", from the loss at " << t;
    }
  }
}

// Three sequences of different lengths in one cache: prompts a few tokens at a time, longer than the windows too, so
// that the cache of a window has to move on; then a token of each sequence in turn, until each has its length.
// The share of the q in a sequence's cache that are in another bucket than `pass` says, which training computed: other
// shapes of matmuls round otherwise. 0 without `lsh`.
inline double other_buckets_in_cache(const GPT2& generator, int slot, const std::vector<reference::HeadBuckets>& pass) {
  const int64_t length = generator.cache.lengths[slot], h = generator.config.num_heads;
  double hashes = 0, others = 0;
  for (const Sublayer& sublayer : generator.sublayers.list) {
    const auto* branch = std::get_if<LshBranch>(&sublayer.branch);
    if (branch == nullptr) continue;
    const LshCache& cache = *branch->cache;
    const int64_t rounds = branch->shape.rounds;
    std::vector<int> buckets(size_t(length * h * rounds));  // (length, h, rounds)
    copy_to_host(buckets.data(), cache.buckets + slot * cache.capacity * h * rounds, buckets.size() * sizeof(int));
    for (int64_t i = 0; i < int64_t(buckets.size()); i++) {
      const std::vector<int>& head = pass[size_t(sublayer.layer)][size_t(i / rounds % h)];
      hashes++,
          others += buckets[size_t(i)] != head[size_t(i % rounds * int64_t(head.size()) / rounds + i / rounds / h)];
    }
  }
  return hashes > 0 ? others / hashes : 0;
}

TEST(LONG_ON_EMU(EveryWiring), GeneratesWithItsCacheWhatTrainingComputes) {
  const std::vector<int> prompts = {5, 23, 1}, lengths = {40, 33, 25};
  // Tokens of each sequence in a pass; on an emulated GPU passes take long.
  constexpr int at_once = head_size_multiple > 1 ? 4 : 1;
  for (const std::string& wiring : wirings_to_try()) {
    SCOPED_TRACE(wiring);
    auto model = make_model(four_layers(wiring), 1, 40);
    set_weights(*model, random_parameters(model->config, 9));
    auto generator = make_generator(*model, 3, 40, /*rows=*/6 + 6 * (at_once > 1));
    std::vector<std::vector<int>> tokens;
    std::vector<std::vector<float>> pieces(3);
    auto extend = [&](const std::vector<std::pair<int, int64_t>>& counts) {
      std::vector<int> next;
      for (const auto& [slot, count] : counts) {
        const auto first = tokens[slot].begin() + generator->cache.lengths[slot];
        next.insert(next.end(), first, first + count);
      }
      gpt2_extend(*generator, next, counts);
      const std::vector<float> hidden = to_floats(generator->hidden_states(), next.size() * 32);
      auto row = hidden.begin();
      for (const auto& [slot, count] : counts)
        pieces[slot].insert(pieces[slot].end(), row, row + count * 32), row += count * 32;
    };
    for (int slot = 0; slot < 3; slot++) {
      tokens.push_back(random_tokens(40, model->config, 77 + slot));
      for (int first = 0; first < prompts[slot]; first += 6) extend({{slot, std::min(6, prompts[slot] - first)}});
    }
    for (bool more = true; more;) {
      std::vector<std::pair<int, int64_t>> counts;
      for (int slot = 0; slot < 3; slot++)
        if (const int64_t left = lengths[slot] - generator->cache.lengths[slot]; left > 0)
          counts.push_back({slot, std::min<int64_t>(at_once, left)});
      more = !counts.empty();
      if (more) extend(counts);
    }
    for (int slot = 0; slot < 3; slot++) {
      gpt2_forward(*model, tokens[slot].data(), {1, 40});
      const std::vector<float> whole = to_floats(model->hidden_states(), size_t(lengths[slot]) * 32);
      const double others = other_buckets_in_cache(*generator, slot, buckets_of_pass(*model, tokens[slot], 1, 40));
      EXPECT_LE(others, is_16_bit ? 0.01 : 0);
      if (others == 0) { EXPECT_LE(relative_error(pieces[slot], whole), generation_tolerance) << "sequence " << slot; }
    }
  }
}

TEST(LONG_ON_EMU(EveryWiring), ThatSaysNothingIsPlain) {
  // What runs the same operations on the same numbers has the same bits; a mask that hides nothing, and topk, go other
  // ways.
  const struct {
    const char* wiring;
    bool same_bits;
  } cases[] = {{"gqa(4)", true},      {"share(1)", true},  {"reuse(1)", true},           {"blend(0)", true},
               {"window(33)", false}, {"topk(33)", false}, {"strided(33,union)", false}, {"fixed(33,1,union)", false}};
  auto losses_of = [&](const char* wiring) {
    auto model = make_model(four_layers(wiring), 2, 33);
    return loss_curve(*model, 3, 5);
  };
  const std::vector<double> plain = losses_of("plain");
  for (const auto& c : cases) {
    const std::vector<double> losses = losses_of(c.wiring);
    if (c.same_bits) { EXPECT_EQ(losses, plain) << c.wiring; }
    for (size_t i = 0; i < plain.size(); i++)
      EXPECT_NEAR(losses[i], plain[i], is_16_bit ? 1e-3 * coarseness : 1e-6) << c.wiring;
  }
  EXPECT_NE(losses_of("window(32)"), plain);
}

// Gates that are closed: what branches compute does not matter.
TEST(LONG_ON_EMU(EveryWiring), OfClosedGatesIgnoresItsBranches) {
  const auto inputs = random_tokens(66, 61, 1), targets = random_tokens(66, 61, 2);
  const ModelConfig config = four_layers("gru sla(3,2)");
  DoubleTensors params = random_parameters(config, 9);
  for (auto& [name, tensor] : params)
    if (name.find("gru_") != std::string::npos && name.find(".bias") != std::string::npos)
      std::fill(tensor.data.begin(), tensor.data.end(), 30.0);
  auto loss_of = [&] {
    auto model = make_model(config, 2, 33);
    set_weights(*model, params);
    gpt2_zero_grad(*model);
    return micro_step(*model, inputs, targets, 2, 33, 1);
  };
  const double loss = loss_of();
  for (auto& [name, tensor] : params)
    if (name.find("attn") != std::string::npos || name.find("mlp") != std::string::npos)
      std::fill(tensor.data.begin(), tensor.data.end(), 0.1);
  EXPECT_NEAR(loss_of(), loss, 1e-6);
}

// A single cycle starts with wpe alone.
TEST(EveryWiring, OfOneCycleThatBeginsWithPositionsAloneIsPlain) {
  const auto inputs = random_tokens(66, 61, 1), targets = random_tokens(66, 61, 2);
  const DoubleTensors trained = random_parameters(four_layers("plain"), 9);
  auto loss_of = [&](const char* wiring) {
    const ModelConfig config = four_layers(wiring);
    DoubleTensors params = reference::make_parameters<double>(config);
    for (auto& [name, tensor] : params)
      if (const auto it = trained.find(name); it != trained.end()) tensor = it->second;  // wse stays zero
    auto model = make_model(config, 2, 33);
    set_weights(*model, params);
    gpt2_zero_grad(*model);
    return micro_step(*model, inputs, targets, 2, 33, 1);
  };
  EXPECT_NEAR(loss_of("universal(4)") / loss_of("plain"), 1, is_16_bit ? 1e-3 * coarseness : 1e-6);
}

// Some tokens never halt before the last cycle, others halt after the first.
TEST(LONG_ON_EMU(EveryWiring), OfTokensThatHaltAtOnceOrNeverIsThatManyCycles) {
  const auto inputs = random_tokens(66, 61, 1), targets = random_tokens(66, 61, 2);
  DoubleTensors params = random_parameters(four_layers("universal(1) act(0.01)"), 9);
  auto step_of = [&](int L, const char* wiring, double bias) {
    ModelConfig config = four_layers(wiring);
    config.num_layers = L;
    DoubleTensors own = reference::make_parameters<double>(config);
    for (auto& [name, tensor] : own)
      tensor.data.assign(params.at(name).data.begin(), params.at(name).data.begin() + long(tensor.data.size()));
    if (auto it = own.find("halt.bias"); it != own.end()) it->second.data[0] = bias;
    auto model = make_model(config, 2, 33);
    set_weights(*model, own);
    gpt2_zero_grad(*model);
    micro_step(*model, inputs, targets, 2, 33, 1);
    return gpt2_read_stats(*model);
  };
  constexpr double tolerance = is_16_bit ? 1e-3 * coarseness : 1e-6;
  const StepStats never = step_of(4, "universal(1) act(0.01)", -30), at_once = step_of(4, "universal(1) act(0.01)", 30);
  EXPECT_NEAR(never.loss / step_of(4, "universal(1)", 0).loss, 1, tolerance);
  EXPECT_NEAR(at_once.loss / step_of(1, "universal(1)", 0).loss, 1, tolerance);
  EXPECT_NEAR(never.ponder, 5, 1e-6);
  EXPECT_NEAR(at_once.ponder, 2, 1e-6);
}
