// The list of terms, and what follows from it: help, the table in llmc/README.md, what combines, tables.
// COVERS llmc/wiring/terms/
#include <gtest/gtest.h>
#include <map>
#include <set>
#include "dev/test/reference/layers.h"
#include "files.h"
#include "helpers.h"
#include "random_wirings.h"

static bool is_plain(const WiringTerm& term) { return std::holds_alternative<PlainTerm>(term); }

TEST(WiringTerms, StandInTheReadmeWithTheirHelpLines) {
  const std::string readme = read_file("llmc/README.md");
  for (const WiringTerm& term : known_terms()) {
    const TermInfo info = info_of(term);
    std::string form;
    for (char c : std::string(info.syntax.form)) form += (c == '|' ? "\\" : "") + std::string(1, c);
    const std::string row = "\n| `" + form + "` | " + info.help + " |\n";
    EXPECT_NE(readme.find(row), std::string::npos) << "llmc/README.md, Terms, has no line" << row;
  }
}

TEST(WiringTerms, AreInTheHelpOfWiringsOnce) {
  const std::string help = wiring_help();
  for (const WiringTerm& term : known_terms()) {
    const std::string lines = "\n  " + info_of(term).syntax.text() + "\n      " + info_of(term).help;
    const size_t at = help.find(lines);
    EXPECT_NE(at, std::string::npos) << lines;
    EXPECT_EQ(help.find(lines, at + 1), std::string::npos) << lines;
  }
  EXPECT_NE(help.find("; needs rope or relative\n"), std::string::npos) << help;
  const std::string modern = "rmsnorm qknorm rope relu2 untied softcap(15): the block that nanochat trains";
  EXPECT_NE(help.find("\n  modern\n      " + modern + "\n"), std::string::npos) << help;
  EXPECT_NE(read_file("llmc/README.md").find("\n| `modern` | " + modern + " |\n"), std::string::npos);
}

TEST(WiringTerms, HaveExamplesThatAreRight) {
  for (const WiringTerm& term : known_terms()) {
    const TermSyntax syntax = info_of(term).syntax;
    for (const std::string& example : parts_of(*syntax.examples ? syntax.examples : syntax.form, " or ")) {
      const std::string error = error_of([&] { parse_wiring(example); });
      EXPECT_TRUE(error.empty() || error.find(": needs ") != std::string::npos) << error;
    }
  }
}

