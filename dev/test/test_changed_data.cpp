// Data that another program changes while a run reads them.
#include <sys/wait.h>
#include <unistd.h>
#include <fstream>
#include "child.h"
#include "command_line.h"

struct ChangedData : CommandLine {
  // Trains in the folder "out" until a step is logged, then calls `change`; returns what became of the run.
  template <class Change>
  Outcome train_and(const std::string& options, Change change) const {
    const pid_t child = fork();
    if (child == 0) become(alone + trainer + options + " -o " + in("out") + " >" + in("stdout") + " 2>" + in("stderr"));
    for (int i = 0; i < 2000 && read_file(in("out/log.jsonl")).find("\"step\":3,") == std::string::npos; i++)
      usleep(5000);
    change();
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(in("stdout")), read_file(in("stderr"))};
  }
  // Expects an error with the words `what` and a checkpoint of the last step that the log has, from which the run
  // resumes when the file is whole again.
  void expect_saved_error(const Outcome& o, const std::string& what) const {
    EXPECT_EQ(o.exit_status, 1) << o.out << o.err;
    EXPECT_NE(o.err.find(what), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("of which there is a checkpoint; -y resumes"), std::string::npos) << o.err;
    const std::vector<json> steps = steps_of(read_log(in("out")));
    ASSERT_FALSE(steps.empty());
    const int64_t last = steps.back().at("step");
    EXPECT_EQ(logged_checkpoints(read_log(in("out"))), std::multiset<int64_t>{last});
    EXPECT_EQ(steps.size(), size_t(last)) << "each step has trained";
  }
  std::string data() const {
    return std::string(small_model) + "-v 0 -x 3000 -i " + write("train.bin", shard_bytes(40000));
  }
};

// Writes the bytes after a shard's header, in place and at once: a file is never seen shorter.
static void overwrite(const std::string& path, const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(1024);
  file.write(bytes.data(), std::streamsize(bytes.size()));
}

TEST_F(ChangedData, AShorterTokenFileEndsARunWithACheckpoint) {
  const std::string options = data();
  expect_saved_error(train_and(options, [&] { ASSERT_EQ(truncate(in("train.bin").c_str(), 1024), 0); }),
                     in("train.bin") + ": has become shorter");
  write("train.bin", shard_bytes(40000));
  const int64_t step = steps_of(read_log(in("out"))).back().at("step");
  EXPECT_EQ(run(trainer + options + " -x " + std::to_string(step + 2) + " -y -o " + in("out")).exit_status, 0);
}

TEST_F(ChangedData, IdsBeyondTheVocabularyEndARunWithACheckpoint) {
  const std::string large(70000, 'w');  // token 30583
  expect_saved_error(train_and(data(), [&] { overwrite(in("train.bin"), large); }), "is outside the vocabulary of 257");
}

TEST_F(ChangedData, AShorterMaskEndsARunWithACheckpoint) {
  const std::string shard = shard_bytes(40000), options = data();
  write("train.mask", mask_of_shard(shard, [](int i) { return i % 2 == 0; }));
  expect_saved_error(train_and(options, [&] { ASSERT_EQ(truncate(in("train.mask").c_str(), 1024), 0); }),
                     in("train.mask") + ": has become shorter");
}

TEST_F(ChangedData, AShorterValidationFileEndsARunWithACheckpoint) {
  const std::string options = data() + " -v 5 -m 0 -j " + write("val.bin", shard_bytes(3000));
  expect_saved_error(train_and(options, [&] { ASSERT_EQ(truncate(in("val.bin").c_str(), 1024), 0); }),
                     in("val.bin") + ": has become shorter");
  EXPECT_EQ(read_file(in("stderr")).find("nan"), std::string::npos);
}

TEST_F(CommandLine, ABrokenVocabularyBesideTheDataIsToldToBeOne) {
  const std::string data = std::string(small_model) + "-v 0 -x 1 -i " + write("train.bin", shard_bytes(1000));
  write("r50k_base.tiktoken", "IQ== 0\nIg== 1\nIw=");
  expect_error(data, {in("r50k_base.tiktoken") + ": line 3 is not a token", "it lies beside the data or the model",
                      "--tokenizer none"});
  EXPECT_EQ(run(trainer + data + " --tokenizer none").exit_status, 0);
  fs::remove(in("r50k_base.tiktoken"));
  fs::create_symlink("nowhere", in("tokenizer.json"));
  expect_error(data, {in("tokenizer.json") + ": is a link that leads nowhere"});
}
