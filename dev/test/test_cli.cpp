// The trainer as its users meet it: a process with arguments, files and an exit status. Runs from the repository's
// root, where build/fp32/train_gpt2_sla_cpu and build/fp32/train_gpt2_sla_emu lie.
//
// COVERS train_gpt2_sla.cu llmc/train/training.h llmc/train/options llmc/train/run.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>
#include <sstream>
#include <tuple>
#include "command_line.h"
#include "golden_case.h"
#include "llmc/train/option.h"
#include "llmc/train/options.h"
#include "llmc/text/tokenizer.h"

static const std::string emulated_trainer = "build/fp32/train_gpt2_sla_emu ";

// ----------------------------------------------------------------------------
// Golden cases

class GoldenCommandLine :
    public CommandLine,
    public testing::WithParamInterface<std::tuple<std::string, std::string>> {};

TEST_P(GoldenCommandLine, TrainsAsTheIndependentImplementationDid) {
  const auto& [trainer, name] = GetParam();
  const GoldenCase g = read_golden_case(name);
  const int per_step = g.batch_size * g.seq_len * g.grad_accum_steps;
  const Outcome o = run(
      trainer + "-e " + g.folder + " -i " + g.folder + "/tokens.bin -j " + g.folder + "/tokens.bin -k constant " +
      format("-b %d -t %d -d %d -x %d -l 1e-4 -c 0.1 -v %d -m %d -o %s --dropout %g --seed %d", g.batch_size, g.seq_len,
             per_step, g.steps, g.steps, g.num_micro_batches(), in("out").c_str(), g.dropout, int(g.seed)));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> log = read_log(in("out"));
  ASSERT_TRUE(log.at(0).contains("run"));
  EXPECT_EQ(log.at(1).at("step"), 0);
  EXPECT_NEAR(log.at(1).at("val_loss").get<double>(), g.val_loss, 1e-5);
  const std::vector<json> steps = steps_of(log);
  ASSERT_EQ(int(steps.size()), g.steps);
  for (int i = 0; i < g.steps; i++) {
    EXPECT_EQ(steps[i].at("step"), i + 1);
    EXPECT_NEAR(steps[i].at("loss").get<double>(), g.losses[i], 1e-5);
    EXPECT_NEAR(steps[i].at("grad_norm").get<double>() / g.grad_norms[i], 1, 2e-5);
    EXPECT_DOUBLE_EQ(steps[i].at("lr").get<double>(), 1e-4);
  }
}

// A trainer and the name of a golden case.
using GoldenRun = std::tuple<std::string, std::string>;

static const GoldenRun quick_golden_run = {trainer, "paper_default"};

// All cases on the CPU. The emulated GPU, on which the model's own tests compute each of them, has every third one.
static std::vector<GoldenRun> other_golden_runs() {
  std::vector<GoldenRun> runs;
  const std::vector<std::string>& names = golden_case_names();
  for (const std::string& name : names)
    if (GoldenRun(trainer, name) != quick_golden_run) runs.push_back({trainer, name});
  for (size_t i = 0; i < names.size(); i += 3) runs.push_back({emulated_trainer, names[i]});
  return runs;
}

static std::string name_of(const testing::TestParamInfo<GoldenRun>& info) {
  const bool emulated = std::get<0>(info.param) == emulated_trainer;
  return std::get<1>(info.param) + (emulated ? "_on_the_emulated_gpu" : "_on_the_cpu");
}

INSTANTIATE_TEST_SUITE_P(Case, GoldenCommandLine, testing::Values(quick_golden_run), name_of);
INSTANTIATE_TEST_SUITE_P(LongCase, GoldenCommandLine, testing::ValuesIn(other_golden_runs()), name_of);

// ----------------------------------------------------------------------------
// One graph, two sets of operations

TEST_F(LongCommandLine, SaysWhichAttentionAGpuCannotCompute) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string program = emulated_trainer + "-i " + in("tokens.bin") + small_model + "-x 1";
  Outcome o = run("SLA_ATTENTION=fast " + program);
  EXPECT_NE(o.exit_status, 0);
  EXPECT_NE(o.err.find("error: SLA_ATTENTION=fast: it must be mma, wgmma, candidates or candidates-ds"),
            std::string::npos)
      << o.err;
  o = run("SLA_ATTENTION=wgmma SLA_EMU_CC=80 " + program);
  EXPECT_NE(o.exit_status, 0);
  EXPECT_NE(o.err.find("error: SLA_ATTENTION=wgmma: it needs a GPU of compute capability 9.0"), std::string::npos)
      << o.err;
}

