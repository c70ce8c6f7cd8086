// Where masks leave no token to score there is no loss: in steps, validations, reports and evaluations.
#include "command_line.h"
#include "llmc/report/event_file.h"
#include "llmc/report/report.h"

static const std::string evaluator = "build/fp32/evaluate_gpt2_sla_cpu ";

class Unscored : public CommandLine {
 protected:
  // A shard and its mask, which scores the sequences of 32 tokens that is_scored says.
  template <class IsScored>
  std::string write_masked(const std::string& name, int sequences, IsScored is_scored) const {
    const std::string shard = shard_bytes(32 * sequences + 1);
    write(name + ".mask", mask_of_shard(shard, [&](int i) { return i > 0 && is_scored((i - 1) / 32); }));
    return write(name + ".bin", shard);
  }
};

using LongUnscored = Unscored;  // for the test of a program that `make test` does not build

// The second micro-batch of two sequences alone is scored: the first, which -m 1 takes, has no loss.
TEST_F(Unscored, AValidationWithoutAScoredTokenHasNoLoss) {
  const std::string val = write_masked("val", 4, [](int sequence) { return sequence >= 2; });
  const Outcome o = run(alone + trainer + "-i " + write("train.bin", shard_bytes(2000)) + " -j " + val + small_model +
                        "-x 1 -v 1 -m 1 -o " + in("out"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("val loss - after step 0 (0 tokens"), std::string::npos) << o.out;
  EXPECT_NE(o.err.find("of the 64 tokens that were validated none is scored"), std::string::npos) << o.err;
  int validations = 0;
  for (const json& line : read_log(in("out"))) {
    if (!line.contains("val_loss")) continue;
    validations++;
    EXPECT_TRUE(line.at("val_loss").is_null()) << line;
    EXPECT_FALSE(line.contains("val_accuracy")) << line;
  }
  EXPECT_EQ(validations, 2);
  EXPECT_EQ(event_file(read_run(in("out"))).find("val/loss"), std::string::npos);
  const std::string page = page_of(in("out"));
  EXPECT_NE(page.find("the validation after step 1 had no token to score"), std::string::npos);
  EXPECT_NE(page.find("validation loss</span><b>-</b>"), std::string::npos);
}

TEST_F(Unscored, AStepWithoutAScoredTokenHasNoLoss) {
  const std::string data = write_masked("train", 8, [](int sequence) { return sequence % 4 < 2; });
  const Outcome o =
      run(alone + trainer + "-i " + data + small_model + "-x 4 -v 0 --wiring 'universal(1) act(0.1)' -o " + in("out"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("step 4/4 | loss - | norm 0.000 "), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("skipped"), std::string::npos) << o.out;
  const std::vector<json> steps = steps_of(read_log(in("out")));
  ASSERT_EQ(steps.size(), 4u);
  for (size_t i = 0; i < steps.size(); i++) {
    EXPECT_EQ(steps[i].at("loss").is_null(), i % 2 == 1) << steps[i];
    EXPECT_EQ(steps[i].contains("ponder"), i % 2 == 0) << steps[i];
  }
  const std::string page = page_of(in("out"));
  EXPECT_NE(page.find("2 of 4 steps had no token to score, and have no loss"), std::string::npos);
  EXPECT_EQ(page.find("not finite"), std::string::npos);
}

// A log as runs wrote it that gave such steps a loss of 0, and one whose validation has no loss.
TEST_F(Unscored, WhatHasNoLossIsInNoMeanOfAReport) {
  const std::string steps = "{\"step\":1,\"loss\":3.0,\"grad_norm\":1.0,\"scored_tokens\":5}\n"
                            "{\"step\":2,\"loss\":0.0,\"grad_norm\":0.0,\"scored_tokens\":0}\n";
  for (const char* loss : {"2.5", "null"}) {
    fs::create_directory(in(loss));
    write(std::string(loss) + "/log.jsonl", "{\"run\":{\"steps\":2,\"seed\":1,\"wiring\":\"plain\"}}\n" + steps +
                                                "{\"step\":2,\"val_loss\":" + loss +
                                                (loss[0] == 'n' ? ",\"val_scored_tokens\":0" : "") + "}\n");
  }
  const std::string page = comparison_page({read_run(in("2.5")), read_run(in("null"))});
  EXPECT_NE(page.find("<td>2.50000</td><td></td>"), std::string::npos) << page;
  EXPECT_NE(page.find("<td>-</td><td>-</td>"), std::string::npos) << page;
  EXPECT_EQ(page.find("-2.5"), std::string::npos);
  const std::string one = report_page(read_run(in("2.5")));
  EXPECT_NE(one.find("\"y\":[3.0,null]"), std::string::npos) << "the step's curve has a gap";
}

TEST_F(LongUnscored, WindowsThatCutRowsAreTold) {
  fs::create_directories(in("data"));
  const std::string tokens = write_masked("data/val", 8, [](int) { return true; }),
                    command = alone + evaluator + "dev/test/golden/baseline " + tokens;
  EXPECT_EQ(run(command + " --context 16").err.find("rows"), std::string::npos);
  write("data/MANIFEST.json", "{\"options\":{\"pack\":32}}");
  EXPECT_EQ(run(command).err.find("rows"), std::string::npos);
  for (const char* other : {" --context 16", " --stride 16"})
    EXPECT_NE(run(command + other).err.find("in rows of 32 tokens, and windows of "), std::string::npos) << other;
}

// From 8 windows of 32 tokens --windows 2 takes the first and the fifth, which have no scored token.
TEST_F(LongUnscored, AnEvaluationWithoutAScoredTokenIsRefusedBeforeItBegins) {
  const std::string data = write_masked("val", 8, [](int sequence) { return sequence % 4 != 0; });
  const std::string command = alone + evaluator + "dev/test/golden/baseline " + data + " --json " + in("r.json");
  const Outcome o = run(command + " --windows 2");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("val.bin: the mask beside it leaves no token to score in 2 of its 8 windows"), std::string::npos)
      << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_FALSE(fs::exists(in("r.json")));
  EXPECT_EQ(run(command).exit_status, 0);
  EXPECT_EQ(json::parse(read_file(in("r.json"))).at("texts").at(0).at("tokens"), 6 * 32);
}
