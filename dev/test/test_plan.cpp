// What is pure arithmetic of a model: shapes, wiring, layout.
#include <gtest/gtest.h>
#include <cmath>
#include <set>
#include <tuple>
#include "helpers.h"
#include "llmc/base/arena.h"
#include "llmc/model/attention_plan.h"
#include "llmc/model/change_wiring.h"
#include "llmc/wiring/config.h"
#include "llmc/model/flops.h"
#include "llmc/model/kv_cache.h"
#include "llmc/model/parameters.h"
#include "llmc/train/print.h"

// ----------------------------------------------------------------------------
// Config

TEST(Config, PresetsAreGpt2AndGpt3) {
  ModelConfig c;
  ASSERT_TRUE(config_from_preset("d36", c));
  EXPECT_EQ(c.num_layers, 36);
  EXPECT_EQ(c.num_heads, 20);
  EXPECT_EQ(c.channels, 1280);
  EXPECT_EQ(c.max_seq_len, 1024);
  EXPECT_EQ(c.wiring.text, "sla(27,15)");
  for (const char* name : {"d12", "d24", "d36", "d48", "gpt3:384", "gpt3:768", "gpt3:1024", "gpt3:1536", "gpt3:2048",
                           "gpt3:2560", "gpt3:4096", "gpt3:5120", "gpt3:12288"}) {
    ASSERT_TRUE(config_from_preset(name, c)) << name;
    EXPECT_EQ(error_of([&] { validate(c); }), "") << name;
    EXPECT_EQ(c.wiring.text, format("sla(%d,%d)", c.num_layers * 3 / 4, c.num_heads * 3 / 4)) << name;
  }
  EXPECT_FALSE(config_from_preset("d13", c));
  EXPECT_FALSE(config_from_preset("gpt3:", c));
}

TEST(Config, RefusesImpossibleModels) {
  EXPECT_ERROR(validate(make_config(12, 12, 770, 9, 9)), "12 heads do not divide 770 channels");
  for (auto [n_l, n_h] : {std::pair(0, 9), {12, 9}, {-1, 9}, {9, 13}, {9, -1}})
    EXPECT_ERROR(validate(make_config(12, 12, 768, n_l, n_h)), format("sla(%d,%d)", n_l, n_h));
  EXPECT_ERROR(validate(make_config(0, 12, 768, 0, 0)), "n_layer is 0; it must be at least 1");
  EXPECT_ERROR(validate(make_config(1, 12, 768, 1, 1)), "a model of 1 layer");
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 99, 0)); }), "") << "without skip heads any n_l is plain "
                                                                                "GPT-2";
  EXPECT_EQ(error_of([] { validate(make_config(12, 12, 768, 11, 12)); }), "");
  for (double eps : {0.0, 1e-60, 1e300}) {  // fp32 makes 0 and infinity of the last two
    ModelConfig config = make_config(12, 12, 768, 9, 9);
    config.layer_norm_eps = eps;
    EXPECT_ERROR(validate(config), "it must be greater than 0, in fp32, and at most 1");
  }
  ModelConfig repeated = make_config(12, 12, 768, 0, 0);
  repeated.wiring = parse_wiring("universal(5)");
  EXPECT_ERROR(validate(repeated), "universal(5), at character 1: cycles of 5 layers do not divide the 12 layers");
}

// ----------------------------------------------------------------------------
// The plan of attentions, against the design's sentences, one by one

static std::vector<int> numbers(int first, int end) {
  std::vector<int> list;
  for (int i = first; i < end; i++) list.push_back(i);
  return list;
}

static void check_plan(int L, int h, int n_l, int n_h) {
  SCOPED_TRACE(format("L %d, h %d, n_l %d, n_h %d", L, h, n_l, n_h));
  const AttentionPlan plan = make_attention_plan(make_config(L, h, h, n_l, n_h));
  for (int l = 0; l < L; l++) {
    ASSERT_EQ(plan.attentions[l].size(), 1u);
    const PlannedAttention& attention = plan.attentions[l][0];
    EXPECT_EQ(attention.map_layer, l);
    EXPECT_FALSE(attention.dq_accumulate);
    EXPECT_EQ(plan.projected[Qkv::q][l], numbers(0, h));
    EXPECT_TRUE(plan.shared[Qkv::q][l].empty());
    for (Qkv which : {Qkv::k, Qkv::v})
      for (int i = 0; i < h; i++) {
        const bool dead = i >= h - n_h && l >= n_l && l + n_l >= L;
        EXPECT_EQ(plan.projected_index(which, {l, i}) < 0, n_h > 0 && dead);
        EXPECT_EQ(plan.shared_index(which, {l, i}) >= 0, n_h > 0 && i >= h - n_h && l + n_l < L);
      }
    std::set<int> heads_seen;
    for (const KVUse& use : attention.uses) {
      EXPECT_EQ(use.k.layer, use.v.layer);
      EXPECT_EQ(use.k.head, use.v.head);
      for (int head : use.query_heads) {
        EXPECT_TRUE(heads_seen.insert(head).second) << "a head attends to one K/V head";
        const bool shares = head >= h - n_h && l >= n_l;
        EXPECT_EQ(use.k.layer, shares ? l - n_l : l);
        EXPECT_EQ(use.k.head, head);
      }
      const bool a_higher_layer_uses_it = use.k.layer == l && plan.shared_index(Qkv::k, use.k) >= 0;
      EXPECT_EQ(use.dk_accumulate, a_higher_layer_uses_it);
      EXPECT_EQ(use.dv_accumulate, a_higher_layer_uses_it);
    }
    EXPECT_EQ(int(heads_seen.size()), h);
    for (Qkv which : all_qkv) EXPECT_TRUE(plan.unused_but_projected(which, l).empty());
  }
  // A layer that shares K/V has an accumulator, which no other layer has while it is in use.
  for (int s = 0; s < L; s++) {
    const bool is_source = n_h > 0 && s + n_l < L;
    EXPECT_EQ(plan.accumulator[s] >= 0, is_source);
    for (int other = s + 1; is_source && other < std::min(L, s + n_l); other++)
      EXPECT_NE(plan.accumulator[other], plan.accumulator[s]) << "in use from layer s + n_l down to s";
  }
  EXPECT_EQ(plan.num_accumulators, n_h > 0 ? std::min(n_l, L - n_l) : 0);
}

TEST(AttentionPlan, IsTheDesignsForEverySkipOfSmallModels) {
  for (int L = 1; L <= 8; L++)
    for (int h = 1; h <= 4; h++)
      for (int n_h = 0; n_h <= h; n_h++)
        for (int n_l = n_h > 0 ? 1 : 0; n_l < L; n_l++) check_plan(L, h, n_l, n_h);
}

TEST(Parameters, AreAtLeastAsManyAsTheBoundOfAnyModel) {
  for (int L : {1, 2, 12})
    for (int C : {4, 32, 768})
      for (bool bias : {false, true}) {
        ModelConfig c = make_config(L, 4, C, L > 1 ? 1 : 0, L > 1 ? 4 : 0);
        c.bias = bias;
        const double bytes = double(make_parameter_table(c, make_attention_plan(c)).layout.bytes);
        EXPECT_LE(least_parameters(c) * sizeof(float), bytes) << L << " " << C;
        EXPECT_GE(least_parameters(c) * sizeof(float), bytes / 3) << L << " " << C;
      }
}