TEST_F(LongCommandLine, RefusesBf16AndTf32OnAGpuWithoutThem) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string arguments = "-i " + in("tokens.bin") + small_model + "-x 1";
  Outcome o = run("SLA_EMU_CC=75 build/bf16/train_gpt2_sla_emu " + arguments);
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: emulated GPU has compute capability 7.5, and bf16 needs 8.0 (Ampere) or later; build "
                       "with "
                       "PRECISION=FP32"),
            std::string::npos)
      << o.err;
  EXPECT_EQ(run("SLA_EMU_CC=75 " + emulated_trainer + arguments).exit_status, 0);
  o = run("SLA_EMU_CC=75 " + emulated_trainer + arguments + " --tf32 -o " + in("never"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_EQ(o.err, "error: --tf32: emulated GPU has no TF32, which needs compute capability 8.0 (Ampere) or later\n");
  EXPECT_FALSE(fs::exists(in("never")));
  EXPECT_EQ(run("SLA_EMU_CC=80 " + emulated_trainer + arguments + " --tf32").exit_status, 0);
}

// In fp32 a T4's 64 KB of shared memory are enough for every term.
TEST_F(LongCommandLine, HasEveryTermOnAT4InFp32) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  for (const char* wiring : {"lsh(4,3)", "topk(5)", "relative"}) {
    const Outcome o = run("SLA_EMU_CC=75 " + emulated_trainer + "-i " + in("tokens.bin") +
                          " --layers 1 --heads 1 --channels 128 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -x 1 "
                          "--wiring '" +
                          wiring + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
  }
}

TEST_F(LongCommandLine, TheCpuAndTheEmulatedGpuTrainAlike) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string arguments = "-i " + in("tokens.bin") + small_model + "-d 128 -u 3 --shuffle -x 20 -o ";
  ASSERT_EQ(run(trainer + arguments + in("cpu")).exit_status, 0);
  const Outcome o = run(emulated_trainer + arguments + in("emulated"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> cpu = steps_of(read_log(in("cpu"))), emulated = steps_of(read_log(in("emulated")));
  ASSERT_EQ(cpu.size(), 20u);
  ASSERT_EQ(emulated.size(), 20u);
  EXPECT_LT(cpu.back().at("loss").get<double>(), cpu.front().at("loss").get<double>() - 0.03);  // it learns
  for (size_t i = 0; i < cpu.size(); i++)
    EXPECT_NEAR(cpu[i].at("loss").get<double>(), emulated[i].at("loss").get<double>(), 1e-5) << "step " << i + 1;
}

TEST_F(LongCommandLine, HeadsThatTheGpusAttentionDoesNotTakeAreRefused) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  for (const char* shape : {"--channels 20 --heads 4", "--channels 272 --heads 2"}) {
    const Outcome o = run(emulated_trainer + "-i " + in("tokens.bin") + " -t 32 --layers 2 --vocab-size 257 " + shape);
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find("multiple of 8 and at most 128"), std::string::npos) << o.err;
  }
}

TEST_F(CommandLine, Tf32IsRefusedWhereThereIsNone) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  expect_error("-i " + in("tokens.bin") + small_model + "--tf32", {"--tf32", "CPU"});
}

// ----------------------------------------------------------------------------
// Options and outputs

TEST_F(CommandLine, ARunFromItsConfigTomlIsTheSame) {
  const std::string data = in("Stra\u00dfe.bin");
  write_file(data, shard_bytes(20000));
  ASSERT_EQ(run(trainer + "-i " + data + small_model + "-k linear -q 0.1 -x 5 -o " + in("a")).exit_status, 0);
  ASSERT_EQ(run(trainer + "--config " + in("a/config.toml") + " -o " + in("b")).exit_status, 0);
  EXPECT_EQ(steps_of(read_log(in("a"))), steps_of(read_log(in("b"))));
  EXPECT_EQ(read_file(in("a/step_00000005/model.safetensors")), read_file(in("b/step_00000005/model.safetensors")));
}

// Rows that no attention uses are dead at the beginning, in the middle and at the end of c_attn.
TEST_F(LongCommandLine, RunsOfEveryWiringResumeWithTheirBits) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  for (const char* wiring : {"sla(2,2:3)", "share(2) gqa(2)", "layers(0_0_1_3)", "reuse(2)", "reuse(3) window(9)",
                             "gate topk(5)", "router sla(2,2)", "depth", "dense vres"}) {
    SCOPED_TRACE(wiring);
    const std::string command =
        trainer + "-i " + in("tokens.bin") + small_model + format("--wiring '%s' -n 2 -k constant ", wiring);
    for (const char* out : {"a", "b"}) fs::remove_all(in(out));
    ASSERT_EQ(run(command + "-x 4 -o " + in("a")).exit_status, 0);
    ASSERT_EQ(run(command + "-x 2 -o " + in("b")).exit_status, 0);
    const Outcome resumed = run(command + "-x 4 -y -o " + in("b"));
    ASSERT_EQ(resumed.exit_status, 0) << resumed.err;
    for (const char* file : {"/step_00000004/model.safetensors", "/step_00000004/optimizer.safetensors"})
      EXPECT_EQ(read_file(in("a") + file), read_file(in("b") + file)) << file;
  }
}

TEST_F(CommandLine, HelpListsEveryOptionAndSucceeds) {
  const Outcome o = run(trainer + "--help");
  EXPECT_EQ(o.exit_status, 0);
  TrainOptions options;
  for (const Option& option : train_options(options))
    EXPECT_NE(o.out.find("\n  " + option.flags + " "), std::string::npos) << option.flags;
  EXPECT_NE(o.out.find("\n  -b,--micro-batch INT=4 "), std::string::npos) << o.out;
  for (const char* group : {"Data", "Model", "Batch", "Optimization", "Output"})
    EXPECT_NE(o.out.find(format("\n%s:\n", group)), std::string::npos) << group;
  EXPECT_EQ(o.out.find("--skip-"), std::string::npos) << "what is no option any more";
}

