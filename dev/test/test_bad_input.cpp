// What the trainer says of bad data, models and options, and what it leaves when a disk is full or a loss is not
// finite. Runs from the repository's root, where build/fp32/train_gpt2_sla_cpu and build/fuzz_safetensors lie.
//
// COVERS train_gpt2_sla.cu llmc/train/training.h llmc/formats/config_json llmc/base/files
#include <gtest/gtest.h>
#include <cstring>
#include <filesystem>
#include <set>
#include "command_line.h"
#include "llmc/formats/safetensors.h"

TEST_F(CommandLine, BadDataIsRefusedWithItsName) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string model = small_model;
  expect_error("-i " + in("nothing.bin") + model, {"nothing.bin: no such file"});
  expect_error("-i '" + in("none_*.bin") + "'" + model, {"none_*.bin: no file matches"});
  expect_error("-i " + folder + model, {"is a folder"});
  std::string bad = shard_bytes(2000);
  bad[0] ^= 1;
  write_file(in("magic.bin"), bad);
  expect_error("-i " + in("magic.bin") + model, {"magic.bin", "bad magic"});
  write_file(in("short.bin"), shard_bytes(2000).substr(0, 3000));
  expect_error("-i " + in("short.bin") + model, {"short.bin: truncated"});
  write_file(in("few.bin"), shard_bytes(32));
  expect_error("-i " + in("few.bin") + model, {"few.bin", "a sequence needs T + 1 = 33"});
  write_file(in("large.bin"), shard_bytes(2000, 300));
  expect_error("-i " + in("large.bin") + model, {"large.bin: token", "outside the vocabulary of 257"});
  expect_error("-i " + in("tokens.bin") + " -j " + in("nothing.bin") + model, {"nothing.bin: no such file"});
  write_file(in("one.bin"), shard_bytes(40));
  expect_error("-i " + in("tokens.bin") + " -j " + in("one.bin") + model, {"one.bin: has 1 sequences"});
}

TEST_F(CommandLine, BadModelsAreRefusedWithTheTensorsName) {
  const std::string golden = "dev/test/golden/adjacent", data = "-i " + golden + "/tokens.bin -b 2 -t 32 -e ";
  expect_error(data + in("nowhere"), {"neither a preset", "nor a folder"});
  fs::create_directories(in("model"));
  expect_error(data + in("model"), {"config.json: cannot be read"});
  const std::string config = read_file(golden + "/config.json"), weights = read_file(golden + "/model.safetensors");
  write_file(in("model/config.json"), config);
  expect_error(data + in("model"), {"model.safetensors"});
  write_file(in("model/model.safetensors"), weights.substr(0, weights.size() - 10));
  expect_error(data + in("model"), {"model.safetensors"});
  write_file(in("model/model.safetensors"), weights.substr(0, 100));
  expect_error(data + in("model"), {"model.safetensors", "100 bytes", "cannot hold"});
  write_file(in("model/model.safetensors"), weights.substr(0, 8) + std::string(weights.size(), ' '));
  expect_error(data + in("model"), {"model.safetensors", "header"});
  std::string lie = weights;
  const uint64_t length = ~0ull;
  memcpy(lie.data(), &length, 8);
  write_file(in("model/model.safetensors"), lie);
  expect_error(data + in("model"), {"model.safetensors", "header"});
  write_file(in("model/model.safetensors"), weights);
  json other = json::parse(config);
  other["n_positions"] = 33;
  write_file(in("model/config.json"), other.dump());
  expect_error(data + in("model"), {"wpe.weight has shape (32, 64); by its config.json it is (33, 64)"});
  write_file(in("model/config.json"), config.substr(0, 50));
  expect_error(data + in("model"), {"config.json: is JSON that is cut short"});
}