TEST(AttentionPlan, KeepsDeadHeadsWhenAsked) {
  const AttentionPlan plan = make_attention_plan(make_config(12, 12, 768, 9, 9), /*keep_dead=*/true);
  EXPECT_EQ(plan.projected[Qkv::k][11].size(), 12u);
  EXPECT_EQ(plan.unused_but_projected(Qkv::k, 11).size(), 9u);
  EXPECT_EQ(plan.unused_but_projected(Qkv::v, 11).size(), 9u);
  EXPECT_EQ(plan.unused_but_projected(Qkv::q, 11).size(), 0u);
  EXPECT_EQ(plan.unused_but_projected(Qkv::k, 2).size(), 0u);
}

static AttentionPlan plan_of(const char* wiring, int L, int h) {
  ModelConfig c = make_config(L, h, 8 * h, 0, 0);
  c.wiring = parse_wiring(wiring);
  validate(c);
  return make_attention_plan(c);
}

TEST(AttentionPlan, OfGroupedQueriesOverSharedLayersProjectsEachHeadOnce) {
  const AttentionPlan plan = plan_of("gqa(1) share(2) sla(3,1)", 4, 4);  // layer 3's last head attends to layer 0
  EXPECT_EQ(plan.projected[Qkv::k][0], std::vector<int>{0});
  EXPECT_TRUE(plan.projected[Qkv::v][1].empty());
  ASSERT_EQ(plan.attentions[3][0].uses.size(), 2u);
  EXPECT_EQ(plan.attentions[3][0].uses[0].k.layer, 0);
  EXPECT_EQ(plan.attentions[3][0].uses[0].query_heads, std::vector<int>{3});
  EXPECT_FALSE(plan.attentions[3][0].uses[0].dk_accumulate);
  EXPECT_TRUE(plan.attentions[1][0].uses[0].dk_accumulate) << "layer 3 has written its gradient already";
  EXPECT_TRUE(plan.attentions[0][0].uses[0].dv_accumulate);
  EXPECT_EQ(plan.num_accumulators, 2);
}

TEST(AttentionPlan, OfSeveralSourcesHasAHeadInEachOfThem) {
  const AttentionPlan plan = plan_of("also(1,2) also(2,1)", 3, 2);
  ASSERT_EQ(plan.attentions[2][0].uses.size(), 5u);  // layer 0: head 1; layers 1 and 2: heads 0 and 1
  EXPECT_EQ(plan.table.source_layers[2 * 2 + 1], (std::vector<KVSource>{0, 1, 2}));
  EXPECT_EQ(plan.table.source_layers[2 * 2 + 0], (std::vector<KVSource>{1, 2}));
}

TEST(AttentionPlan, OfKeysOrValuesAloneProjectsWhatIsUsed) {
  const std::vector<int> all = {0, 1, 2, 3}, first = {0}, last = {1, 2, 3}, none;
  for (Qkv apart : {Qkv::k, Qkv::v}) {
    const AttentionPlan plan = plan_of(apart == Qkv::k ? "sla(2,3,k)" : "sla(2,3,v)", 4, 4);
    const Qkv other = apart == Qkv::k ? Qkv::v : Qkv::k;
    for (int l = 0; l < 4; l++) {
      EXPECT_EQ(plan.projected[apart][l], l < 2 ? all : first) << l;
      EXPECT_EQ(plan.shared[apart][l], l < 2 ? last : none) << l;
      EXPECT_EQ(plan.projected[other][l], all) << l;
      EXPECT_EQ(plan.shared[other][l], none) << l;
    }
    EXPECT_EQ(plan.num_accumulators, 2);
    EXPECT_EQ(plan.accumulator_heads, 3);
    ASSERT_EQ(plan.attentions[3][0].uses.size(), 4u);
    for (const KVUse& use : plan.attentions[3][0].uses) {
      EXPECT_EQ(use.k.layer, apart == Qkv::k && use.k.head > 0 ? 1 : 3);
      EXPECT_EQ(use.v.layer, apart == Qkv::v && use.v.head > 0 ? 1 : 3);
    }
    for (const KVUse& use : plan.attentions[1][0].uses) {
      EXPECT_EQ(use.dk_accumulate, apart == Qkv::k && use.k.head > 0);
      EXPECT_EQ(use.dv_accumulate, apart == Qkv::v && use.v.head > 0);
    }
    EXPECT_NE(draw(plan).find(apart == Qkv::k ? "    3 |  . k1 k1 k1 | projects k 1, v 4 of 4"
                                              : "    3 |  . v1 v1 v1 | projects k 4, v 1 of 4"),
              std::string::npos)
        << draw(plan);
  }
  EXPECT_NE(draw(plan_of("sla(2,1,k) share(2,v)", 4, 2)).find("    3 |   v2 k1v2 | projects k 1, v 0 of 2"),
            std::string::npos);
}

TEST(AttentionPlan, OfValueResidualsHasTheFirstLayersValuesWhereValuesAreProjected) {
  const AttentionPlan plan = plan_of("vres sla(2,3,v)", 4, 4);
  const std::vector<int> all = {0, 1, 2, 3}, first = {0};
  EXPECT_EQ(plan.shared[Qkv::v][0], all);
  EXPECT_EQ(plan.shared[Qkv::v][1], (std::vector<int>{1, 2, 3}));
  for (int l = 0; l < 4; l++) {
    EXPECT_EQ(plan.projected[Qkv::v][l], l < 2 ? all : first) << l;
    EXPECT_EQ(plan.first_values(l), l == 0 ? std::vector<int>() : l == 1 ? all : first) << l;
    EXPECT_TRUE(plan.shared[Qkv::k][l].empty());
  }
  EXPECT_EQ(plan.first_values_accumulate, (std::vector<std::vector<char>>{{}, {1, 1, 1, 1}, {1}, {0}}));
  for (const KVUse& use : plan.attentions[0][0].uses) EXPECT_TRUE(use.dv_accumulate && !use.dk_accumulate);
  EXPECT_EQ(plan.num_accumulators, 2);
  EXPECT_EQ(plan_of("vres", 2, 4).accumulator, (std::vector<int>{0, -1}));
}

// A key that no attention uses is projected where its value is mixed.
TEST(AttentionPlan, OfDepthProjectsKeysAndValuesBelowEachValueThatIsUsed) {
  const AttentionPlan plan = plan_of("depth sla(1,2,k) sla(2,1:3,v)", 4, 4);
  const std::vector<int> all = {0, 1, 2, 3}, outer = {0, 3};
  for (int l = 0; l < 4; l++) {
    EXPECT_EQ(plan.projected[Qkv::k][l], l < 3 ? all : (std::vector<int>{0, 1, 3})) << l;
    EXPECT_EQ(plan.projected[Qkv::v][l], l < 2 ? all : outer) << l;
    EXPECT_EQ(plan.shared[Qkv::v][l], l < 2 ? (std::vector<int>{1, 2}) : std::vector<int>()) << l;
    for (int i : all) EXPECT_EQ(plan.is_mixed_above(l, i), l == 0 || (l < 3 && (i == 0 || i == 3))) << l << " " << i;
  }
  EXPECT_EQ(plan.unused_but_projected(Qkv::k, 3), (std::vector<int>{3}));
  const AttentionPlan skips = plan_of("depth sla(1,4)", 4, 4);
  EXPECT_TRUE(skips.projected[Qkv::v][3].empty() && skips.projected[Qkv::k][3].empty());
}