TEST_F(CommandLine, HelpOfWiringsListsEveryTerm) {
  const Outcome o = run(trainer + "--help wiring");
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_EQ(o.out, wiring_help());
  EXPECT_EQ(o.err, "");
}

TEST_F(CommandLine, ShowsShapeWiringParametersAndMemoryBeforeItTrains) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + small_model + "-x 1");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  size_t at = 0;
  for (const char* part : {"model: 4 layers, 4 heads of 8, 32 channels", "3 |  .  0  0  0 | projects 1 of 4",
                           "parameters: ", "memory plan for B 2, T 32", "weights", "total",
                           "the largest micro-batch that fits", "step 1/1 | loss "}) {
    at = o.out.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << "\n" << o.out;
  }
}

// Ten micro-batches of 64 tokens. In fp32 each reads the weights twice and adds to the gradients; the update clears and
// reads these, and moves weights and two moments.
TEST_F(CommandLine, ALimitIsOfAllMicroBatchesOfAnUpdate) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o =
      run(trainer + "-i " + in("tokens.bin") + small_model + "--wiring plain -d 640 -x 1 -o " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const json first = read_log(in("out")).at(0).at("run"), step = read_log(in("out")).at(1);
  const double parameters = first.at("num_parameters"), flops = 640 * first.at("flops_per_token").get<double>(),
               seconds = flops / first.at("process").at("gemm_peak").get<double>() +
                         parameters * (10 * (8 + 8) + 4 + 32) / first.at("process").at("copy_bandwidth").get<double>();
  EXPECT_NEAR(step.at("limit_ms").get<double>() * 1e-3 / seconds, 1, 1e-9) << step;
}

// A validation puts aside what two streams remember, 32 positions of 32 channels in 4 layers; a checkpoint has a copy.
TEST_F(CommandLine, ThePlanHasTheHostsBuffers) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + small_model +
                        "--wiring 'memory(32) rope' -d 640 -x 1 --dry-run -o " + in("never"));
  for (const char* part : {"\n  tokens of two updates         10.2 kB\n", "\n  copies of segment memory      65.5 "
                                                                          "kB\n"})
    EXPECT_NE(o.out.find(part), std::string::npos) << part << o.out << o.err;
}

// With weights as small as a new model's, each probability is nearly the bias's sigmoid; the bias begins as 1: 0.731.
TEST_F(CommandLine, OfTokensThatHaltTheMeanIsPrintedAndLogged) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin");
  const Outcome o =
      run(trainer + data + small_model + "--wiring 'universal(1) act(0.1)' -x 2 -d 128 -v 2 -m 1 -o " + in("out"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find(" | ponder 2.2"), std::string::npos) << o.out;
  const std::vector<json> log = read_log(in("out"));
  EXPECT_NEAR(log.at(1).at("val_ponder").get<double>(), 2 + 1 - 0.731, 0.05);
  for (const json& step : steps_of(log)) EXPECT_NEAR(step.at("ponder").get<double>(), 2 + 1 - 0.731, 0.05);
}

// Scripts read these numbers.
TEST_F(CommandLine, ADryRunAsJsonIsOneLineOfNumbers) {
  const Outcome o = run(trainer + small_model + "-x 7 --dry-run --json -o " + in("never"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.out.find('\n'), o.out.size() - 1) << o.out;
  const json plan = json::parse(o.out);
  EXPECT_EQ(plan.at("steps"), 7);
  EXPECT_EQ(plan.at("ranks"), 1);
  EXPECT_GT(plan.at("flops_per_token"), 1e4);
  EXPECT_GT(plan.at("memory_needed"), 1e5);
  EXPECT_GT(plan.at("memory_free"), plan.at("memory_needed"));
  EXPECT_GT(plan.at("largest_micro_batch"), plan.at("micro_batch"));
  const Outcome full = run(trainer + small_model + "-x 7 --dry-run --json >/dev/full");
  EXPECT_EQ(full.exit_status, 1);
  EXPECT_NE(full.err.find("error: standard output cannot be written"), std::string::npos) << full.err;
  EXPECT_FALSE(fs::exists(in("never")));
}

// Without data no stream begins: its memory is full.
TEST_F(CommandLine, ADryRunAsJsonHasTheArithmeticThatItPrints) {
  const std::string dry = trainer + small_model + "--wiring 'memory(40) rope' --dry-run";
  char text[32];
  snprintf(text, sizeof text, " %.4g GFLOP", 1e-9 * json::parse(run(dry + " --json").out).value("flops_per_token", 0.));
  const Outcome o = run(dry);
  EXPECT_NE(o.out.find(text), std::string::npos) << text << "\n" << o.out;
}

// The prompt is an end of text and three bytes, two of them a character; 10 tokens are drawn.
TEST_F(CommandLine, SamplesOfTokensThatHaltHaveThePonderOfEach) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string command =
      trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -x 2 -s 2 -g 14 --prompt 'a\u00fc' ";
  ASSERT_EQ(run(command + "--wiring 'universal(1) act(0.3)' -o " + in("out")).exit_status, 0);
  const std::vector<json> log = read_log(in("out"));
  const auto line = std::find_if(log.begin(), log.end(), [](const json& j) { return j.contains("sample"); });
  ASSERT_NE(line, log.end());
  const std::vector<std::string> tokens = line->at("tokens");
  const std::vector<double> ponder = line->at("ponder");
  ASSERT_EQ(tokens.size(), 14u);
  EXPECT_EQ((std::vector<std::string>{tokens.begin(), tokens.begin() + 4}),
            (std::vector<std::string>{"<|endoftext|>", "a", "", "\u00fc"}));
  EXPECT_EQ(std::accumulate(tokens.begin() + 1, tokens.end(), std::string()), line->at("sample"));
  EXPECT_EQ(ponder.size(), 13u) << "the last token has not gone through the model";
  for (double x : ponder) EXPECT_TRUE(x > 1 && x <= 5) << x;
  EXPECT_NE(page_of(in("out")).find("<pre class=\"shaded\"><span"), std::string::npos);
  ASSERT_EQ(run(command + "-o " + in("plain")).exit_status, 0);
  for (const json& j : read_log(in("plain"))) EXPECT_FALSE(j.contains("ponder") || j.contains("tokens")) << j;
  // The prompt alone, which nothing follows.
  const Outcome o = run(trainer + small_model + "--wiring 'universal(1) act(0.3)' -x 0 -s 1 -g 1");
  EXPECT_EQ(o.exit_status, 0) << o.err;
}

