// What `router` and `dense` have learned: shares, the nearest wirings, and what `report` prints and draws.
// Runs from the repository's root, where the programs are.
#include <gtest/gtest.h>
#include "command_line.h"
#include "golden_case.h"
#include "helpers.h"
#include "llmc/formats/safetensors.h"
#include "llmc/report/learned_sources.h"
#include "llmc/report/report.h"

// A router that spells a wiring: in each row of R a single weight that is not 0.
static LearnedSources router_of(const std::string& wiring, int L, int h) {
  const WiringTable t = wiring_table(parse_wiring(wiring), L, h);
  LearnedSources s = {L, t.num_kv_heads, {}, {}};
  for (int l = 0; l < L; l++) {
    s.router.push_back(std::vector<float>(l > 0 ? size_t(t.num_kv_heads * (l + 1) * t.num_kv_heads) : 0));
    for (int i = 0; l > 0 && i < h; i++) {
      const int g = t.kv_head(i);
      s.router.back()[size_t((g * (l + 1) + t.sources(l, i)[0].k) * t.num_kv_heads + g)] = l % 2 ? 2 : 0.5f;
    }
  }
  return s;
}

TEST(LearnedSources, SharesOfLayersAreThoseOfSumsOfMagnitudes) {
  const LearnedSources s = {2, 2, {{}, {1, -2, 3, 2, /*head 1*/ 0, 0, 0, -0.5f}}, {}};
  EXPECT_EQ(s.router_shares(0, 1), std::vector<double>({1}));
  EXPECT_EQ(s.router_shares(1, 0), std::vector<double>({0.375, 0.625}));
  EXPECT_EQ(s.router_shares(1, 1), std::vector<double>({0, 1}));
}

TEST(LearnedSources, OfARouterThatSpellsAWiringItIsTheNearest) {
  for (const char* wiring : {"plain", "sla(2,2)", "sla(3,1:3)", "layers(0_0_1_3)", "sla(1,0:2) sla(3,3:4)",
                             "gqa(2) sla(2,2)", "share(2)", "sla(1,4) sla(2,1:3) sla(3,1)"}) {
    const WiringTable table = wiring_table(parse_wiring(wiring), 4, 4);
    const bool is_grouped = table.num_kv_heads < 4;
    const Wiring routed = parse_wiring(is_grouped ? "gqa(2) router rope" : "router rope");
    const std::vector<NearWiring> near = nearest_wirings(router_of(wiring, 4, 4), routed, 4);
    EXPECT_NEAR(near.back().share, 1, 1e-12) << wiring << ", " << near.back().text;
    const WiringTable found = wiring_table(parse_wiring(near.back().text), 4, 4);
    EXPECT_EQ(found.source_layers, table.source_layers) << wiring << ", " << near.back().text;
    EXPECT_EQ(found.num_kv_heads, table.num_kv_heads);
    EXPECT_GT(found.rope, 0) << "the other terms stay";
    for (size_t i = 1; i < near.size(); i++) EXPECT_LE(near[i - 1].share, near[i].share);
  }
  EXPECT_TRUE(nearest_wirings({4, 4, {}, {{0, 1}}}, parse_wiring("dense"), 4).empty());
  EXPECT_TRUE(nearest_wirings(router_of("plain", 4, 4), parse_wiring("gqa(2) router"), 4).empty()) << "another model's";
}

// A wiring can say neither that a head attends to another head's K/V nor that it subtracts them.
TEST(LearnedSources, OtherHeadsAndNegativeWeightsAreNoWiring) {
  const Wiring routed = parse_wiring("router");
  for (const char* wiring : {"plain", "sla(1,4)", "layers(0_0_1_1)"}) {
    LearnedSources reversed = router_of(wiring, 4, 4), negative = reversed, half = reversed, one = reversed;
    for (float& weight : one.router[1]) weight = -weight;
    for (int l = 1; l < 4; l++) {
      for (int g = 0; g < 4; g++) {
        const auto row = reversed.router[size_t(l)].begin() + g * (l + 1) * 4;
        for (int j = 0; j <= l; j++) std::reverse(row + 4 * j, row + 4 * j + 4);
        half.router[size_t(l)][size_t(g * (l + 1) * 4 + (g + 1) % 4)] += l % 2 ? -2 : 0.5f;
      }
      for (float& weight : negative.router[size_t(l)]) weight = -weight;
    }
    for (const LearnedSources& s : {reversed, negative})
      for (const NearWiring& near : nearest_wirings(s, routed, 4))
        EXPECT_EQ(near.share, 0) << wiring << ", " << near.text;
    for (const NearWiring& near : nearest_wirings(one, routed, 4))
      EXPECT_NO_THROW(validate(parse_wiring(near.text), 4, 4)) << near.text << ": layer 1 prefers none";
    EXPECT_NEAR(nearest_wirings(half, routed, 4).back().share, 0.5, 1e-9) << wiring;
  }
}