// Whichever layers an update draws, the heads are there, and each layer's gradients have a place.
TEST(AttentionPlan, OfRouteHasWhatAnyUpdateMayUse) {
  const AttentionPlan plan = plan_of("route(0.3) sla(2,3)", 4, 4);
  const std::vector<int> all = {0, 1, 2, 3}, own = {0}, none;
  for (Qkv which : {Qkv::k, Qkv::v})
    for (int l = 0; l < 4; l++) {
      EXPECT_EQ(plan.projected[which][l], l < 2 ? all : own) << l;
      EXPECT_EQ(plan.shared[which][l], l < 2 ? all : l == 2 ? own : none) << l;
      EXPECT_EQ(plan.begin_with_zero(which, l), l == 3 ? own : none) << l;
    }
  EXPECT_EQ(std::set<int>(plan.accumulator.begin(), plan.accumulator.end()), (std::set<int>{-1, 0, 1, 2}));
  for (const std::vector<PlannedAttention>& layer : plan.attentions)
    for (const KVUse& use : layer[0].uses) EXPECT_TRUE(use.dk_accumulate && use.dv_accumulate);
  EXPECT_EQ(plan_of("route(0) sla(2,3)", 4, 4).projected[Qkv::k], plan_of("sla(2,3)", 4, 4).projected[Qkv::k]);
}

TEST(Wiring, KeysAndValuesOneAfterTheOtherAreBoth) {
  for (const auto& [apart, together] : {std::pair("sla(2,3,k) sla(2,3,v)", "sla(2,3)"),

                                        {"also(1,4) sla(1,4,k) sla(1,4,v)", "sla(1,4)"},
                                        {"gqa(2) sla(1,2,v) sla(1,2,k)", "gqa(2) sla(1,2)"}})
    EXPECT_EQ(plan_of(apart, 4, 4).table.source_layers, plan_of(together, 4, 4).table.source_layers) << apart;
}

TEST(AttentionPlan, OfReusedMapsHasNoQueriesAndKeysButTheGroupsFirst) {
  const AttentionPlan plan = plan_of("reuse(2) window(5,SL)", 5, 2);
  for (int l : {0, 2, 4}) EXPECT_EQ(plan.projected[Qkv::q][l].size(), 2u);
  for (int l : {1, 3})
    for (Qkv which : {Qkv::q, Qkv::k}) EXPECT_TRUE(plan.projected[which][l].empty());
  EXPECT_EQ(plan.projected[Qkv::v][3].size(), 2u);
  EXPECT_EQ(plan.shared[Qkv::q][2].size(), 2u);
  EXPECT_TRUE(plan.shared[Qkv::v][2].empty());
  EXPECT_EQ(plan.attentions[3][0].map_layer, 2);
  EXPECT_FALSE(plan.attentions[3][0].dq_accumulate);
  EXPECT_TRUE(plan.attentions[2][0].dq_accumulate);
  EXPECT_EQ(plan.attentions[3][0].uses[1].k.layer, 2);
  EXPECT_EQ(plan.attentions[3][0].uses[1].v.layer, 3);
  EXPECT_EQ(plan.num_accumulators, 1) << "that of layer 2 is free when layer 1 needs one";
}

TEST(AttentionPlan, OfBlendedMapsHasOneAttentionForEachWithAWeight) {
  const AttentionPlan plan = plan_of("blend(0.5)", 3, 2);
  ASSERT_EQ(plan.attentions[2].size(), 3u);
  EXPECT_EQ(plan.attentions[2][0].map_layer, 0);
  EXPECT_FALSE(plan.attentions[2][0].uses[0].dv_accumulate);
  EXPECT_TRUE(plan.attentions[2][1].uses[0].dv_accumulate) << "the layer's own v, again";
  EXPECT_FALSE(plan.attentions[2][1].uses[0].dk_accumulate);
  EXPECT_TRUE(plan.attentions[1][0].dq_accumulate);
  EXPECT_EQ(plan_of("blend(0)", 3, 2).attentions[2].size(), 1u);
  EXPECT_EQ(plan_of("blend(0)", 3, 2).attentions[2][0].map_layer, 2);
  EXPECT_EQ(plan_of("blend(1)", 3, 2).attentions[2][0].map_layer, 0);
  EXPECT_TRUE(plan_of("blend(1)", 3, 2).projected[Qkv::q][2].empty());
}

TEST(AttentionPlan, IsDrawnWithItsSourceLayers) {
  const std::string text = draw(make_attention_plan(make_config(4, 4, 8, 3, 3)));
  EXPECT_NE(text.find("3 |  .  0  0  0 | projects 1 of 4\n"), std::string::npos) << text;
  EXPECT_NE(text.find("0 |  .  .  .  . | projects 4 of 4, shares 3\n"), std::string::npos) << text;
  EXPECT_NE(draw(plan_of("also(1,1)", 2, 2)).find("1 |  . 0+. | projects 2 of 2\n"), std::string::npos);
  EXPECT_NE(draw(plan_of("reuse(2) gqa(1)", 2, 2))
                .find("1 |  .  . | projects k 0, v 1 of 1, no q, attention map of layer 0\n"),
            std::string::npos);
  EXPECT_NE(draw(plan_of("reuse(2)", 2, 2)).find("0 |  .  . | projects 2 of 2, shares 2\n"), std::string::npos)
      << "q and k, but not v";
  const std::string masks = draw(plan_of("strided(8) topk(3)", 1, 3));
  EXPECT_NE(masks.find("keys: heads 0 to 1: last 9; heads 2 to 2: every 8\n"
                       "keys: of those that a query sees, the 3 with the highest scores\n"),
            std::string::npos)
      << masks;
}

// ----------------------------------------------------------------------------
// Another wiring than a model was trained with