TEST(WiringTerms, CombineWithTheseAlone) {
  // What the parts of a block do not go with; they go with everything else.
  const std::map<std::string, std::set<std::string>> parts = {{"rmsnorm", {}},
                                                              {"qknorm", {"relative", "lsh"}},
                                                              {"untied", {}},
                                                              {"softcap", {}},
                                                              {"relu2", {"silu", "swiglu"}},
                                                              {"silu", {"relu2", "swiglu"}},
                                                              {"swiglu", {"relu2", "silu"}}};
  const std::map<std::string, std::string> combine =
      {{"sla", "also share layers gqa route vres router depth window strided fixed topk sinks documents rope relative "
               "alibi memory universal act dense gru reversible"},
       {"also", "sla share layers gqa vres router depth window strided fixed topk sinks documents rope relative alibi "
                "memory universal act dense gru reversible"},
       {"share", "sla also layers gqa route vres router depth window strided fixed topk sinks documents rope relative "
                 "alibi memory universal act dense gru reversible"},
       {"layers", "sla also share gqa vres router depth window strided fixed topk sinks documents rope relative alibi "
                  "memory universal act dense gru reversible"},
       {"gqa", "sla also share layers route vres router window strided fixed topk sinks documents reuse blend gate "
               "rope relative alibi memory universal act dense gru reversible"},
       {"route", "sla share gqa vres depth window strided fixed topk sinks documents rope relative alibi memory dense "
                 "gru reversible"},
       {"router", "sla also share layers gqa window strided fixed topk sinks documents rope alibi dense"},
       {"depth", "sla also share layers route window strided fixed topk sinks documents rope alibi dense"},
       {"vres", "sla also share layers gqa route window strided fixed topk sinks documents rope alibi dense"},
       {"window", "sla also share layers gqa route vres router depth strided fixed topk sinks documents reuse blend "
                  "gate rope relative alibi memory universal act dense gru reversible"},
       {"strided", "sla also share layers gqa route vres router depth window fixed topk sinks documents reuse blend "
                   "gate rope alibi dense gru reversible"},
       {"fixed", "sla also share layers gqa route vres router depth window strided topk sinks documents reuse blend "
                 "gate rope alibi dense gru reversible"},
       {"topk", "sla also share layers gqa route vres router depth window strided fixed sinks documents reuse blend "
                "gate rope alibi dense gru"},
       {"sinks", "sla also share layers gqa route vres router depth window strided fixed topk documents rope relative "
                 "alibi memory universal act dense gru reversible"},
       {"documents", "sla also share layers gqa route vres router depth window strided fixed topk sinks reuse blend "
                     "gate rope relative alibi universal act dense gru reversible"},
       {"reuse", "gqa window strided fixed topk documents rope gru"},
       {"blend", "gqa window strided fixed topk documents rope gru"},
       {"gate", "gqa window strided fixed topk documents rope gru"},
       {"rope", "sla also share layers gqa route vres router depth window strided fixed topk sinks documents reuse "
                "blend gate memory universal act dense gru reversible"},
       {"relative", "sla also share layers gqa route window sinks documents memory universal act gru"},
       {"alibi", "sla also share layers gqa route vres router depth window strided fixed topk sinks documents "
                 "universal act dense gru reversible"},
       {"memory", "sla also share layers gqa route window sinks rope relative gru"},
       {"universal", "sla also share layers gqa window sinks documents rope relative alibi act gru"},
       {"act", "sla also share layers gqa window sinks documents rope relative alibi universal gru"},
       {"dense", "sla also share layers gqa route vres router depth window strided fixed topk sinks documents rope "
                 "alibi"},
       {"gru", "sla also share layers gqa route window strided fixed topk sinks documents reuse blend gate rope "
               "relative alibi memory universal act lsh"},
       {"lsh", "gru reversible"},
       {"reversible", "sla also share layers gqa route window strided fixed sinks documents rope alibi lsh"}};
  auto example_of = [](const WiringTerm& term) {
    const TermSyntax syntax = info_of(term).syntax;
    return parts_of(*syntax.examples ? syntax.examples : syntax.form, " or ")[0];
  };
  for (const WiringTerm& one : known_terms()) {
    std::string others;
    const std::string name = info_of(one).syntax.name();
    for (const WiringTerm& other : known_terms()) {
      if (one.index() == other.index() || is_plain(one) || is_plain(other)) continue;
      const std::string other_name = info_of(other).syntax.name();
      bool fits = false;  // alone, or with what they need
      for (const char* needed : {"", "rope ", "relative ", "universal(2) ", "rope universal(2) "})
        fits = fits || error_of([&] { parse_wiring(needed + example_of(one) + " " + example_of(other)); }).empty();
      if (const auto part = parts.find(name); part != parts.end())
        EXPECT_EQ(fits, part->second.count(other_name) == 0) << name << " " << other_name;
      else if (fits && parts.count(other_name) == 0) others += (others.empty() ? "" : " ") + other_name;
    }
    if (!is_plain(one) && parts.count(name) == 0) { EXPECT_EQ(others, combine.at(name)) << name; }
  }
}

TEST(WiringTerms, MakeTheReferencesTableInAnyCombination) {
  std::set<std::string> drawn;
  for (uint64_t seed = 1; seed <= 300; seed++) {
    Draw draw = {seed + 10000};
    ModelConfig c = make_config(draw(1, 6), draw(1, 6), 0, 0, 0);
    const std::string wiring = draw_wiring(seed, c.num_layers, c.num_heads);
    SCOPED_TRACE(format("seed %d, %d layers, %d heads: ", int(seed), c.num_layers, c.num_heads) + wiring);
    c.channels = 4 * c.num_heads, c.wiring = parse_wiring(wiring);
    for (const WiringTerm& term : c.wiring.terms) drawn.insert(info_of(term).syntax.name());
    EXPECT_EQ(canonical_text(parse_wiring(canonical_text(c.wiring))), canonical_text(c.wiring));
    const WiringTable table = c.wiring_table();
    EXPECT_EQ(table.num_kv_heads, reference::num_kv_heads(c));
    EXPECT_EQ(table.stored_layers, reference::layers_in_cycle(c));
    EXPECT_EQ(table.memory, reference::positions_of_memory(c));
    for (int l = 0; l < c.num_layers; l++) {
      EXPECT_EQ(table.map_layer[size_t(l)], reference::map_layer(c, l));
      for (int i = 0; i < c.num_heads; i++) {
        reference::Sources sources;
        for (const KVSource& source : table.sources(l, i)) sources.insert({source.k, source.v});
        EXPECT_EQ(sources, reference::source_layers(c, l, i)) << l << ", " << i;
        EXPECT_TRUE(std::is_sorted(table.sources(l, i).begin(), table.sources(l, i).end())) << l << ", " << i;
        EXPECT_EQ(table.sources(l, i).size(), sources.size()) << l << ", " << i;
        for (int t = 0; t < 16; t++)
          for (int j = 0; j <= t; j++)
            ASSERT_EQ(table.mask(l, i).sees(t, j), reference::is_visible(c, l, i, t, j))
                << "layer " << l << ", head " << i << ", query " << t << ", key " << j;
      }
    }
  }
  for (const WiringTerm& term : known_terms())
    EXPECT_EQ(drawn.count(info_of(term).syntax.name()), 1u) << info_of(term).syntax.form;
}