TEST_F(CommandLine, ImpossibleRunsAreRefused) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  const std::string with = "-i " + in("tokens.bin") + small_model;
  expect_error(with + "-t 33", {"-t 33", "context length is 32"});
  expect_error(with + "-d 100", {"-d 100 is not a multiple of B * T = 2 * 32"});
  expect_error(with + "--wiring 'sla(0,1)'", {"sla(0,1)"});
  expect_error(with + "--wiring 'sla(1,5)'", {"sla(1,5)", "4 heads"});
  expect_error(with + "--channels 33", {"4 heads do not divide 33 channels"});
  expect_error(with + "--colour red", {"--colour"});
  expect_error(with + "-x many", {"many"});
  expect_error(with + "-l 1e-3e", {"1e-3e"});
  expect_error(with + "-s 1 -g 33", {"-g 33"});
  expect_error(with + "-b 100000000", {"exceeds the free memory by", "take a smaller -b or -t"});
  expect_error(with + "-d 64000000064", {"exceeds the free memory by", "take a smaller -d"});
  expect_error(with + "--max-seq-len 1073741824", {"a context length of 1073741824", "take a smaller context length "
                                                                                     "(--max-seq-len)"});
  expect_error(with + "--vocab-size 1073741824", {"take a smaller vocabulary (--vocab-size)"});
  expect_error(with + "--layers 2000000000", {"2000000000 layers are more than a model can have"});  // at once
  expect_error(with + "--layers 10000 --heads 4 --channels 1048576",
               {"10000 layers of 1048576 channels", "take at least", "take a smaller model"});
  expect_error(with + "-y 7", {"-y 7"});
  expect_error(with + "-r 5", {"-r 5", "between 0 and 4"});
}

TEST_F(CommandLine, AnOutputThatCannotBeWrittenIsAnError) {
  write_file(in("tokens.bin"), shard_bytes(2000));
  write_file(in("file"), "");
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-x 2 -o ";
  for (const std::string& out : {in("file"), in("file/below"), std::string("/proc/nowhere")}) {
    const Outcome o = run(with + out);
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find("error: "), std::string::npos) << o.err;
    EXPECT_NE(o.err.find(out + ": "), std::string::npos) << o.err;
  }
}

TEST_F(CommandLine, AFullOutputLosesNothingThatWasComplete) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -n 2 -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const std::string complete = read_file(in("out/step_00000002/optimizer.safetensors"));
  // No file may grow beyond 64 blocks of 1 KiB: to the program, a full disk, and not a reason to die of SIGXFSZ.
  const Outcome o = run("bash -c \"ulimit -f 64; exec " + with + " -x 4\"");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: " + in("out")), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("File too large"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: the last checkpoint of the run could not be written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("out")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000002"}));
  EXPECT_EQ(read_file(in("out/step_00000002/optimizer.safetensors")), complete);
  EXPECT_EQ(run(with + " -x 4").exit_status, 0) << "and resumes when there is room";
}

// A disk of 20 MB: there is room for three checkpoints, not for four.
class LongSmallDisk : public CommandLine {
 protected:
  std::string command;

  void SetUp() override {
    CommandLine::SetUp();
    write_file(in("tokens.bin"), shard_bytes(20000));
    fs::create_directories(in("disk"));
    command = alone + trainer + "-i " + in("tokens.bin") +
              " --layers 4 --heads 4 --channels 96 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l 1e-3 ";
    const Outcome o = with_disk("true");
    if (o.exit_status != 0) GTEST_SKIP() << "no right to mount a tmpfs: " << o.err;
  }

  // Runs a script that sees the disk at in("disk"), empty; it is gone when the script is done.
  Outcome with_disk(const std::string& script) const {
    write_file(in("script"), "mount -t tmpfs -o size=20m tmpfs " + in("disk") + " || exit\n" + script + "\n");
    return run((geteuid() == 0 ? "unshare -m" : "unshare -rm") + std::string(" bash ") + in("script"));
  }
};