TEST(WiringChange, IsSaidByLayers) {
  auto text = [](const char* before, const char* now) {
    ModelConfig model = make_config(4, 4, 32, 0, 0), config = model;
    model.wiring = parse_wiring(before), config.wiring = parse_wiring(now);
    return describe(plan_wiring_change(model, make_attention_plan(config)));
  };
  EXPECT_EQ(text("plain", "sla(2,3)"), "  layers 2 to 3: 3 heads attend to K/V of other layers than before; 48 rows of "
                                       "c_attn are not used any more\n");
  EXPECT_EQ(text("sla(2,3)", "plain"), "  layers 2 to 3: 3 heads attend to K/V of other layers than before; 48 rows of "
                                       "c_attn have no trained "
                                       "values and start as in a new model\n");
  EXPECT_EQ(text("plain", "gqa(3)"), "  layers 0 to 3: 2 heads of k and v are means of 2 each\n");
  EXPECT_EQ(text("plain", "gqa(1)"), "  layers 0 to 3: 2 heads of k and v are means of 4 each\n");
  EXPECT_EQ(text("gqa(2)", "plain"), "  layers 0 to 3: 4 heads of k and v are copies of others\n");
  EXPECT_EQ(text("plain", "reuse(2)"), "  layers 1, 3: 4 heads have another mask or attention map; 64 rows of c_attn "
                                       "are not used any more\n");
  EXPECT_EQ(text("gate", "window(9,SLLL)"), "  no longer: attention maps: each is mixed with the one below, in a share "
                                            "that is learned\n"
                                            "  dropped: h.*.attn.map_gate.bias (1)\n  dropped: "
                                            "h.*.attn.map_gate.weight (32, 1)\n"
                                            "  layer 0: 4 heads have another mask or attention map\n");
  EXPECT_EQ(text("topk(3)", "topk(4)"), "  no longer: keys: of those that a query sees, the 3 with the highest scores\n"
                                        "  from now on: keys: of those that a query sees, the 4 with the highest "
                                        "scores\n");
  EXPECT_EQ(text("sla(2,3)", "sla(2,1:4)"), "  nothing\n");
  EXPECT_EQ(text("sla(2,3)", "sla(2,3,k) sla(2,3,v)"), "  nothing\n");
  EXPECT_EQ(text("plain", "sla(3,2,v)"), "  layer 3: 2 heads attend to K/V of other layers than before; 16 rows of "
                                         "c_attn are not used any more\n");
  EXPECT_EQ(text("plain", "rope"), "  from now on: positions: q and k are rotated, base 10000\n"
                                   "  dropped: wpe.weight (1024, 32)\n");
  EXPECT_EQ(text("rope", "plain"), "  no longer: positions: q and k are rotated, base 10000\n"
                                   "  as in a new model: wpe.weight (1024, 32)\n");
  EXPECT_EQ(text("relative gqa(2)", "gqa(2) relative"), "  nothing\n");
  EXPECT_EQ(text("plain", "universal(2)"), "  from now on: layers repeat: layer l has the parameters of layer l mod 2\n"
                                           "  as in a new model: wse.weight (2, 32)\n");
  EXPECT_EQ(text("universal(2)", "universal(1)"), "  no longer: layers repeat: layer l has the parameters of layer l "
                                                  "mod 2\n"
                                                  "  from now on: layers repeat: layer l has the parameters of layer l "
                                                  "mod 1\n"
                                                  "  dropped: wse.weight (2, 32)\n  as in a new model: wse.weight (4, "
                                                  "32)\n");
  EXPECT_EQ(text("plain", "documents"), "  from now on: documents: a query sees only keys of its own document\n");
  EXPECT_EQ(text("plain", "rmsnorm"), "  from now on: norms: RMSNorm, without mean and bias\n"
                                      "  dropped: h.*.ln_1.bias (32)\n  dropped: h.*.ln_2.bias (32)\n"
                                      "  dropped: ln_f.bias (32)\n");
  EXPECT_EQ(text("plain", "qknorm"), "  from now on: q and k: divided by their root mean square, of each head\n");
  EXPECT_EQ(text("plain", "relu2"), "  from now on: MLPs: ReLU squared in place of GELU\n");
  EXPECT_EQ(text("softcap(30)", "softcap(15)"), "  no longer: logits: capped at 30\n"
                                                "  from now on: logits: capped at 15\n");
  EXPECT_EQ(text("plain", "swiglu(80)"), "  from now on: MLPs: SwiGLU of 80 hidden units\n"
                                         "  dropped: h.*.mlp.c_fc.bias (128)\n"
                                         "  dropped: h.*.mlp.c_fc.weight (32, 128)\n"
                                         "  dropped: h.*.mlp.c_proj.weight (128, 32)\n"
                                         "  as in a new model: h.*.mlp.c_fc.bias (160)\n"
                                         "  as in a new model: h.*.mlp.c_fc.weight (32, 160)\n"
                                         "  as in a new model: h.*.mlp.c_proj.weight (80, 32)\n");
  EXPECT_EQ(text("plain", "untied"), "  from now on: output head: a weight of its own\n"
                                     "  as wte.weight: lm_head.weight (50257, 32)\n");
  EXPECT_EQ(text("untied", "plain"), "  no longer: output head: a weight of its own\n"
                                     "  dropped: lm_head.weight (50257, 32)\n");
  EXPECT_EQ(text("lsh(4,2)", "plain"), "  no longer: keys are queries: a query sees those of its hash bucket (4 "
                                       "buckets, 2 rounds)\n"
                                       "  dropped: h.*.attn.rotations (4, 2, 8, 2)\n"
                                       "  layers 0 to 3: 32 rows of c_attn have no trained values and start as in a "
                                       "new model\n");
}

// ----------------------------------------------------------------------------
// The wiring's text