TEST_F(LongCommandLine, ACheckpointIsAModelToStartFromOrValidate) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + " -b 2 -t 32 -m 5 ";
  ASSERT_EQ(run(trainer + data + small_model + "--no-bias -x 4 -v 4 -o " + in("a")).exit_status, 0);
  const Outcome o = run(trainer + data + "-e " + in("a/step_00000004") + " -x 0 -o " + in("b"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const auto a = read_log(in("a")), b = read_log(in("b"));
  const json& last = a.at(a.size() - 2);  // before the line of the checkpoint
  EXPECT_EQ(last.at("step"), 4);
  EXPECT_EQ(b.back().at("step"), 0);
  EXPECT_EQ(last.at("val_loss"), b.back().at("val_loss"));
}

TEST_F(LongCommandLine, AModelContinuesWithAnotherWiringAndSaysWhatChanges) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string data = "-i " + in("tokens.bin") + " -j " + in("tokens.bin") + " -b 2 -t 32 -m 5 -v 4 ";
  ASSERT_EQ(run(trainer + data + small_model + "--wiring plain -x 24 -l 3e-3 -o " + in("plain")).exit_status, 0);
  const std::string changed =
      data + "-e " + in("plain/step_00000024") + " --wiring 'sla(3,3)' -k constant -l 3e-3 -x 8 ";
  const std::string what = "plain and continues with sla(3,3); what changes:\n  layer 3: 3 heads attend to K/V of "
                           "other layers";
  auto says = [&](const std::string& arguments) {
    const Outcome o = run(trainer + arguments);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o.out.find(what) != std::string::npos;
  };
  EXPECT_TRUE(says(changed + "--dry-run"));
  EXPECT_TRUE(says(changed + "-n 4 -o " + in("sla")));
  auto val_loss = [&](const char* out, int64_t step) {
    for (const json& line : read_log(in(out)))
      if (line.contains("val_loss") && line.at("step") == step) return line.at("val_loss").get<double>();
    return 0.0;
  };
  EXPECT_LT(val_loss("sla", 0), val_loss("plain", 4));
  EXPECT_LT(val_loss("sla", 8), val_loss("sla", 0));
  fs::remove_all(in("sla/step_00000008"));
  EXPECT_FALSE(says(changed + "-y -n 4 -o " + in("sla"))) << "a run that resumes has the wiring already";
  EXPECT_FALSE(says(data + "-e " + in("sla/step_00000008") + " --wiring 'sla( 3, 3 )' -x 1"));
}

// The golden case was trained with sla(3,3): layer 3 has no k and v of three heads.
TEST_F(CommandLine, RowsThatAnotherWiringNeedsStartByTheSeed) {
  const std::string golden = "dev/test/golden/paper_default";
  std::vector<double> losses;
  for (const char* seed : {"1", "2"}) {
    const std::string out = in(format("out%zu", losses.size()));
    const Outcome o = run(trainer + "-e " + golden + " --wiring plain -i " + golden +
                          "/tokens.bin -b 1 -t 32 -x 1 -v 0 "
                          "--seed " +
                          seed + " -o " + out);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find("rows of c_attn have no trained values and start as in a new model"), std::string::npos);
    losses.push_back(steps_of(read_log(out)).at(0).at("loss"));
  }
  EXPECT_NE(losses[0], losses[1]);
}

// Three of 12 micro-batches are taken, the first, the fifth and the ninth: their mean loss equals the mean loss of a
// file with these sequences alone.
TEST_F(LongCommandLine, ValidationTakesMicroBatchesAtEvenDistances) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 20 -o " + in("out")).exit_status, 0);
  const std::string whole = shard_bytes(24 * 32 + 1);
  write_file(in("all.bin"), whole);
  fs::create_directory(in("some"));
  for (int batch : {0, 4, 8})  // of two sequences and the token after them
    write_file(in(format("some/%d.bin", batch)),
               shard_bytes(65).substr(0, 1024) + whole.substr(1024 + size_t(batch) * 128, 130));
  auto val_loss = [&](const std::string& data) {
    const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -t 32 -b 2 -m 3 -o " + in("v") + " -i " +
                          in("tokens.bin") + " -j '" + in(data) + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return read_log(in("v")).back().at("val_loss").get<double>();
  };
  EXPECT_NEAR(val_loss("all.bin") / val_loss("some/*.bin"), 1, 1e-6);
}

