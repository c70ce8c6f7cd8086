// Every program on a model of every term of llmc/wiring/terms: trained, resumed, sampled from, evaluated, converted
// and reported. What the engines compute is tested elsewhere; here it is that each program knows each term.
#include <algorithm>
#include <cmath>
#include <set>
#include "command_line.h"
#include "golden_case.h"
#include "llmc/wiring/wiring.h"
#include "llmc/base/error.h"

static const std::string sampler = "build/fp32/sample_gpt2_sla_cpu ", evaluator = "build/fp32/evaluate_gpt2_sla_cpu ";

// Each term alone or with what it needs, and some with others.
static const char* const wirings[] = {"plain",
                                      "sla(2,2)",
                                      "also(2,2)",
                                      "share(2)",
                                      "layers(0_0_2_2)",
                                      "sla(2,2,v)",
                                      "sla(1,1:3,k) share(2,v) rope window(8,SL)",
                                      "gqa(2)",
                                      "window(8,SSL)",
                                      "strided(8)",
                                      "fixed(8,2)",
                                      "topk(4)",
                                      "reuse(2)",
                                      "blend(0.3)",
                                      "gate",
                                      "rope",
                                      "relative",
                                      "rope memory(24)",
                                      "universal(1)",
                                      "universal(2) act(0.05)",
                                      "documents",
                                      "rmsnorm",
                                      "qknorm",
                                      "vres sla(2,2)",
                                      "route(0.5) sla(2,2)",
                                      "router gqa(2)",
                                      "depth rope sla(2,2)",
                                      "dense sla(2,2)",
                                      "relu2",
                                      "silu",
                                      "alibi sla(2,2)",
                                      "sinks window(9)",
                                      "alibi sinks documents gqa(2)",
                                      "swiglu",
                                      "untied softcap(0.5)",
                                      "gru",
                                      "lsh(4,2)",
                                      "reversible",
                                      "lsh(4,2) gru",
                                      "lsh(4,2) reversible",
                                      "relative memory(40) gru",
                                      "rope sla(2,1:3) gqa(2) window(9)",
                                      "universal(2) act(0.1) rope window(8)",
                                      "reversible rope sla(2,2)",
                                      "modern gqa(2) window(9)",
                                      "share(2) topk(4)",
                                      "documents relative sla(2,2) window(9)"};

class Terms : public CommandLine, public testing::WithParamInterface<const char*> {
 protected:
  std::string model() const { return in("run/step_00000004"); }
  std::string train(int steps, const std::string& out) const {
    return trainer + "-i " + in("train.bin") + " -j " + in("val.bin") +
           format(" --layers 4 --heads 4 --channels 32 --vocab-size 257 --max-seq-len 32 -t 32 -b 1 -d 64 -m 0 -v 4 "
                  "-n 2 -s 4 -g 8 -k constant -l 1e-3 --wiring '%s' -x %d -o ",
                  GetParam(), steps) +
           in(out);
  }
  Outcome run_well(const std::string& command) const {
    const Outcome o = run(alone + command);
    EXPECT_EQ(o.exit_status, 0) << command << "\n" << o.err;
    return o;
  }
  double loss_of(const std::string& folder) const {
    run_well(evaluator + folder + " " + in("val.bin") + " " + in("text") + " -q --json " + in("results.json"));
    return json::parse(read_file(in("results.json"))).at("texts").at(0).at("loss");
  }
  void expect_the_same_texts_alone_and_together() const {
    const std::string together = run_well(sampler + model() + " --batch " + in("prompts") + " -n 9 --slots 3").out;
    EXPECT_EQ(run_well(sampler + model() + " --batch " + in("prompts") + " -n 9 --slots 1").out, together);
    EXPECT_EQ(std::count(together.begin(), together.end(), '\n'), 5) << together;
    const Outcome o = run_well(sampler + model() + " --prompt 'a prompt' -n 9");
    EXPECT_EQ(o.out.substr(0, 8), "a prompt");
    EXPECT_NE(o.err.find(" of weights and K/V read; "), std::string::npos) << o.err;
  }
  // What lm-evaluation-harness asks for.
  void expect_answers() const {
    const std::string requests = R"({"loglikelihood": [["a", "bc"], ["", "d"]]}
{"loglikelihood_rolling": ["a text"]}
{"generate_until": [{"context": "ab", "max_tokens": 6}, {"context": "c", "max_tokens": 6}]}
)";
    const std::string out = run_well(evaluator + model() + " --serve < " + write("requests", requests)).out;
    EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 3) << out;
    EXPECT_EQ(out.find("error"), std::string::npos) << out;
  }
  void expect_a_file_or_a_refusal_that_names_the_wiring(const std::string& name) const {
    const Outcome o = run("data/convert " + model() + " " + in(name));
    const bool is_plain = std::string(GetParam()) == "plain";
    EXPECT_EQ(o.exit_status, is_plain ? 0 : 1) << o.err;
    EXPECT_EQ(fs::exists(in(name)), is_plain);
    if (!is_plain) { EXPECT_NE(o.err.find(parse_wiring(GetParam()).text), std::string::npos) << o.err; }
  }
};

TEST_P(Terms, EveryProgramTakesTheModel) {
  write("train.bin", shard_bytes(4000, 256));
  write("val.bin", shard_bytes(32 * 6 + 1, 256));
  write("text", "A text of more than a context: so that it has a second window.\n");
  write("prompts", "a\nbcd\n\nlonger than the others\ne\n");
  run_well(train(4, "run"));
  run_well(train(2, "resumed"));
  run_well(train(4, "resumed") + " -y");
  expect_the_same_checkpoint(in("run"), in("resumed"), 4);
  expect_the_same_texts_alone_and_together();
  expect_answers();

  double val_loss = 0;
  for (const json& line : read_log(in("run"))) val_loss = line.value("val_loss", val_loss);
  const double loss = loss_of(model());
  EXPECT_NEAR(loss / val_loss, 1, 1e-5);
  run_well("data/convert " + model() + " " + in("converted"));
  EXPECT_EQ(loss_of(in("converted")), loss);
  for (const char* name : {"model.gguf", "model.bin"}) expect_a_file_or_a_refusal_that_names_the_wiring(name);

  run_well("./report " + in("run") + " " + in("resumed") + " -o " + in("page.html"));
  EXPECT_NE(read_file(in("page.html")).find("<code>" + with_short_names(parse_wiring(GetParam()).text) + "</code>"),
            std::string::npos);
}

static std::string name_of(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return isalnum(uint8_t(c)) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Long, Terms, testing::ValuesIn(wirings), name_of);

// The terms that none of the wirings has.
static std::set<std::string> terms_without(const std::vector<Wiring>& all) {
  std::set<std::string> missing;
  for (const WiringTerm& term : known_terms()) missing.insert(info_of(term).syntax.name());
  for (const Wiring& wiring : all)
    for (const WiringTerm& term : wiring.terms) missing.erase(info_of(term).syntax.name());
  return missing;
}

// A term that is new is in the table, too.
TEST(TermsTable, HasEveryTerm) {
  std::vector<Wiring> all;
  for (const char* wiring : wirings) all.push_back(parse_wiring(wiring));
  EXPECT_EQ(terms_without(all), std::set<std::string>()) << "add it to the list above";
}

TEST(GoldenCases, HaveEveryTerm) {
  std::vector<Wiring> all;
  for (const std::string& name : golden_case_names()) all.push_back(read_golden_case(name).config.wiring);
  EXPECT_EQ(terms_without(all), std::set<std::string>()) << "make one with dev/test/golden/make.py";
}