TEST(Wiring, ErrorsSayWhichTermWhereAndWhatWouldBeRight) {
  auto error = [](const char* text) {
    return error_of([&] {
      ModelConfig c = make_config(12, 12, 768, 0, 0);
      c.wiring = parse_wiring(text);
      validate(c);
    });
  };
  const struct {
    const char *text, *term, *right;
  } cases[] = {{"window(0)", "window(0), at character 1", "at least 1"},
               {"plain(3)", "plain(3), at character 1", "it is plain"},
               {"gqa(4)  sla(12, 3)", "sla(12,3), at character 9", "1 to 11 layers below"},
               {"sla(9,13)", "sla(9,13), at character 1", "1 to 12 of them"},
               {"sla(9,5:13)", "sla(9,5:13)", "can end at 12"},
               {"sla(9,5:5)", "sla(9,5:5)", "holds no head"},
               {"sla(9)", "sla(9)", "sla(distance, heads[, k|v])"},
               {"sla(9,-1)", "sla(9,-1)", "at least 1"},
               {"sla(9,x)", "sla(9,x)", "x: is not a whole number; it is sla(distance, heads["},
               {"sla(9,9,q)", "sla(9,9,q), at character 1", "q is neither k (keys alone) nor v (values alone)"},
               {"share(2,kv)", "share(2,kv), at character 1", "kv is neither k"},
               {"also(9,9,v)", "also(9,9,v), at character 1", "it is also(distance, heads)"},
               {"gqa(4) sla(9,2,v)", "sla(9,2,v), at character 8", "the same keys must have the same values"},
               {"gqa(4) sla(9,2,k)", "sla(9,2,k), at character 8", "the same values must have the same keys"},
               {"also(1,1) share(2,v)", "share(2,v), at character 11", "the same values must have the same keys"},
               {"gqa(4) sla(9,2) route(0.3)", "route(0.3), at character 17", "share a K/V head"},
               {"reuse(2) share(2,v)", "share(2,v), at character 10", "reuse(2), at character 1"},
               {"gqa(5)", "gqa(5), at character 1", "1, 2, 3, 4, 6, 12"},
               {"layers(0_0_3_2)", "layers(0_0_3_2)", "layers 0 to 2"},
               {"layers(0_0)", "layers(0_0)", "the model has 12"},
               {"share(13)", "share(13)", "1 to 12"},
               {"reuse(2) sla(3,3)", "sla(3,3), at character 10", "reuse(2), at character 1"},
               {"also(1,1) gate", "gate, at character 11", "also(1,1), at character 1"},
               {"reuse(2) blend(0.5)", "blend(0.5), at character 10", "reuse(2)"},
               {"fixed(8, 9)", "fixed(8, 9), at character 1", "1 to 8"},
               {"fixed(8)", "fixed(8)", "fixed(block, columns)"},
               {"strided(8, all)", "strided(8, all)", "heads, layers or union"},
               {"window(4) topk(3) window(5)", "window(5), at character 19", "window(4), at character 1"},
               {"window(4, SXL)", "window(4, SXL)", "letters S (window) and L (no window)"},
               {"blend(1.5)", "blend(1.5)", "between 0 and 1"},
               {"blend(nan)", "blend(nan)", "nan: is not a number"},
               {"rope(0.5)", "rope(0.5), at character 1", "between 1 and"},
               {"rope(x)", "rope(x)", "not a number"},
               {"rope gqa(4) rope(7)", "rope(7), at character 13", "rope, at character 1"},
               {"memory(0) rope", "memory(0), at character 1", "at least 1"},
               {"memory", "memory, at character 1", "memory(positions), such as memory(512)"},
               {"sla(9,9) memory(8)", "memory(8), at character 10", "needs rope or relative"},
               {"relative(3)", "relative(3), at character 1", "it is relative"},
               {"relative rope", "rope, at character 10", "does not combine with relative, at character 1"},
               {"topk(3) relative", "relative, at character 9", "relative does with sla, also, share, layers, gqa"},
               {"relative blend(0.5)", "blend(0.5), at character 10", "relative does with"},
               {"fixed(8,2) relative", "relative, at character 12", "fixed(8,2), at character 1"},
               {"rope topk(3) memory(8)", "memory(8), at character 14", "topk(3), at character 6"},
               {"rope memory(8) strided(4)", "strided(4), at character 16", "does not combine with memory(8)"},
               {"memory(8) rope gate", "gate, at character 16", "memory does with sla, also, share"},
               {"gru(1)", "gru(1), at character 1", "it is gru"},
               {"gru rope gru", "gru, at character 10", "the term is there already"},
               {"act(0.1)", "act(0.1), at character 1", "needs universal"},
               {"universal(1) act(0)", "act(0), at character 14", "must lie between 0 and 1, and be neither"},
               {"universal(1) act(1)", "act(1), at character 14", "must lie between 0 and 1, and be neither"},
               {"universal(1) act(nan)", "act(nan)", "not a number"},
               {"universal(1) act(0.1,-1)", "act(0.1,-1)", "between 0 and"},
               {"universal(1) act", "act, at character 14", "act(eps) or act(eps, cost), such as act(0.01)"},
               {"universal(1) act(0.1) act(0.2)", "act(0.2), at character 23", "act(0.1), at character 14"},
               {"topk(3) universal(1) act(0.1)", "topk(3)", "does not combine with"},
               {"universal(1) act(0.1) gate", "gate, at character 23", "does with sla, also, share"},
               {"relative qknorm", "qknorm, at character 10", "does not combine with relative, at character 1"},
               {"qknorm lsh(4,2)", "lsh(4,2), at character 8", "does not combine with qknorm, at character 1"},
               {"vres reversible", "reversible, at character 6", "does not combine with vres, at character 1"},
               {"universal(1) vres", "vres, at character 14", "does not combine with universal(1), at character 1"},
               {"vres gate", "gate, at character 6", "does not combine with vres, at character 1"},
               {"vres(2)", "vres(2), at character 1", "it is vres"},
               {"router vres", "vres, at character 8", "does not combine with router, at character 1"},
               {"depth gqa(2)", "gqa(2), at character 7", "does not combine with depth, at character 1"},
               {"vres depth", "depth, at character 6", "does not combine with vres, at character 1"},
               {"depth router", "router, at character 7", "does not combine with depth, at character 1"},
               {"reversible depth", "depth, at character 12", "does not combine with reversible, at character 1"},
               {"depth(2)", "depth(2), at character 1", "it is depth"},
               {"router lsh(4,2)", "lsh(4,2), at character 8", "does not combine with router, at character 1"},
               {"dense reversible", "reversible, at character 7", "does not combine with dense, at character 1"},
               {"universal(1) dense", "dense, at character 14", "does not combine with universal(1), at character 1"},
               {"gru dense", "dense, at character 5", "does not combine with gru, at character 1"},
               {"dense gate", "gate, at character 7", "does not combine with dense, at character 1"},
               {"dense(2)", "dense(2), at character 1", "it is dense"},
               {"route", "route, at character 1", "it is route(probability), such as route(0.3)"},
               {"route(1.5)", "route(1.5), at character 1", "must lie between 0 and 1"},
               {"route(0.3) also(1,2)", "also(1,2), at character 12", "does not combine with route(0.3)"},
               {"router route(0.3)", "route(0.3), at character 8", "does not combine with router, at character 1"},
               {"layers(0_0) route(0.3)", "route(0.3), at character 13", "does not combine with layers(0_0)"},
               {"route(0.3) gate", "gate, at character 12", "does not combine with route(0.3), at character 1"},
               {"route(0.3) lsh(4,2)", "lsh(4,2), at character 12", "does not combine with route(0.3)"},
               {"universal(2) route(0.3)", "route(0.3), at character 14", "does not combine with universal(2)"},
               {"swiglu(0)", "swiglu(0), at character 1", "must be at least 1"},
               {"swiglu(1,2)", "swiglu(1,2), at character 1", "it is swiglu or swiglu(hidden units)"},
               {"swiglu relu2", "relu2, at character 8", "does not combine with swiglu, at character 1"},
               {"silu relu2", "relu2, at character 6", "does not combine with silu, at character 1"},
               {"softcap", "softcap, at character 1", "it is softcap(c), such as softcap(15)"},
               {"softcap(0)", "softcap(0), at character 1", "must be at least 0.001"},
               {"softcap(-1)", "softcap(-1), at character 1", "must lie between 0 and"},
               {"lsh(3,2)", "lsh(3,2), at character 1", "an even number"},
               {"lsh(4)", "lsh(4), at character 1", "lsh(buckets, rounds), such as lsh(32, 2)"},
               {"lsh(4,0)", "lsh(4,0)", "at least 1"},
               {"lsh(16386,1)", "lsh(16386,1), at character 1", "at most 16384"},
               {"lsh(4,17)", "lsh(4,17), at character 1", "at most 16"},
               {"lsh(4,2) sla(3,3)", "sla(3,3), at character 10",
                "lsh does with rmsnorm, relu2, silu, swiglu, untied, softcap, gru and reversible"},
               {"window(8) lsh(4,2)", "lsh(4,2), at character 11", "does not combine with window(8)"},
               {"rope alibi", "alibi, at character 6", "does not combine with rope, at character 1"},
               {"alibi relative", "relative, at character 7", "does not combine with alibi, at character 1"},
               {"alibi memory(4)", "memory(4), at character 7", "does not combine with alibi, at character 1"},
               {"gate alibi", "alibi, at character 6", "does not combine with gate, at character 1"},
               {"sinks reuse(2)", "reuse(2), at character 7", "does not combine with sinks, at character 1"},
               {"lsh(4,2) sinks", "sinks, at character 10", "does not combine with lsh(4,2), at character 1"},
               {"rope memory(4) documents", "documents, at character 16", "does not combine with memory(4)"},
               {"documents lsh(4,2)", "lsh(4,2), at character 11", "does not combine with documents"},
               {"reversible gru", "gru, at character 12",
                "reversible does with sla, also, share, layers, gqa, route, window, "
                "strided, fixed, sinks, documents, rope, alibi, rmsnorm, qknorm, relu2, silu, swiglu, untied, softcap "
                "and lsh"},
               {"topk(4) reversible", "reversible, at character 9", "topk(4), at character 1"},
               {"reversible(2)", "reversible(2), at character 1", "it is reversible"},
               {"plain gqa(4)", "plain, at character 1", "leave it out"},
               {"windw(4)", "windw, at character 1", "is it window?"},
               {"modrn", "modrn, at character 1", "is it modern?"},
               {"modern(2)", "modern, at character 1", "no such term"},
               {"amodern", "amodern, at character 1", "no such term"},
               {"modern relative", "relative, at character 8",
                "does not combine with qknorm of modern, at character 1"},
               {" modern rmsnorm", "wiring \" modern rmsnorm\": rmsnorm, at character 9",
                "already: rmsnorm of modern, at"},
               {"rmsnorm  modern", "rmsnorm of modern, at character 10", "already: rmsnorm, at character 1"},
               {"universal(2) act(1e-9)", "act(1e-9), at character 14", "1 - eps as a float"},
               {"sla(9,9", "sla(9,9, at character 1", "not closed"},
               {"sla(9,9)gqa(4)", "sla(9,9)g, at character 1", "a space"},
               {"topk(99999999999)", "topk(99999999999)", "99999999999: is out of range"},
               {" ", "empty", "plain"}};
  for (const auto& c : cases) {
    EXPECT_NE(error(c.text).find(c.term), std::string::npos) << c.text << ": " << error(c.text);
    EXPECT_NE(error(c.text).find(c.right), std::string::npos) << c.text << ": " << error(c.text);
  }
}

