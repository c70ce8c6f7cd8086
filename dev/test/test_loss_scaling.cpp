// Training in fp16 with dynamic loss scaling, on the emulated GPU: a process with arguments, files and an exit status;
// and when the scale changes. Runs from the repository's root, where build/fp16/train_gpt2_sla_emu lies.
//
// COVERS llmc/train/loss_scale.h
#include <gtest/gtest.h>
#include <cmath>
#include <set>
#include "command_line.h"
#include "golden_case.h"
#include "llmc/train/loss_scale.h"

// ----------------------------------------------------------------------------
// When it changes

TEST(LossScale, DoublesAfterAThousandGoodUpdates) {
  LossScale s;
  EXPECT_EQ(s.scale, 65536);
  for (int i = 0; i < 999; i++) s.count_good_update();
  EXPECT_EQ(s.scale, 65536);
  s.count_good_update();
  EXPECT_EQ(s.scale, 2 * 65536);
  EXPECT_EQ(s.good_updates, 0);
}

TEST(LossScale, CountsAnewAfterAnOverflow) {
  LossScale s = {65536, 999};
  s.count_overflow();
  EXPECT_EQ(s.scale, 32768);
  s.count_good_update();
  EXPECT_EQ(s.scale, 32768);
}

TEST(LossScale, HasALargestValue) {
  LossScale s;
  for (int i = 0; i < 20000; i++) s.count_good_update();
  EXPECT_EQ(s.scale, 1 << 24);
}

TEST(LossScale, ExplainsInfiniteGradientsOfAFiniteLoss) {
  EXPECT_TRUE(LossScale().explains(true, false));
  EXPECT_FALSE(LossScale().explains(true, true));
  EXPECT_FALSE(LossScale().explains(false, false));
  EXPECT_FALSE((LossScale{1, 0}.explains(true, false)));
}

// ----------------------------------------------------------------------------
// Training

class LongFp16Training : public CommandLine {
 protected:
  const std::string fp16_trainer = "OMP_NUM_THREADS=1 build/fp16/train_gpt2_sla_emu ";

  // Sets the scale, and the good updates since it was changed, in the checkpoint of a step in the folder `out`.
  void plant(const std::string& out, int64_t step, int64_t scale, int64_t good_updates) const {
    const std::string path = in(out + format("/step_%08lld/state.json", (long long)step)), text = read_file(path);
    json state = json::parse(text);
    state.erase("checksum");
    state.at("loss_scale") = scale, state.at("good_updates") = good_updates;
    std::string body = state.dump(1);
    body.resize(body.size() - 2);
    write_state(path, body);
  }
  std::string arguments(const std::string& out) const {
    return fp16_trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 2 -o " + in(out) + " ";
  }
  void copy_run(const std::string& from, const std::string& to) const {
    fs::copy(in(from), in(to), fs::copy_options::recursive);
  }
  std::vector<int64_t> scales(const std::string& out) const {
    std::vector<int64_t> found;
    for (const json& line : steps_of(read_log(in(out)))) found.push_back(line.at("loss_scale"));
    return found;
  }
};

TEST_F(LongFp16Training, SaysWhatAGpuHasNoKernelsFor) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  Outcome o = run("SLA_EMU_CC=70 " + arguments("out") + "-x 1");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: emulated GPU has compute capability 7.0, and fp16 needs 7.5 (Turing) or later; build "
                       "with PRECISION=FP32"),
            std::string::npos)
      << o.err;
  const std::string wide_head = "--layers 1 --heads 1 --channels 128 ";
  for (const auto& [term, named, model] : {std::array<std::string, 3>{"topk(5)", "topk", ""},
                                           {"lsh(4,2)", "lsh", ""},
                                           {"relative", "relative with heads of more than 64 channels", wide_head}}) {
    o = run("SLA_EMU_CC=75 " + arguments("out") + model + "-x 1 --wiring '" + term + "'");
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_EQ(o.err, "error: wiring \"" + term + "\": " + named +
                         " in fp16 needs more shared memory than a block of emulated GPU has; leave it out, or build "
                         "with PRECISION=FP32\n");
    EXPECT_FALSE(fs::exists(in("out")));
  }
  EXPECT_EQ(run("SLA_EMU_CC=75 " + arguments("out") + "-x 1").exit_status, 0);
  EXPECT_EQ(run("SLA_EMU_CC=80 " + arguments("more") + "-x 1 --wiring 'topk(5)'").exit_status, 0);
}

// The norms are of gradients without the scale.
TEST_F(LongFp16Training, GoldenCasesAreThoseOfTheIndependentImplementation) {
  for (const std::string name : {"paper_default", "n_modern"}) {
    const GoldenCase g = read_golden_case(name);
    const int per_step = g.batch_size * g.seq_len * g.grad_accum_steps;
    const Outcome o = run(fp16_trainer + "-e " + g.folder + " -i " + g.folder + "/tokens.bin -k constant " +
                          format("-b %d -t %d -d %d -x %d -l 1e-4 -c 0.1 -v 0 -o %s", g.batch_size, g.seq_len, per_step,
                                 g.steps, in(name).c_str()));
    ASSERT_EQ(o.exit_status, 0) << name << ": " << o.err;
    const std::vector<json> steps = steps_of(read_log(in(name)));
    ASSERT_EQ(int(steps.size()), g.steps) << name;
    for (int i = 0; i < g.steps; i++) {
      EXPECT_NEAR(steps[i].at("loss").get<double>() / g.losses[i], 1, 5e-3) << name;
      EXPECT_NEAR(steps[i].at("grad_norm").get<double>() / g.grad_norms[i], 1, 5e-3) << name;
      EXPECT_EQ(steps[i].at("loss_scale"), 65536) << name;
      EXPECT_EQ(steps[i].at("good_updates"), i + 1) << name;
    }
  }
}