TEST_F(LongCommandLine, ValidationOfAllDataIsTheSameForEveryBatch) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 20 -o " + in("out")).exit_status, 0);
  fs::create_directory(in("val"));
  write_file(in("val/a.bin"), shard_bytes(32 * 7 + 1));       // full sequences alone
  write_file(in("val/b.bin"), shard_bytes(32 * 3 + 17, 90));  // and 16 tokens more
  write_file(in("val/c.bin"), shard_bytes(5, 20));            // four tokens and their targets
  auto val_loss = [&](const std::string& options) {
    const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -t 32 -o " + in("v") + " -i " +
                          in("tokens.bin") + " -j '" + in("val/*.bin") + "' " + options);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return read_log(in("v")).back().at("val_loss").get<double>();
  };
  // The expected loss, from files of one sequence each, weighted by their lengths.
  double sum = 0;
  int64_t tokens = 0;
  for (const auto& [name, length] : std::map<std::string, int>{{"a", 32 * 7}, {"b", 32 * 3 + 16}, {"c", 4}}) {
    const std::string whole = read_file(in("val/" + name + ".bin")).substr(1024);
    for (int at = 0; at < length; at += 32) {
      const int n = std::min(32, length - at);
      write_file(in("one.bin"), whole.substr(size_t(at) * 2, size_t(n + 1) * 2));
      const Outcome o = run(trainer + "-e " + in("out/step_00000020") + " -x 0 -b 1 -m 0 -t " + std::to_string(n) +
                            " -o " + in("v") + " -j " + in("one.bin"));
      ASSERT_EQ(o.exit_status, 0) << o.err;
      sum += n * read_log(in("v")).back().at("val_loss").get<double>();
      tokens += n;
    }
  }
  const double expected = sum / double(tokens);
  for (int b : {1, 2, 3, 7, 20}) EXPECT_NEAR(val_loss(format("-b %d -m 0", b)) / expected, 1, 1e-6) << b;
  EXPECT_GT(std::abs(val_loss("-b 1 -m 10") / expected - 1), 1e-4) << "full sequences alone";
}

TEST_F(LongCommandLine, ARunWhoseOutputIsClosedTrainsToItsEnd) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const Outcome o = run(trainer + "-i " + in("tokens.bin") + small_model + "-x 30 -o " + in("out") + " | head -1");
  EXPECT_NE(o.out.find("model: "), std::string::npos) << o.out;
  EXPECT_TRUE(fs::exists(in("out/step_00000030/state.json"))) << o.err;
}

// What a run logs, without times, and its sample.
static std::string results_of(const Outcome& o, const std::string& out) {
  std::string results;
  for (json line : read_log(out)) {
    for (const char* time : {"ms", "data_ms", "limit_ms", "tokens_per_second", "stall_ms", "write_ms", "checkpoint"})
      line.erase(time);
    if (!line.contains("run")) results += line.dump() + "\n";
  }
  const size_t sample = o.out.find("--- sample");
  return results + o.out.substr(sample, o.out.find("\n---\n", sample) - sample);
}

// Each with a value that is not the default.
TEST_F(LongCommandLine, EveryOptionOfARunChangesItsResults) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  write_file(in("val.bin"), shard_bytes(4000, 100));
  write_file(in("other.bin"), shard_bytes(20000, 99));
  const std::string base =
      trainer + "-i " + in("tokens.bin") + " -j " + in("val.bin") + small_model + "-d 128 -x 8 -u 2 -v 4 -s 8 -g 24 ";
  auto results = [&](const std::string& options) {
    const std::string out = in("out");
    fs::remove_all(out);
    const Outcome o = run(base + options + " -o " + out);
    EXPECT_EQ(o.exit_status, 0) << options << "\n" << o.err;
    return results_of(o, out);
  };
  const std::string as_it_is = results("");
  EXPECT_EQ(results(""), as_it_is);
  for (const char* same : {"--wiring 'sla(3,3)'", "--wiring ' sla(3 , 1:4)'"})
    EXPECT_EQ(results(same), as_it_is) << same;
  for (const char* options : {"-l 5e-3",
                              "-u 4",
                              "-q 0.5",
                              "-c 0.9",
                              "--grad-clip 0.01",
                              "--beta1 0.5",
                              "--beta2 0.5",
                              "--eps 0.1",
                              "--seed 5",
                              "-k linear",
                              "-k constant",
                              "-k wsd",
                              "--temperature 0.2",
                              "-g 10",
                              "-m 1",
                              "-m 0",
                              "-v 8",
                              "-s 4",
                              "--shuffle",
                              "-t 16 -b 4 -g 16",
                              "-d 64",
                              "--no-bias",
                              "--wiring plain",
                              "--wiring 'sla(1,3)'",
                              "--wiring 'sla(3,1)'",
                              "--layers 5",
                              "--channels 64",
                              "--heads 2",
                              "--prompt a",
                              "-x 9",
                              "-b 1",
                              "--vocab-size 300",
                              "--wiring 'sla(2,2:3)'",
                              "--wiring 'sla(3,3) also(1,1)'",
                              "--wiring 'share(2)'",
                              "--wiring 'layers(0_0_1_3)'",
                              "--wiring 'gqa(2)'",
                              "--wiring 'window(9)'",
                              "--wiring 'window(9,LLSL)'",
                              "--wiring 'strided(5)'",
                              "--wiring 'strided(5,layers)'",
                              "--wiring 'strided(5,union)'",
                              "--wiring 'fixed(6,2)'",
                              "--wiring 'fixed(6,1)'",
                              "--wiring 'topk(4)'",
                              "--wiring 'reuse(2)'",
                              "--wiring 'blend(0.3)'",
                              "--wiring gate"})
    EXPECT_NE(results(options), as_it_is) << options;
  const std::string by_muon = results("--optimizer muon");
  EXPECT_NE(by_muon, as_it_is);
  EXPECT_EQ(results("--optimizer muon --momentum 0.95"), by_muon);
  EXPECT_NE(results("--optimizer muon --momentum 0.5"), by_muon);
  for (const char* data : {"-i ", "-j "}) EXPECT_NE(results(data + in("other.bin")), as_it_is) << data;
}