TEST(Wiring, HasAnyWhiteSpaceBetweenItsTerms) {
  const Wiring w = parse_wiring("rmsnorm\nsla(1,\r\n2)\f\vqknorm\n");
  EXPECT_EQ(canonical_text(w), "rmsnorm sla(1,2) qknorm");
  EXPECT_EQ(w.text, "rmsnorm sla(1,  2)  qknorm");
}

TEST(Wiring, KeepsItsTextAndKnowsWhatSaysTheSame) {
  const Wiring w = parse_wiring(" gqa( 4)  window(512 , SSSL) strided(8, heads)");
  EXPECT_EQ(w.text, " gqa( 4)  window(512 , SSSL) strided(8, heads)");
  EXPECT_EQ(canonical_text(w), "gqa(4) window(512,SSSL) strided(8)");
  for (const char* text : {"plain",
                           "sla(9,3:12) sla(2,1)",
                           "also(1,2)",
                           "share(3)",
                           "layers(0_0_2_2)",
                           "window(7)",
                           "strided(8,union)",
                           "fixed(8,2,layers)",
                           "topk(64)",
                           "reuse(2)",
                           "blend(0.3)",
                           "gate",
                           "rope",
                           "rope(500)",
                           "memory(8) rope",
                           "relative window(7) memory(8)",
                           "universal(2) relative",
                           "rmsnorm",
                           "documents sla(2,2)",
                           "share(2,v) sla(1,1:2,k)",
                           "qknorm",
                           "vres rope",
                           "route(0.25) gqa(2)",
                           "router gqa(2)",
                           "depth rope",
                           "dense rope",
                           "relu2",
                           "silu rope",
                           "alibi sinks window(7)",
                           "swiglu",
                           "swiglu(80) rmsnorm",
                           "untied softcap(0.5)",
                           "gru",
                           "universal(1) act(0.1)",
                           "universal(2) act(0.01,0.5) gru",
                           "universal(3) act(0.05)",
                           "act(0.1,2) universal(2)",
                           "reversible lsh(32,2)",
                           "gru lsh(2,1)",
                           "rope sla(1,2) reversible"})
    EXPECT_EQ(canonical_text(parse_wiring(text)), text);
  EXPECT_EQ(canonical_text(parse_wiring("rope(1e4)")), "rope");
  const std::string modern = "rmsnorm qknorm rope relu2 untied softcap(15)";
  EXPECT_EQ(parse_wiring("modern").text, modern);
  EXPECT_EQ(parse_wiring("gqa(4)\tmodern sla(2, 3)").text, "gqa(4)\t" + modern + " sla(2, 3)");
  EXPECT_EQ(canonical_text(parse_wiring("universal(1) act(1e-1, 1e-2)")), "universal(1) act(0.1)");
  EXPECT_EQ(canonical_text(skip_layer_wiring(9, 9)), "sla(9,9)");
  EXPECT_TRUE(skip_layer_wiring(9, 0).is_plain());
}

// For every wiring: the pairs of a query and a key that its attention multiplies, and what it keeps of a token.
static KVCachePlan kv_cache_of(const char* wiring, int64_t max_length, int64_t rows, int slots = 1) {
  ModelConfig c = make_config(4, 4, 32, 0, 0);
  c.wiring = parse_wiring(wiring);
  validate(c);
  return plan_kv_cache(make_attention_plan(c), slots, max_length, rows);
}

TEST(KVCache, HoldsAsManyPositionsAsTheMasksReach) {
  const struct {
    const char* wiring;
    std::vector<int64_t> capacity;
  } cases[] = {{"plain", {1000, 1000, 1000, 1000}},
               {"window(10)", {26, 26, 26, 26}},  // 2 * (9 + 1) and the 6 rows that are computed at a time
               {"window(10,SSSL)", {26, 26, 26, 1000}},
               {"window(10,SL)", {26, 1000, 26, 1000}},
               {"share(2) window(10,SLLL)", {1000, 1000, 1000, 1000}},  // layer 1 sees all of layer 0's
               {"sla(2,1) window(10,SSSL)", {26, 1000, 26, 1000}},      // layer 3 sees all of layer 1's
               {"reuse(2) window(10,SLLL)", {26, 26, 1000, 1000}},      // of a group the mask of its first layer
               {"blend(0.3) window(10)", {26, 26, 26, 26}},
               {"fixed(8,2)", {1000, 1000, 1000, 1000}},
               {"window(10) fixed(8,2)", {40, 40, 40, 40}},         // 2 * (9 + 8) + 6: blocks of 8 must stay whole
               {"window(10) fixed(8,2,layers)", {36, 40, 36, 40}},  // 2 * (7 + 8) + 6: a block of 8 is seen, not 10
               {"strided(8)", {1000, 1000, 1000, 1000}},
               {"window(600)", {1000, 1000, 1000, 1000}}};
  for (const auto& c : cases) {
    const KVCachePlan cache = kv_cache_of(c.wiring, 1000, 6);
    for (int l = 0; l < 4; l++) EXPECT_EQ(cache.capacity(l), c.capacity[l]) << c.wiring << ", layer " << l;
  }
}