TEST_F(LongSmallDisk, ThatIsFullEndsNoTrainingAndLosesNothingComplete) {
  const std::string with = command + "-n 2 -x 9 -o ", out = in("disk/out"), save = "; status=$?; cp -a " + out + " ";
  const Outcome o = with_disk(with + out + save + in("full") + "; exit $status");
  ASSERT_EQ(run(with + in("undisturbed")).exit_status, 0);
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("No space left on device; earlier checkpoints are as they were"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: the last checkpoint of the run could not be written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("full")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000002",
                                                         "step_00000004", "step_00000006"}));
  for (int64_t step : {2, 4, 6}) expect_the_same_checkpoint(in("full"), in("undisturbed"), step);
  EXPECT_EQ(steps_of(read_log(in("full"))), steps_of(read_log(in("undisturbed")))) << "it was trained to the end";
  int errors = 0;
  for (const json& line : read_log(in("full"))) errors += line.contains("save_error");
  EXPECT_EQ(errors, 2) << "after steps 8 and 9";

  // Three fit, so a run that keeps two and needs room for another has enough.
  const Outcome kept = with_disk(with + out + " --keep 2" + save + in("kept") + "; exit $status");
  EXPECT_EQ(kept.exit_status, 0) << kept.err;
  EXPECT_EQ(names_in(in("kept")),
            (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000008", "step_00000009"}));

  const Outcome stopped = with_disk(with + out + " -x 60 --stop-on-save-error");
  EXPECT_EQ(stopped.exit_status, 1);
  EXPECT_NE(stopped.err.find("training stops, earlier checkpoints are as they were (--stop-on-save-error)"),
            std::string::npos)
      << stopped.err;
}

// The disk has no room for another byte, not even of the log, from the first checkpoint on: for a while, or until the
// run is over, which is then resumed.
TEST_F(LongSmallDisk, WithRoomAgainHasAllOfTheRun) {
  const std::string with = command + "-k constant -n 30 --keep 1 -x 300 -o ", out = in("disk/out"),
                    err = in("run's stderr");
  const std::string fill_up = with + out + " 2>\"" + err +
                              "\" & pid=$!\n"
                              "until [ -e " +
                              out +
                              "/step_00000030 ]; do kill -0 $pid || exit; sleep 0.01; done\n"
                              "cat /dev/zero >" +
                              in("disk/filler") + " 2>/dev/null\n";
  const std::string make_room = "cp -a " + out + " " + in("full") + "; rm " + in("disk/filler") + "\n";
  const std::string finish = "status=$?; cp -a " + out + " " + in("done") + "; exit $status";
  ASSERT_EQ(run(with + in("undisturbed")).exit_status, 0);
  auto expect_all = [&](const Outcome& o) {
    ASSERT_EQ(o.exit_status, 0) << o.err << read_file(err);
    for (const char* part : {"log.jsonl: cannot be written: No space left on device; its lines wait for room",
                             "No space left on device; earlier checkpoints are as they were"})
      EXPECT_NE(read_file(err).find(part), std::string::npos) << read_file(err);
    EXPECT_EQ(names_in(in("full")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000030"}));
    EXPECT_EQ(names_in(in("done")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000300"}));
    expect_the_same_checkpoint(in("done"), in("undisturbed"), 300);
    EXPECT_EQ(steps_of(read_log(in("done"))), steps_of(read_log(in("undisturbed"))));
    fs::remove_all(in("full"));
    fs::remove_all(in("done"));
  };
  expect_all(with_disk(fill_up +
                       "for part in wait.for.room as.they.were; do\n"
                       "  until grep -q $part \"" +
                       err +
                       "\"; do kill -0 $pid || exit; sleep 0.01; done\n"
                       "done\n" +
                       make_room + "wait $pid\n" + finish));
  expect_all(with_disk(fill_up + "wait $pid; [ $? = 1 ] || exit 2\n" + make_room + with + out + " -y\n" + finish));
  EXPECT_NE(read_file(err).find("its last lines could not be written: the disk is full"), std::string::npos)
      << read_file(err);
}

// Three checkpoints and the folder of a fourth are there, and not a byte is left, not for the log either, when the run
// is resumed with
// --keep 1.
TEST_F(LongSmallDisk, ThatObsoleteCheckpointsFillIsResumedWithFewer) {
  const std::string with = command + "-k constant -o ", out = in("disk/out");
  ASSERT_EQ(run(with + in("undisturbed") + " -x 9").exit_status, 0);
  const Outcome o = with_disk(with + out + " -n 2 -x 6 || exit 2\nmkdir " + out + "/unfinished_step_00000008\n" +
                              "cat /dev/zero >" + in("disk/filler") + " 2>/dev/null\n" + with + out +
                              " -n 2 -x 9 -y --keep 1; status=$?; cp -a " + out + " " + in("done") + "; exit $status");
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(names_in(in("done")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000009"}));
  expect_the_same_checkpoint(in("done"), in("undisturbed"), 9);
}

TEST_F(LongCommandLine, ARunThatDivergesStopsAndKeepsItsLastCheckpoint) {
  write_file(in("tokens.bin"), shard_bytes(20000));
  const std::string with = trainer + "-i " + in("tokens.bin") + small_model + "-k constant -y -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const std::string complete = read_file(in("out/step_00000002/state.json"));
  const Outcome o = run(with + " -x 200 -n 1 --keep 1 -l 1000 --grad-clip 0 -c 1000 --max-bad-steps 4");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("4 such steps in a row were skipped, and training stops before the weights take harm"),
            std::string::npos)
      << o.err;
  const std::vector<json> log = read_log(in("out"));
  const int64_t last = steps_of(log).back().at("step");
  ASSERT_LT(last, 200);
  EXPECT_TRUE(steps_of(log).back().at("loss").is_null() || steps_of(log).back().at("grad_norm").is_null());
  EXPECT_NE(o.out.find(format("step %lld/200", (long long)last - 1)), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("skipped, nothing was updated: 3 in a row, 3 in all"), std::string::npos) << o.out;
  // The last good step was saved, none of the bad ones, and nothing was removed for them.
  std::set<std::string> expected = {"config.toml", "lock", "log.jsonl", format("step_%08lld", (long long)last - 4)};
  EXPECT_EQ(names_in(in("out")), expected);
}

// A trained model in `in("model")`, in which a test sets single weights.
class ChangedModel : public CommandLine {
 protected:
  struct Weight {
    const char* tensor;
    int64_t element;
    float value;
  };

  void SetUp() override {
    CommandLine::SetUp();
    write_file(in("tokens.bin"), shard_bytes(4000));
    ASSERT_EQ(run(trainer + "-i " + in("tokens.bin") + small_model + "-x 1 -o " + in("first")).exit_status, 0);
    fs::copy(in("first/step_00000001"), in("model"), fs::copy_options::recursive);
  }
  void set_weights(const std::vector<Weight>& weights) const {
    const SafetensorsFile file(in("model/model.safetensors"));
    std::string bytes = read_file(in("model/model.safetensors"));
    for (const Weight& w : weights)
      for (const SafetensorsTensor& t : file.tensors())
        if (t.name == w.tensor)
          memcpy(bytes.data() + file.data_offset() + t.begin + size_t(w.element) * sizeof w.value, &w.value,
                 sizeof w.value);
    write_file(in("new"), bytes);
    fs::rename(in("new"), in("model/model.safetensors"));
    fs::remove(in("model/state.json"));  // which has the checksums of what the weights were
  }
};

// Data in which a token must be foreseen that the model finds infinitely improbable: the loss is infinite there.
class LongImprobableToken : public ChangedModel {
 protected:
  static constexpr uint16_t improbable = 256;

  void SetUp() override {
    ChangedModel::SetUp();
    // The logit of the improbable token is -1e38 times a channel that is always about 100.
    set_weights({{"wte.weight", int64_t(improbable) * 32, -1e38f}, {"ln_f.bias", 0, 100.0f}});
  }

  // The tokens of steps 1, 2, ... of 64 tokens each; the steps `bad_steps` have the improbable one.
  std::string data(int first_step, int steps, const std::set<int>& bad_steps) const {
    std::string bytes = shard_bytes(steps * 64 + 1);
    for (int i = 0; i < steps * 64 + 1; i++) {
      const int step = first_step + i / 64, place = i % 64;
      const uint16_t token =
          bad_steps.count(step) && place == 20 ? improbable : uint16_t((step * step + place * 7) % 200);
      memcpy(bytes.data() + 1024 + 2 * i, &token, 2);
    }
    return bytes;
  }
  std::string command() const { return trainer + "-e " + in("model") + " -b 2 -t 32 -k constant -l 1e-3 -v 0 "; }
};

TEST_F(LongImprobableToken, MakesAStepThatAdamWDoesNotCount) {
  write_file(in("with.bin"), data(1, 12, {1, 2}));
  write_file(in("without.bin"), data(3, 10, {}));
  const Outcome o = run(command() + "-i " + in("with.bin") + " -x 8 -o " + in("with"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.out.find("skipped, nothing was updated: 2 in a row, 2 in all"), std::string::npos) << o.out;
  ASSERT_EQ(run(command() + "-i " + in("without.bin") + " -x 6 -o " + in("without")).exit_status, 0);
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"})
    EXPECT_EQ(read_file(in("with/step_00000008") + file), read_file(in("without/step_00000006") + file)) << file;
}

TEST_F(LongImprobableToken, ChangesNothingAboutAResumedRun) {
  write_file(in("with.bin"), data(1, 20, {2, 5, 6, 9, 10}));
  const std::string with = command() + "-i " + in("with.bin") + " --max-bad-steps 3 -n 1 -x 12 ";
  ASSERT_EQ(run(with + "-o " + in("whole")).exit_status, 0);
  std::set<std::string> expected = {"config.toml", "lock", "log.jsonl"};
  for (int step : {1, 3, 4, 7, 8, 11, 12}) expected.insert(format("step_%08d", step));
  EXPECT_EQ(names_in(in("whole")), expected) << "no checkpoints of skipped steps";
  fs::create_directories(in("half"));
  fs::copy(in("whole/step_00000008"), in("half/step_00000008"), fs::copy_options::recursive);
  ASSERT_EQ(run(with + "-y -o " + in("half")).exit_status, 0);
  expect_the_same_checkpoint(in("whole"), in("half"), 12);
  // The last step of a run is saved even if it is a bad one; and a run that is resumed from there knows how many there
  // were in a row.
  write_file(in("with.bin"), data(1, 20, {2, 5, 6, 7}));
  ASSERT_EQ(run(with + "-x 6 -o " + in("bad_end")).exit_status, 0);
  const Outcome o = run(with + "-y -o " + in("bad_end"));
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: step 7: "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("3 such steps in a row"), std::string::npos) << o.err;
}

// A model with a bias of NaN in its last LayerNorm.
class LongNanModel : public ChangedModel {
 protected:
  void SetUp() override {
    ChangedModel::SetUp();
    set_weights({{"ln_f.bias", 0, NAN}});
  }
};

TEST_F(LongNanModel, IsAnErrorInValidationAndSamples) {
  const std::string with = trainer + "-e " + in("model") + " -b 2 -t 32 -x 0 ";
  const Outcome sampled = run(with + "-s 1 -g 8");
  EXPECT_EQ(sampled.exit_status, 1);
  EXPECT_EQ(sampled.err.find("error: no sample can be drawn: the model's logits are not finite"), 0u) << sampled.err;
  EXPECT_EQ(sampled.out.find("--- sample"), std::string::npos) << sampled.out;
  const Outcome validated = run(with + "-o " + in("out") + " -j " + in("tokens.bin"));
  EXPECT_EQ(validated.exit_status, 1);
  EXPECT_EQ(validated.err.find("error: the validation loss after step 0 is "), 0u) << validated.err;
  EXPECT_NE(validated.err.find("take another model (-e)"), std::string::npos) << validated.err;
  EXPECT_TRUE(read_log(in("out")).back().at("val_loss").is_null());
}

// Training is fine, and so is the checkpoint of step 3; a checkpoint of step 4, after which the validation finds an
// infinite loss, is not written.
TEST_F(LongImprobableToken, InTheValidationEndsTheRunWithoutACheckpoint) {
  write_file(in("train.bin"), data(1, 12, {}));
  write_file(in("val.bin"), data(1, 4, {2}));
  const std::string with =
      alone + command() + "-i " + in("train.bin") + " -j " + in("val.bin") + " -n 1 --keep 1 -x 8 -o " + in("out");
  ASSERT_EQ(run(with + " -x 2").exit_status, 0);
  const Outcome o = run(with + " -y -v 4");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("error: the validation loss after step 4 is inf"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("no checkpoint of this step is written"), std::string::npos) << o.err;
  EXPECT_EQ(names_in(in("out")), (std::set<std::string>{"config.toml", "lock", "log.jsonl", "step_00000003"}));
  EXPECT_EQ(run(with + " -y -v 0").exit_status, 0);
}

TEST(LongFuzzer, FindsNothingInAFewSeconds) { EXPECT_EQ(system("build/fuzz_safetensors 5 1 >/dev/null"), 0); }