TEST_F(LongCommandLine, ARunByMuonResumesWithTheSameBits) {
  write_file(in("tokens.bin"), shard_bytes(4000));
  const std::string common =
      trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 3 --optimizer muon -l 1e-2 ";
  ASSERT_EQ(run(common + "-x 3 -o " + in("out")).exit_status, 0);
  expect_the_end_of_an_undisturbed_run(common, 6);
}

// Options that trade memory for time give another plan and the same losses.
TEST_F(CommandLine, OptionsOfMemoryChangeThePlanAndNoLoss) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  std::set<std::string> plans, losses;
  for (const char* options : {"", "-r 1", "-r 2", "-r 3", "-r 4", "--keep-dead-kv"}) {
    const Outcome o = run(alone + trainer + "-i " + in("tokens.bin") + small_model + "-x 2 " + options);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    const size_t plan = o.out.find("\n  activations "), loss = o.out.find("step 2/2 | loss ");
    ASSERT_TRUE(plan != std::string::npos && loss != std::string::npos) << o.out;
    plans.insert(o.out.substr(plan, o.out.find('\n', plan + 1) - plan));
    losses.insert(o.out.substr(loss, 23));
  }
  EXPECT_EQ(plans.size(), 5u);
  EXPECT_EQ(losses.size(), 1u);
}

TEST_F(LongCommandLine, ASampleNeedsAModelAndNoData) {
  write_file(in("tokens.bin"), shard_bytes(20000, 90));
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -o " + in("out")).exit_status, 0);
  const std::string sample = trainer + "-e " + in("out/step_00000002") + " -s 1 -x 0 -g 16 ";
  const Outcome without = run(sample), with = run(sample + "-i " + in("tokens.bin"));
  ASSERT_EQ(without.exit_status, 0) << without.err;
  const size_t at = without.out.find("--- sample after step 0\n");
  ASSERT_NE(at, std::string::npos) << without.out;
  EXPECT_EQ(without.out.substr(at, 40), with.out.substr(with.out.find("--- sample"), 40));
}

TEST_F(LongCommandLine, SamplesAreTextAndTheSameAgain) {
  write_file(in("tokens.bin"), shard_bytes(20000, 90));
  const std::string command = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -s 2 -g 32";
  const Outcome a = run(command), b = run(command);
  const size_t at = a.out.find("--- sample after step 2\n");
  ASSERT_NE(at, std::string::npos) << a.out;
  EXPECT_EQ(a.out.substr(at, 60), b.out.substr(b.out.find("--- sample"), 60));
}

// A folder of data in the tests' small vocabulary of 657 tokens, which is with it unless `carried` is false.
static void write_data(const std::string& folder, bool carried = true) {
  fs::create_directories(folder);
  write_file(folder + "/tokens.bin", shard_bytes(20000, 655));
  if (carried) fs::copy_file("dev/test/tokenizer/tokenizer.json", folder + "/tokenizer.json");
}

static const std::string model_of_657 = " --layers 2 --heads 2 --channels 32 --vocab-size 657 --max-seq-len 32 -t 32 "
                                        "-b 2 -v 0 -l 1e-3 -g 32 ";

// The text between "--- sample" and "---".
static std::string sample_of(const Outcome& o) {
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const size_t at = o.out.find("--- sample after step"), begin = o.out.find('\n', at) + 1,
               end = o.out.find("\n---\n", begin);
  EXPECT_TRUE(at != std::string::npos && end != std::string::npos) << o.out;
  return o.out.substr(begin, end - begin);
}