// Every position that a query may see is where the cache says, whatever is appended; rows move rarely, and never onto
// themselves.
TEST(KVCache, KeepsWhatQueriesSeeWhereItSays) {
  for (const char* wiring : {"window(10,SSSL)", "window(7) fixed(4,1)", "window(1)"}) {
    KVCache cache(kv_cache_of(wiring, 500, 6, 2));
    std::vector<std::vector<std::vector<int64_t>>> rows;  // (slots, L, capacity): the position in each row
    for (int slot = 0; slot < 2; slot++) {
      rows.emplace_back();
      for (int l = 0; l < 4; l++) rows[slot].push_back(std::vector<int64_t>(size_t(cache.plan.capacity(l)), -1));
    }
    int64_t moved = 0;
    for (int i = 0; cache.lengths[0] < 494; i++) {
      const int slot = i % 5 == 4 ? 1 : 0;
      const int64_t count = 1 + i % 6;
      std::vector<KVCacheMove> moves;
      const SequenceSpan span = cache.append(slot, count, moves);
      EXPECT_EQ(span.first + span.count, cache.lengths[slot]);
      for (const KVCacheMove& move : moves) {
        std::vector<int64_t>& r = rows[move.slot][move.layer];
        EXPECT_GE(move.from, move.count);
        std::copy_n(r.begin() + move.from, move.count, r.begin());
        moved += move.count;
      }
      for (int l = 0; l < 4; l++) {
        const int64_t first = cache.first_position(slot, l);
        for (int64_t p = span.first; p < span.first + count; p++) rows[slot][l].at(size_t(p - first)) = p;
        const KVCacheGroup& group = cache.plan.groups[cache.plan.group_of_layer[l]];
        EXPECT_EQ(first % group.alignment, 0);
        for (int64_t p = std::max<int64_t>(0, group.reach == 0 ? 0 : span.first - group.reach + 1);
             p < span.first + count; p++)
          ASSERT_EQ(rows[slot][l][p - first], p) << wiring << ", layer " << l;
      }
    }
    EXPECT_LE(moved, 4 * (cache.lengths[0] + cache.lengths[1]));
  }
  KVCache cache(kv_cache_of("window(10)", 30, 6));
  std::vector<KVCacheMove> moves;
  for (int i = 0; i < 5; i++) cache.append(0, 6, moves);
  EXPECT_GT(cache.first_position(0, 0), 0);
  cache.clear(0);
  EXPECT_EQ(cache.first_position(0, 0), 0);
  EXPECT_EQ(cache.append(0, 2, moves).first, 0);
}

TEST(Flops, CountEachPairOfAQueryAndAKeyThatItSees) {
  const int L = 4, h = 4, T = 50;
  struct Case {
    const char* wiring;
    int maps, kv_heads;
  };  // in all layers: attention maps that are computed; k and v heads that are projected
  for (const Case& c :
       {Case{"plain", 4, 32}, Case{"sla(3,3)", 4, 26}, Case{"also(1,2)", 4, 32}, Case{"share(2)", 4, 16},
        Case{"gqa(2)", 4, 16}, Case{"window(9,SL)", 4, 32}, Case{"strided(7)", 4, 32}, Case{"fixed(8,3,union)", 4, 32},
        Case{"strided(5,union) fixed(8,3,union) window(30)", 4, 32}, Case{"topk(6)", 4, 32},
        Case{"topk(6) also(2,3) window(9)", 4, 32}, Case{"reuse(2) window(5,SL)", 4, 24}, Case{"blend(0.5)", 10, 32},
        Case{"gate gqa(1) window(5,SL)", 10, 8}}) {
    SCOPED_TRACE(c.wiring);
    const AttentionPlan plan = plan_of(c.wiring, L, h);
    double scored = 0, multiplied = 0;
    int maps = 0;
    for (int l = 0; l < L; l++)
      for (int map = c.maps == L ? plan.table.map_layer[l] : 0; map <= (c.maps == L ? plan.table.map_layer[l] : l);
           map++, maps++)
        for (int i = 0; i < h; i++)
          for (int t = 0; t < T; t++) {
            int keys = 0;
            for (int j = 0; j < T; j++)
              keys += plan.table.masks[map * h + i].sees(t, j) * int(plan.table.source_layers[l * h + i].size());
            scored += keys;
            multiplied += plan.table.topk > 0 ? std::min(keys, plan.table.topk) : keys;
          }
    EXPECT_EQ(maps, c.maps);
    AttentionPairs pairs;
    for (int l = 0; l < L; l++) {
      const AttentionPairs of_layer = attention_pairs(plan, l, T);
      pairs.scored += of_layer.scored, pairs.multiplied += of_layer.multiplied;
    }
    EXPECT_EQ(pairs.scored, scored);
    EXPECT_EQ(pairs.multiplied, multiplied);
    ModelConfig config = make_config(L, h, 8 * h, 0, 0);
    config.wiring = parse_wiring(c.wiring);
    EXPECT_EQ(kv_bytes_per_token(config, plan, 2), 2 * c.kv_heads * config.head_size());
  }
}

// With two rounds of four buckets half of the pairs are in one bucket, if buckets are equal; with as many rounds as
// buckets all pairs are counted, and none twice.
TEST(Flops, CountTheEqualShareOfHashBuckets) {
  const double all = attention_pairs(plan_of("plain", 3, 4), 0, 50).scored;
  EXPECT_EQ(lsh_pairs(plan_of("lsh(4,2)", 3, 4), 0, 50), all / 2);
  EXPECT_EQ(lsh_pairs(plan_of("lsh(4,9)", 3, 4), 0, 50), all);
  ModelConfig config = make_config(3, 4, 32, 0, 0);
  config.wiring = parse_wiring("lsh(4,2)");
  const AttentionPlan plan = make_attention_plan(config);
  EXPECT_EQ(kv_bytes_per_token(config, plan, 2), 3 * (2 * 32 * 2 + 4 * 2 * 4));  // q, v and the numbers of buckets
  const double hashing = 2.0 * 32 * 2 * 2, pairs = 2.0 * 8 * 7 * all / 2 / 50;   // of a token, in each layer
  EXPECT_NEAR(flops_per_token(config, plan, 50), 6 * matmul_parameters(config, plan) + 3 * (hashing + pairs), 1e-6);
}

// The head, and in each of three layers: c_attn (96, 32) and c_proj (32, 32) of attention, 8 C C of the MLP, and from
// layer 1 on a gate (32, 1); or after each cycle but the last the gate that halts a token; or two gates of the residual
// stream, each of (96, 32), (64, 32) and (32, 32); or the sum that follows layer l, of l + 2 tensors.
TEST(Flops, CountTheWeightsThatATokenIsMultipliedWith) {
  const double C = 32, plain = 257 * C + 3 * (3 * C * C + C * C + 8 * C * C);
  ModelConfig config = make_config(3, 4, 32, 0, 0);
  config.vocab_size = 257;
  for (const auto& [wiring, elements] : {std::pair("plain", plain),
                                         {"gate", plain + 2 * C},
                                         {"blend(0.5)", plain},
                                         {"gqa(1)", plain - 3 * 2 * 24 * C},
                                         {"universal(1) act(0.1)", plain + 2 * C},
                                         {"gru", plain + 3 * 12 * C * C},
                                         {"lsh(4,2)", plain - 3 * C * C},
                                         {"reversible", plain},
                                         {"dense", plain + (2 + 3 + 4) * C},
                                         {"reuse(3)", plain - 2 * 2 * C * C}}) {
    config.wiring = parse_wiring(wiring);
    EXPECT_EQ(matmul_parameters(config, make_attention_plan(config)), elements) << wiring;
  }
}

// ----------------------------------------------------------------------------
// Layout

TEST(Arena, TensorsAreAlignedAndDoNotOverlap) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  const ParameterTable table = make_parameter_table(config, make_attention_plan(config));
  size_t end = 0;
  for (const TensorSpec& tensor : table.layout.tensors) {
    EXPECT_EQ(tensor.offset % 256, 0u) << tensor.name;
    EXPECT_GE(tensor.offset, end) << tensor.name;
    EXPECT_LT(tensor.offset, end + 256) << tensor.name;
    end = tensor.offset + tensor.bytes() + size_t(tensor.tail_elements) * tensor.element_bytes;
  }
  EXPECT_GE(table.layout.bytes, end);
}