// The scale is planted in a checkpoint. Gradients of logits are infinite until it is 2^20. Such steps change nothing
// but the scale, and are not among those that --max-bad-steps counts.
TEST_F(LongFp16Training, AfterAnOverflowTheScaleHalvesAndTrainingContinues) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  ASSERT_EQ(run(arguments("first") + "-x 2").exit_status, 0);
  plant("first", 2, 1 << 24, 5);
  for (const char* out : {"skipped", "whole", "again", "half"}) copy_run("first", out);

  Outcome o = run(arguments("skipped") + "-x 3 -y");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("| loss scale 16777216, which fp16 has no room for: nothing was updated, and it becomes "
                       "8388608"),
            std::string::npos)
      << o.out;
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_TRUE(read_file(in("skipped/step_00000002/") + file) == read_file(in("skipped/step_00000003/") + file))
        << file << " has changed";

  o = run(arguments("whole") + "-x 12 -y --max-bad-steps 2");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> steps = steps_of(read_log(in("whole")));
  EXPECT_EQ(scales("whole"), (std::vector<int64_t>{1 << 16, 1 << 16, 1 << 24, 1 << 23, 1 << 22, 1 << 21, 1 << 20,
                                                   1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20}));
  for (size_t i = 0; i < steps.size(); i++) EXPECT_EQ(steps[i].at("grad_norm").is_null(), 2 <= i && i < 6) << steps[i];
  EXPECT_LT(steps.back().at("loss").get<double>(), steps.front().at("loss").get<double>());
  EXPECT_EQ(steps.back().at("good_updates"), 6);
  std::set<int> saved;
  for (const json& line : read_log(in("whole")))
    if (line.contains("checkpoint")) saved.insert(line.at("step").get<int>());
  EXPECT_EQ(saved.count(4), 1u) << "its weights are as good as those before it";

  ASSERT_EQ(run(arguments("again") + "-x 12 -y").exit_status, 0);
  expect_the_same_checkpoint(in("whole"), in("again"), 12);
  ASSERT_EQ(run(arguments("half") + "-x 8 -y").exit_status, 0);
  ASSERT_EQ(run(arguments("half") + "-x 12 -y").exit_status, 0);
  expect_the_same_checkpoint(in("whole"), in("half"), 12);
  EXPECT_EQ(steps_of(read_log(in("half"))), steps);
}

TEST_F(LongFp16Training, TheScaleDoublesAmidAResumedRun) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  ASSERT_EQ(run(arguments("out") + "-x 2").exit_status, 0);
  plant("out", 2, 1 << 16, 997);
  ASSERT_EQ(run(arguments("out") + "-x 4 -y").exit_status, 0);
  ASSERT_EQ(run(arguments("out") + "-x 6 -y").exit_status, 0);
  EXPECT_EQ(scales("out"), (std::vector<int64_t>{1 << 16, 1 << 16, 1 << 16, 1 << 16, 1 << 16, 1 << 17}));
  EXPECT_EQ(steps_of(read_log(in("out"))).back().at("good_updates"), 1);
}

// The second of two ranks alone has tokens that are scored, and so gradients that overflow. Both skip the step and
// halve the scale, and continue as one rank does with the tokens of both.
TEST_F(LongFp16Training, AnOverflowOnOneRankIsOneOnAll) {
  allow_mpirun();
  const std::string shard = shard_bytes(20 * 128 + 1);
  write("masked.mask", mask_of_shard(shard, [](int i) { return i > 0 && (i - 1) / 64 % 2 == 1; }));
  const auto of = [&](const std::string& out) {
    return fp16_trainer + "-i " + write("masked.bin", shard) + small_model + "-d 128 -k constant -n 2 -o " + in(out);
  };
  ASSERT_EQ(run(of("alone") + " -x 2").exit_status, 0);
  plant("alone", 2, 1 << 24, 5);
  for (const char* out : {"sharded", "whole"}) copy_run("alone", out);
  Outcome o = run(of("alone") + " -x 10 -y");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const std::vector<json> expected = steps_of(read_log(in("alone")));
  EXPECT_TRUE(expected[2].at("grad_norm").is_null());
  EXPECT_FALSE(expected[9].at("grad_norm").is_null());
  for (const auto& [out, zero] : {std::pair("sharded", 1), {"whole", 0}}) {
    o = run("timeout 300 mpirun --oversubscribe -np 2 env " + of(out) + format(" -x 10 -y --zero %d", zero));
    ASSERT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(scales(out), scales("alone")) << out;
    const std::vector<json> steps = steps_of(read_log(in(out)));
    for (size_t i = 0; i < expected.size(); i++) {
      EXPECT_NEAR(steps[i].at("loss").get<double>() / expected[i].at("loss").get<double>(), 1, 1e-3) << steps[i];
      ASSERT_EQ(steps[i].at("grad_norm").is_null(), expected[i].at("grad_norm").is_null()) << steps[i];
      if (steps[i].at("grad_norm").is_null()) continue;
      EXPECT_NEAR(steps[i].at("grad_norm").get<double>() / expected[i].at("grad_norm").get<double>(), 1, 5e-3)
          << steps[i];
    }
  }
}