TEST_F(LongCommandLine, SamplesAreDecodedByTheVocabularyFound) {
  write_data(in("with")), write_data(in("without"), /*carried=*/false);
  const std::string with = trainer + "-i " + in("with/tokens.bin"),
                    without = trainer + "-i " + in("without/tokens.bin");
  const std::string numbers = sample_of(run(without + model_of_657 + "-x 2 -s 2"));
  ASSERT_EQ(numbers.find_first_not_of("0123456789 "), std::string::npos) << numbers;
  const Tokenizer tokenizer = Tokenizer::load("dev/test/tokenizer/small.tiktoken");
  std::istringstream ids(numbers);
  std::string text;
  int count = 0;
  for (int id; ids >> id; count++) text += tokenizer.token(id);
  EXPECT_EQ(count, 31) << "the first of 32 is the end of text that it begins at";
  EXPECT_EQ(sample_of(run(with + model_of_657 + "-x 2 -s 2 -o " + in("out"))), printable(text));
  EXPECT_EQ(sample_of(run(without + model_of_657 + "-x 2 -s 2 --tokenizer dev/test/tokenizer/vocab.bpe")),
            printable(text));
  EXPECT_EQ(sample_of(run(with + model_of_657 + "-x 2 -s 2 --tokenizer none")), numbers);
  sample_of(run(with + model_of_657 + "--vocab-size 2000 -x 0 -s 1"));  // most of its tokens stand for nothing

  // The checkpoint carries it, on to a run that is resumed with data that does not, and to one that begins with it.
  const std::string carried = read_file(in("out/step_00000002/tokenizer.json"));
  EXPECT_EQ(carried, tokenizer.to_json());
  for (const char* name : {"config.json", "generation_config.json"})
    EXPECT_EQ(json::parse(read_file(in("out/step_00000002/") + name)).at("eos_token_id"), tokenizer.end_of_text());
  fs::remove(in("with/tokenizer.json"));
  ASSERT_EQ(run(with + model_of_657 + "-x 4 -y -o " + in("out")).exit_status, 0);
  EXPECT_EQ(read_file(in("out/step_00000004/tokenizer.json")), carried);
  const std::string start = without + " -e " + in("out/step_00000004") + " -t 32 -b 2 -v 0 -x 0 -s 1 -g 32 ";
  EXPECT_EQ(sample_of(run(start + "--prompt 'it has'")).substr(0, 6), "it has");
}

TEST_F(CommandLine, SamplesBeginWithThePromptAndDependOnIt) {
  write_data(in("data"));
  const std::string command = trainer + "-i " + in("data/tokens.bin") + model_of_657 + "-x 0 -s 1 ";
  const std::string a = sample_of(run(command + "--prompt 'it has'")), b = sample_of(run(command + "--prompt 'it "
                                                                                                   "hat'"));
  EXPECT_EQ(a.substr(0, 6), "it has");
  EXPECT_EQ(b.substr(0, 6), "it hat");
  EXPECT_NE(a.substr(6), b.substr(6));
  // An end of text in a prompt is that token, like the one that every sample begins with.
  const std::string twice = sample_of(run(command + "--prompt '<|endoftext|>it has'"));
  EXPECT_EQ(twice.substr(0, 19), "<|endoftext|>it has");
  const std::string broken = sample_of(run(command + "--prompt \"$(printf 'a\\377b')\""));
  EXPECT_EQ(broken.substr(0, 5), "a\ufffdb");
  const std::string lines = sample_of(run(command + "--prompt \"$(printf 'a \"#\\tb\\nc')\""));
  EXPECT_EQ(lines.substr(0, 8), "a \"#\tb\nc");
}

TEST_F(CommandLine, VocabulariesThatDoNotFitAreRefused) {
  write_data(in("data"));
  const std::string data = "-i " + in("data/tokens.bin") + model_of_657 + "-x 1 ",
                    bytes = "-i " + in("tokens.bin") + small_model + "-x 1 ";
  write_file(in("tokens.bin"), shard_bytes(2000));
  expect_error(data + "--tokenizer bytes",
               {"bytes and " + in("data") + "/tokenizer.json are different vocabularies", "--tokenizer none"});
  expect_error(data + "--tokenizer " + in("nowhere"), {in("nowhere") + ": cannot be read"});
  expect_error(data + "--tokenizer " + in("data/tokens.bin"), {"tokens.bin: line 1 is not a token"});
  expect_error(bytes + "--tokenizer dev/test/tokenizer/small.tiktoken",
               {"small.tiktoken: has 657 tokens, the model 257", "--vocab-size"});
  expect_error(data + "--prompt it", {"--prompt", "-s"});
  expect_error(data + "--tokenizer none -s 1 --prompt it", {"--prompt: neither model nor data have a vocabulary"});
  expect_error(bytes + "-s 1 -g 8 --prompt '1234567'", {"--prompt: makes 8 tokens", "a sample has 8"});
  ASSERT_EQ(run(trainer + bytes + "-s 1 -g 8 --prompt '123456'").exit_status, 0);
  ASSERT_EQ(run(trainer + bytes + "-s 1 -g 8 --prompt '<|endoftext|>12345'").exit_status, 0) << "that is one token";
  // A model's against the data's.
  ASSERT_EQ(run(trainer + data + "-o " + in("out")).exit_status, 0);
  const std::string model = "-i " + in("data/tokens.bin") + " -e " + in("out/step_00000001") + " -t 32 -b 2 -x 1 -v 0 ";
  ASSERT_EQ(run(trainer + model).exit_status, 0);
  std::string swapped = read_file("dev/test/tokenizer/small.tiktoken");
  swapped.replace(swapped.find("IQ== 0\nIg== 1\n"), 14, "IQ== 1\nIg== 0\n");
  fs::remove(in("data/tokenizer.json"));
  write_file(in("data/gpt2.tiktoken"), swapped);
  expect_error(model, {in("out/step_00000001/tokenizer.json") + " and " + in("data") +
                       "/gpt2.tiktoken are different vocabularies"});
  ASSERT_EQ(run(trainer + model + "--tokenizer none").exit_status, 0);
}