// Numbers of ranks, with parts of equal size and with whole matrices.
static std::vector<std::pair<int, bool>> cases_of_shards(int most_ranks) {
  std::vector<std::pair<int, bool>> cases;
  for (int ranks = 1; ranks <= most_ranks; ranks++)
    for (bool whole_matrices : {false, true}) cases.push_back({ranks, whole_matrices});
  return cases;
}

TEST(Shard, HoldEveryParameterOnce) {
  for (bool bias : {false, true}) {
    ModelConfig config = make_config(3, 4, 20, 2, 3);
    config.vocab_size = 101, config.max_seq_len = 7, config.bias = bias;
    for (const auto& [ranks, whole_matrices] : cases_of_shards(9)) {
      std::vector<int> owners;  // of each element of the full arenas
      int64_t num_owned = 0;
      for (int rank = 0; rank < ranks; rank++) {
        const ParameterTable table =
            make_parameter_table(config, make_attention_plan(config), {rank, ranks, whole_matrices});
        owners.resize(table.layout.bytes / sizeof(float));
        EXPECT_EQ(table.buckets.size(), 3u + 2);
        EXPECT_EQ(table.layout.bytes % (256 * size_t(ranks)), 0u);
        int64_t end = 0;
        for (const ParameterChunk& chunk : parameter_chunks(table)) {
          EXPECT_EQ(chunk.begin % 64, 0);
          EXPECT_EQ(chunk.state % 64, 0);
          EXPECT_GE(chunk.state, end) << "rank " << rank << " of " << ranks;
          end = chunk.state + chunk.count;
          for (int i = 0; i < chunk.count; i++) owners[chunk.begin + i]++;
          num_owned += chunk.count;
        }
        EXPECT_LE(end, table.state_count);
        if (!whole_matrices) { EXPECT_EQ(table.state_count, int64_t(table.layout.bytes / sizeof(float)) / ranks); }
      }
      const ParameterTable table =
          make_parameter_table(config, make_attention_plan(config), {0, ranks, whole_matrices});
      EXPECT_EQ(num_owned, table.num_parameters);
      for (const TensorSpec& tensor : table.layout.tensors)
        for (int64_t i = 0; i < tensor.num_elements(); i++)
          EXPECT_EQ(owners[tensor.element_offset() + i], 1) << tensor.name;
    }
  }
}

// The parts of a bucket are all of it, one after the other, on every rank the same.
TEST(Shard, CutsBucketsAlikeOnEveryRank) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  for (const auto& [ranks, whole_matrices] : cases_of_shards(5)) {
    const ParameterTable first = make_parameter_table(config, make_attention_plan(config), {0, ranks, whole_matrices});
    for (int rank = 0; rank < ranks; rank++) {
      const ParameterTable table =
          make_parameter_table(config, make_attention_plan(config), {rank, ranks, whole_matrices});
      for (size_t b = 0; b < table.buckets.size(); b++) {
        const ParameterBucket &bucket = table.buckets[b], &of_first = first.buckets[b];
        EXPECT_EQ(bucket.has_equal_parts, !whole_matrices || ranks == 1 || b == 0 || b == 4);
        int64_t end = bucket.begin;
        for (size_t i = 0; i < bucket.parts.size(); i++) {
          const ShardPart &part = bucket.parts[i], &expected = of_first.parts[i];
          EXPECT_EQ(part.begin, end);
          end += part.count;
          EXPECT_EQ(std::tie(part.owner, part.count, part.state),
                    std::tie(expected.owner, expected.count, expected.state));
          if (bucket.has_equal_parts) { EXPECT_EQ(part.owner, int(i)); }
        }
        EXPECT_EQ(end, bucket.begin + bucket.count);
      }
    }
  }
}

// GPT-2 124M: each matrix is on one rank, and no rank has more to do, or to keep, than its share and a little.
TEST(Shard, DealsWholeMatricesOutInEqualShares) {
  ModelConfig d12;
  ASSERT_TRUE(config_from_preset("d12", d12));
  for (const char* wiring : {"plain", "sla(9,9)", "gqa(4)"}) {
    d12.wiring = parse_wiring(wiring);
    const AttentionPlan plan = make_attention_plan(d12);
    const std::vector<MuonMatrix> all = muon_matrices(make_parameter_table(d12, plan));
    const auto cost = [](const std::vector<MuonMatrix>& matrices) {
      double sum = 0;
      for (const MuonMatrix& matrix : matrices) sum += double(matrix.count()) * double(matrix.shorter());
      return sum;
    };
    for (int ranks : {2, 3, 4, 8}) {
      SCOPED_TRACE(format("%s, %d ranks", wiring, ranks));
      std::set<int64_t> begins;
      for (int rank = 0; rank < ranks; rank++) {
        const ParameterTable table = make_parameter_table(d12, plan, {rank, ranks, /*whole_matrices=*/true});
        const std::vector<MuonMatrix> own = muon_matrices(table);
        for (const MuonMatrix& matrix : own) EXPECT_TRUE(begins.insert(matrix.begin).second) << "has two owners";
        EXPECT_LE(cost(own), 1.05 * cost(all) / ranks);
        EXPECT_LE(double(table.state_count), 1.05 * double(table.num_parameters) / ranks);
      }
      EXPECT_EQ(begins.size(), all.size());
    }
  }
}

// Tensors of a bucket are neighbours, and a collective on a bucket touches no other's.
TEST(Buckets, AreTheEmbeddingsEachLayerAndTheFinalLayerNorm) {
  const ModelConfig config = make_config(3, 4, 20, 2, 3);
  const ParameterTable table = make_parameter_table(config, make_attention_plan(config), {0, 4});
  for (const ParameterSpec& spec : table.specs) {
    const TensorSpec& tensor = table.layout.tensors[spec.tensor];
    const int expected = tensor.name[0] == 'w' ? 0 : tensor.name[0] == 'h' ? tensor.name[2] - '0' + 1 : 4;
    const ParameterBucket& bucket = table.buckets[spec.bucket];
    EXPECT_EQ(spec.bucket, expected) << tensor.name;
    EXPECT_GE(tensor.element_offset(), bucket.begin) << tensor.name;
    EXPECT_LE(tensor.element_offset() + tensor.num_elements(), bucket.begin + bucket.count) << tensor.name;
  }
}

// ----------------------------------------------------------------------------
// Numbers for people

TEST(Print, NumbersHaveTheUnitThatFits) {
  EXPECT_EQ(count_text(9999), "9999");
  EXPECT_EQ(count_text(1e4), "10.0 k");
  EXPECT_EQ(count_text(1e6), "1.00 M");
  EXPECT_EQ(count_text(1e9), "1.00 B");
  EXPECT_EQ(bytes_text(500), "0.5 kB");
  EXPECT_EQ(bytes_text(1e6), "1.0 MB");
  EXPECT_EQ(bytes_text(1e9), "1.00 GB");
  EXPECT_EQ(time_text(59.4), "59s");
  EXPECT_EQ(time_text(60), "1m00s");
  EXPECT_EQ(time_text(3599), "59m59s");
  EXPECT_EQ(time_text(3600), "1h00m");
}