// Head i of layer 3 attends to what layer 1 has mixed, which is all of layer 0.
TEST(LearnedSources, AreFollowedThroughAWiringsSources) {
  const std::vector<NearWiring> near =
      nearest_wirings(router_of("layers(0_0_2_3)", 4, 4), parse_wiring("sla(2,4) router"), 4);
  EXPECT_EQ(near.back().text, "layers(0_0_0_0)");
  EXPECT_NEAR(near.back().share, 1, 1e-12);
}

class LearnedSourcesOfModels : public CommandLine {
 protected:
  const std::string program = "./report ", plain = "dev/test/golden/baseline";

  void expect_error(const std::string& arguments, const std::string& part) const {
    const Outcome o = run(program + arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << arguments << "\n" << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
  }
};

// What `router` and `dense` have learned is read from the weights alone.
TEST_F(LearnedSourcesOfModels, AreReadFromTheWeights) {
  for (const std::string name : {"router", "dense"}) {
    const GoldenCase golden = read_golden_case("n_" + name);
    const LearnedSources s = read_learned_sources(golden.folder, golden.config);
    const SafetensorsFile file(golden.folder + "/model.safetensors");
    int found = 0;
    for (const SafetensorsTensor& t : file.tensors()) {
      if (!ends_with(t.name, name == "router" ? ".attn.router" : ".dense")) continue;
      std::vector<float> weights(size_t(t.num_elements()));
      file.read_f32(t, weights.data());
      const int layer = std::stoi(t.name.substr(t.name.find("h.") + 2));
      EXPECT_EQ((name == "router" ? s.router : s.dense)[size_t(layer)], weights) << t.name;
      found++;
    }
    EXPECT_EQ(found, golden.config.num_layers - (name == "router")) << name;
  }
  const GoldenCase golden = read_golden_case("n_router");
  const Outcome o = run(program + golden.folder + " --suggest-wiring");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.out.find(near_share_name), 0u) << o.out;
  for (const NearWiring& near :
       nearest_wirings(read_learned_sources(golden.folder, golden.config), golden.config.wiring, 4))
    EXPECT_NE(o.out.find(format("%.3f  %s\n", near.share, near.text.c_str())), std::string::npos) << o.out;
  expect_error(plain + " --suggest-wiring", "has no `router`");
}

// A checkpoint's checksums are looked at; without its state it is a model like any other.
TEST_F(LearnedSourcesOfModels, OfDamagedWeightsAreAnError) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o = run("build/fp32/train_gpt2_sla_cpu -i " + in("tokens.bin") +
                        " --layers 4 --heads 2 --channels 8 --vocab-size 257 --max-seq-len 16 -t 16 -b 1 -x 1 -v 0 "
                        "--wiring 'router dense' -o " +
                        in("run"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::string model = in("run/step_00000001"), file = model + "/model.safetensors";
  const std::string good = read_file(file);
  for (const std::string name : {"h.2.attn.router", "h.1.dense"}) {
    const SafetensorsFile tensors(file);
    const auto& all = tensors.tensors();
    const auto tensor =
        std::find_if(all.begin(), all.end(), [&](const SafetensorsTensor& t) { return ends_with(t.name, name); });
    ASSERT_NE(tensor, all.end());
    for (const float bad : {NAN, -INFINITY}) {
      std::string damaged = good;
      uint64_t header;
      memcpy(&header, good.data(), sizeof header);
      memcpy(&damaged[8 + header + tensor->begin], &bad, sizeof bad);
      write_file(file, damaged);
      expect_error(model + " --suggest-wiring", "is damaged: its checksum is");
      fs::rename(model + "/state.json", in("state.json"));
      expect_error(model + " --suggest-wiring", name + " has weights that are NaN or infinite");
      fs::rename(in("state.json"), model + "/state.json");
    }
    write_file(file, good);
  }
}

// The newest checkpoint is taken, if it can be read.
TEST_F(LearnedSourcesOfModels, AreDrawnInTheReport) {
  const std::string run = in("run");
  fs::create_directory(run);
  write_file(run + "/log.jsonl", "{\"run\":{\"num_layers\":4,\"num_heads\":4,\"wiring\":\"router gqa(2)\",\"steps\":"
                                 "1}}\n");
  auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  EXPECT_FALSE(has(report_page(read_run(run)), "Learned sources"));
  const GoldenCase golden = read_golden_case("n_router");
  fs::create_directory_symlink(fs::absolute(golden.folder), run + "/step_00000001");
  const std::string page = report_page(read_run(run));
  EXPECT_TRUE(has(page, "<h2>Learned sources</h2>"));
  EXPECT_TRUE(has(page, learned_sources_picture(read_learned_sources(golden.folder, golden.config))));
  EXPECT_TRUE(has(page, "K/V head 1"));
  EXPECT_TRUE(has(page, "wiring without router"));
  fs::create_directory(run + "/step_00000002");
  EXPECT_TRUE(has(report_page(read_run(run)), "<p class=\"warn\">" + run + "/step_00000002/config.json: "));
}