TEST_F(LongCommandLine, TheNumberOfThreadsChangesNoBit) {
  write_file(in("tokens.bin"), shard_of_documents(2000, 255, /*more=*/80));
  // Large enough for threads to be used in most operations, with rows and channels that no number of threads divides.
  const std::string shape = "-i " + in("tokens.bin") +
                            " --layers 2 --heads 3 --channels 264 --vocab-size 257 --max-seq-len 331 -t 331 -b 3 -x "
                            "2 -l 1e-3 ";
  for (const std::string& program : {trainer, bf16_trainer})
    for (const char* options : {"", "--wiring 'documents also(1,2)' --dropout 0.1 "}) {
      SCOPED_TRACE(program + options);
      const std::string command = program + shape + options + "-o ",
                        out = in(program == trainer ? "fp32" : "bf16") + (*options == 0 ? "_" : "_documents_");
      ASSERT_EQ(run("env OMP_NUM_THREADS=1 " + command + out + "1").exit_status, 0);
      for (const char* threads : {"2", "3"}) {
        ASSERT_EQ(run("env OMP_NUM_THREADS=" + std::string(threads) + " " + command + out + threads).exit_status, 0);
        expect_the_same_checkpoint(out + threads, out + "1", 2);
        EXPECT_EQ(steps_of(read_log(out + threads)), steps_of(read_log(out + "1"))) << threads;
      }
    }
}

// Where dropout drops nothing, no bit differs: with so small a share no element is dropped, and 1 / (1 - p) is 1.
TEST_F(LongCommandLine, DropoutOfZeroHasTheBitsOfNone) {
  write_file(in("tokens.bin"), shard_bytes(4000));
  for (const std::string& program : {trainer, bf16_trainer}) {
    SCOPED_TRACE(program);
    const std::string command = program + "-i " + in("tokens.bin") + small_model + "-x 2 -o ";
    for (const auto& [out, option] : {std::pair("none", ""),
                                      {"zero", " --dropout 0"},
                                      {"next_to_zero", " --dropout 1e-9"},
                                      {"some", " --dropout 0.1"}}) {
      fs::remove_all(in(out));
      ASSERT_EQ(run(command + in(out) + option).exit_status, 0) << option;
    }
    expect_the_same_checkpoint(in("none"), in("zero"), 2);
    const auto losses = [&](const char* out) { return steps_of(read_log(in(out))); };
    EXPECT_EQ(losses("none").size(), 2u);
    EXPECT_EQ(losses("none"), losses("zero"));
    EXPECT_EQ(losses("none"), losses("next_to_zero"));
    EXPECT_NE(losses("none"), losses("some"));
  }
}

// With and without instructions for bf16, which oneDNN can be told to leave: the products are exact in both, the order
// of sums differs.
TEST_F(LongCommandLine, Bf16TrainsAlikeWhereTheCpuHasNoInstructionsForIt) {
  write_file(in("tokens.bin"), shard_bytes(4000));
  const std::string with = bf16_trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -x 20 -l 1e-3 -o ";
  const Outcome emulated = run("env ONEDNN_MAX_CPU_ISA=AVX2 " + with + in("emulated"));
  EXPECT_NE(emulated.out.find("GFLOP/s in fp32, to which bf16 is converted"), std::string::npos) << emulated.out;
  ASSERT_EQ(run(with + in("native")).exit_status, 0);
  ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-d 128 -x 20 -l 1e-3 -o " + in("fp32")).exit_status,
            0);
  const auto steps = steps_of(read_log(in("emulated"))), native = steps_of(read_log(in("native"))),
             fp32 = steps_of(read_log(in("fp32")));
  ASSERT_EQ(steps.size(), 20u);
  for (size_t i = 0; i < steps.size(); i++) {
    const double loss = steps[i].at("loss");
    EXPECT_NEAR(loss / native[i].at("loss").get<double>(), 1, 2e-3) << i;
    EXPECT_NEAR(loss / fp32[i].at("loss").get<double>(), 1, 5e-3) << i;
  }
}

TEST_F(CommandLine, IdleThreadsSleepUnlessAskedOtherwise) {
  // How often threads look for work before they sleep, as libgomp says it last.
  auto spins = [&](const std::string& variables) {
    const std::string told =
        run("env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose " + variables + " " + trainer + "--help")
            .err;
    const size_t at = told.rfind("GOMP_SPINCOUNT = '");
    return at == std::string::npos ? told : told.substr(at + 18, told.find('\'', at + 18) - at - 18);
  };
  EXPECT_EQ(spins("OMP_NUM_THREADS=2"), "2000");
  EXPECT_EQ(spins("OMP_NUM_THREADS=2 GOMP_SPINCOUNT=9"), "9");
  EXPECT_EQ(spins("OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive"), "0");
}
