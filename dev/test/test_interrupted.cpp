// data/tokenize interrupted at a place that a test chooses, and run again: with other options or damaged files it
// starts over, and what it writes is what an undisturbed run writes.
#include <fcntl.h>
#include <sys/stat.h>
#include "command_line.h"

struct Interruption : CommandLine {
  std::string base = "--val-fraction 0 --shard-tokens 100000 --threads 1 ";

  Interruption() {
    std::string lines;
    for (int i = 0; lines.size() < (1 << 20) + 1000; i++)
      lines += "{\"prompt\": \"" + std::to_string(i) + " in words: \", \"answer\": \"<|endoftext|> " +
               std::string(size_t(i % 50), 'a') + "\", \"text\": \"more\"}\n";
    write("first", lines);
    write_second(lines.substr(0, lines.rfind('\n', 500) + 1));
  }
  // The second file always has the same size and time.
  void write_second(std::string bytes) const {
    bytes.resize(500, ' ');
    const struct timespec times[2] = {{1000000000, 0}, {1000000000, 0}};
    EXPECT_EQ(utimensat(AT_FDCWD, write("second", bytes).c_str(), times, 0), 0);
  }
  Outcome tokenize(const std::string& options, const std::string& out) const {
    return run("data/tokenize " + options + "--out " + in(out) + " " + in("first") + " " + in("second"));
  }
  // A run that ends in the second file, after it has written shards of the first.
  void interrupt(const std::string& options) const {
    fs::remove_all(in("out"));
    const std::string whole = read_file(in("second"));
    write_second("\x1f\x8b\x08");  // the beginning of a compressed file
    const Outcome o = tokenize(options, "out");
    EXPECT_EQ(o.exit_status, 1);
    EXPECT_NE(o.err.find("the same command resumes"), std::string::npos) << o.err;
    ASSERT_TRUE(fs::exists(in("out.tmp/train_000001.bin")));
    write_second(whole);
  }
  // Runs again and compares with an undisturbed run.
  void expect_the_end(const std::string& options, bool resumes) const {
    fs::remove_all(in("good"));
    ASSERT_EQ(tokenize(options, "good").exit_status, 0);
    const Outcome o = tokenize(options, "out");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    EXPECT_EQ(o.err.find("resuming after") != std::string::npos, resumes) << o.err;
    EXPECT_EQ(names_in(in("out")), names_in(in("good")));
    for (const std::string& name : names_in(in("good")))
      EXPECT_TRUE(read_file(in("out/" + name)) == read_file(in("good/" + name))) << name;
  }
};

TEST_F(Interruption, TheSameCommandResumes) {
  for (const char* options : {"", "--pairs "}) {
    interrupt(base + options);
    expect_the_end(base + options, true);
  }
}

TEST_F(Interruption, AnotherVocabularyOrOptionStartsOver) {
  for (const char* options : {"--tokenizer dev/test/tokenizer/small.tiktoken ", "--separator nul ",
                              "--end-of-text after ", "--field text "}) {
    SCOPED_TRACE(options);
    interrupt(base);
    expect_the_end(base + options, false);
  }
  interrupt(base + "--end-of-text after ");  // as pairs have it
  expect_the_end(base + "--pairs ", false);
  interrupt(base);
  expect_the_end("--val-fraction 0 --threads 1 --shard-tokens 70000 ", false);
}

TEST_F(Interruption, ADamagedFileStartsOver) {
  for (const char* name : {"train_000000.bin", "train_000000.mask", "train_000001.mask"}) {
    SCOPED_TRACE(name);
    interrupt(base + "--pairs ");
    const std::string path = "out.tmp/" + std::string(name);
    std::string bytes = read_file(in(path));
    ASSERT_GT(bytes.size(), 3000u);
    bytes[3000] ^= 1;
    write(path, bytes);
    expect_the_end(base + "--pairs ", false);
  }
  std::string part;
  interrupt(base + "--pairs ");
  for (const std::string& name : names_in(in("out.tmp")))
    if (name.find(".mask.part") != std::string::npos) part = "out.tmp/" + name;
  ASSERT_NE(part, "");
  std::string bytes = read_file(in(part));
  bytes[1024] ^= 1;
  write(part, bytes);
  expect_the_end(base + "--pairs ", false);
}
