// The programs and scripts under data/ that make token files.
#include <gtest/gtest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>
#include "child.h"
#include "data_test.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/tokenizer.h"

using Tokenize = Data;
using LongTokenize = Tokenize;
using Scripts = Data;

struct Finished {
  int exit_code;
  std::string output;  // stdout and stderr
};

static Finished shell(const std::string& command) {
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  CHECK(pipe);
  std::string output;
  for (int c; (c = fgetc(pipe)) != EOF;) output += char(c);
  int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output};
}

static void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

// ------------------------------------------------------------------------------------------------------------------
// data/tokenize, as a process.

// The tokens of a prefix's shards as text, with | for the end of text.
static std::string decoded(const std::string& folder, const std::string& prefix) {
  TokenShards shards(folder + "/" + prefix + "_*.bin", 257);
  std::string text;
  for (const TokenFile& file : shards.files)
    for (uint16_t token : file.read(0, file.num_tokens)) text += token == 256 ? '|' : char(token);
  return text;
}

static std::string random_text(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = char('a' + random() % 26);
  return text;
}

TEST_F(Tokenize, FewDocumentsAreSplitByBytes) {
  write("b.txt", "0123456789");
  write("a.txt", "abcdefghijklmnopqrstuvwxyz0123");
  Finished done = shell("data/tokenize --out " + folder + "/out " + folder + "/a.txt " + folder + "/b.txt");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  EXPECT_EQ(decoded(folder + "/out", "train"), "|abcdefghijklmnopqrstuvwxyz0123|012345");
  EXPECT_EQ(decoded(folder + "/out", "val"), "|6789");
  expect_in("documents: 2, bytes of text: 40, files read: 2", done.output);
  expect_in("train: 38 tokens (shards: 1), val: 5 tokens (shards: 1)", done.output);
}

TEST_F(Tokenize, ADocumentOfValidationDataHasOneEndOfText) {
  write("a.txt", "123456789");  // 0.8 * 12 = 9.6: the cut is between two documents
  write("b.txt", "b");
  write("c.txt", "c");
  write("d.txt", "d");
  Finished done = shell("data/tokenize --out " + folder + "/out --val-fraction 0.2 " + folder + "/?.txt");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  EXPECT_EQ(decoded(folder + "/out", "train"), "|123456789");
  EXPECT_EQ(decoded(folder + "/out", "val"), "|b|c|d");
}

// The numbers of the documents ("document 7") in a text, in its order.
static std::vector<int> numbers(const std::string& text, int documents) {
  std::vector<int> found;
  for (size_t at = text.find("|document "); at != std::string::npos; at = text.find("|document ", at + 1))
    found.push_back(std::stoi(text.substr(at + 10)));
  EXPECT_LT(found.size(), size_t(documents));
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
  return found;
}

TEST_F(Tokenize, With200DocumentsOneOfEachTwentyIsValidation) {
  for (int documents : {199, 200, 411}) {
    std::string all;
    for (int i = 0; i < documents; i++)
      all += "document " + std::to_string(i) + "\n" + (i + 1 < documents ? std::string(1, '\0') : "");
    std::string out = folder + "/out" + std::to_string(documents), in = write("in", all);
    ASSERT_EQ(shell("data/tokenize --separator nul --out " + out + " " + in).exit_code, 0);
    if (documents < 200) {
      std::string val = decoded(out, "val");
      val.erase(std::remove(val.begin(), val.end(), '|'), val.end());
      all.erase(std::remove(all.begin(), all.end(), '\0'), all.end());
      EXPECT_EQ(val, all.substr(size_t(double(all.size()) * 0.9))) << "the last tenth of the bytes";
      continue;
    }
    const std::vector<int> drawn = numbers(decoded(out, "val"), documents);
    for (size_t row = 0; row < drawn.size(); row++) EXPECT_EQ(drawn[row] / 20, int(row));  // one of each 20
    EXPECT_GE(drawn.size(), size_t(documents / 20));
    std::set<int> places;
    for (int document : drawn) places.insert(document % 20);
    EXPECT_GT(places.size(), 4u);  // not always at the same place: a corpus may be periodic
    std::vector<int> all_numbers = numbers(decoded(out, "train"), documents);
    all_numbers.insert(all_numbers.end(), drawn.begin(), drawn.end());
    EXPECT_EQ(std::set<int>(all_numbers.begin(), all_numbers.end()).size(), size_t(documents));
    EXPECT_EQ(all_numbers.size(), size_t(documents));
  }
  std::string quarter = "data/tokenize --separator nul --val-fraction 0.25 --out " + folder + "/quarter ";
  ASSERT_EQ(shell(quarter + folder + "/in").exit_code, 0);
  EXPECT_NEAR(double(numbers(decoded(folder + "/quarter", "val"), 411).size()), 411 / 4, 1);
}

TEST_F(Tokenize, EmptyDocumentsAreLeftOutWithAndWithoutNulSeparators) {
  std::string in = write("in", std::string("\0\0ab\0\0\0cd\0efghijklmnopqrst\0", 26));
  ASSERT_EQ(shell("data/tokenize --separator nul --out " + folder + "/nul " + in).exit_code, 0);
  EXPECT_EQ(decoded(folder + "/nul", "train") + "/" + decoded(folder + "/nul", "val"), "|ab|cd|efghijklmnopqr/|st");
  ASSERT_EQ(shell("data/tokenize --any-bytes --out " + folder + "/none " + in).exit_code, 0);
  EXPECT_EQ(decoded(folder + "/none", "train") + decoded(folder + "/none", "val").substr(1), "|" + read_file(in));
}

TEST_F(Tokenize, AFolderIsReadRecursivelySortedByPath) {
  std::filesystem::create_directories(folder + "/in/m/n");
  write("in/z", "zzzz");
  write("in/a", "aaaa");
  write("in/m/n/x", "xxxx");
  write("in/empty", "");
  std::filesystem::create_directory_symlink("..", folder + "/in/m/loop");
  std::filesystem::create_symlink("nowhere", folder + "/in/broken");
  Finished done = shell("data/tokenize --out " + folder + "/out " + folder + "/in");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  EXPECT_EQ(decoded(folder + "/out", "train") + decoded(folder + "/out", "val"), "|aaaa|xxxx|zz|zz");
}

TEST_F(Tokenize, DocumentsAcrossBlocksAndShardsRoundTrip) {
  std::string text = random_text(3 * 1000 * 1000 + 17, 1);  // three chunks of 1 MiB, the last not whole
  text[1 << 20] = text[(1 << 21) - 1] = '\0';               // a separator first in a chunk, and one last
  std::string in = write("in", text);
  Finished done = shell("data/tokenize --separator nul --shard-tokens 100000 --out " + folder + "/out " + in);
  ASSERT_EQ(done.exit_code, 0) << done.output;
  std::string train = decoded(folder + "/out", "train"), val = decoded(folder + "/out", "val");
  std::string expected = "|" + text;
  std::replace(expected.begin(), expected.end(), '\0', '|');
  ASSERT_EQ(val.size(), 1u + 300002);  // a tenth of the bytes that are text, rounded up, and an end of text
  EXPECT_TRUE(train + val.substr(1) == expected);
  TokenShards shards(folder + "/out/train_*.bin", 257);
  ASSERT_EQ(shards.files.size(), (train.size() + 99999) / 100000);
  for (size_t i = 0; i + 1 < shards.files.size(); i++) EXPECT_EQ(shards.files[i].num_tokens, 100000);
}

TEST_F(Tokenize, AFinishedFolderIsLeftAsItIsUnlessForced) {
  std::string in = write("in", random_text(1000, 2)), out = folder + "/out";
  ASSERT_EQ(shell("data/tokenize --out " + out + "/// " + in).exit_code, 0);
  std::string before = read_file(out + "/train_000000.bin");
  Finished again = shell("data/tokenize --out " + out + " " + in);
  EXPECT_EQ(again.exit_code, 0);
  expect_in("exists already", again.output);
  auto expect_refused = [&](const std::string& arguments, const std::string& why) {
    const Finished other = shell("data/tokenize --out " + out + " " + arguments);
    EXPECT_EQ(other.exit_code, 1) << arguments;
    expect_in(out + ": holds other tokens: " + why, other.output);
  };
  expect_refused("--end-of-text after " + in, "their end_of_text was \"before\", and now is \"after\"");
  expect_refused("--val-fraction 0.2 " + in, "their val_fraction was not given, and now is 0.2");
  expect_refused("--tokenizer dev/test/tokenizer/small.tiktoken " + in, "their vocabulary is another");
  expect_refused(in + " " + in, "they are of 1 files, and there are 2");
  const struct timespec same_times[2] = {{1000000000, 0}, {1000000000, 0}};
  write("in", random_text(1000, 3));
  utimensat(AT_FDCWD, in.c_str(), same_times, 0);  // older than the tokens
  expect_refused(in, in + " is another text than theirs");
  EXPECT_TRUE(read_file(out + "/train_000000.bin") == before);
  EXPECT_EQ(shell("data/tokenize --update --out " + out + " " + in).exit_code, 0);
  EXPECT_FALSE(read_file(out + "/train_000000.bin") == before);
  std::string damaged = read_file(out + "/val_000000.bin");
  damaged.back() ^= 1;
  write("out/val_000000.bin", damaged);
  expect_refused(in, out + "/val_000000.bin is missing or damaged");
  std::filesystem::remove(out + "/tokenizer.json");
  expect_refused(in, out + "/tokenizer.json is missing or damaged");
  EXPECT_EQ(shell("data/tokenize --force --shard-tokens 100 --out " + out + " " + in).exit_code, 0);
  EXPECT_FALSE(read_file(out + "/train_000000.bin") == before);
  EXPECT_EQ(shell("data/tokenize --force --out " + out + " " + in).exit_code, 0);
  // No shard of the larger set.
  EXPECT_EQ(names_in(out),
            (std::set<std::string>{"MANIFEST.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"}));
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "out"}));
}

TEST_F(Tokenize, NumbersThatAreNoneAreRefused) {
  for (const auto& [option, why] : {std::pair("--val-fraction nan", "nan: is not a number"),
                                    {"--val-fraction 1e-300", "must be 0, or at least 1e-6"},
                                    {"--val-fraction 2.3283064365386963e-10", "must be 0, or at least 1e-6"},
                                    {"--pack 0x40", "0x40: is not a whole number"}})
    expect_in(why, shell("data/tokenize --out " + folder + "/out " + option + " " + write("in", "text")).output);
  expect_in("--out: is empty", shell("data/tokenize --out '' " + write("in", "text")).output);
}

TEST_F(Tokenize, AFolderOfTokensIsOfTheSameOptionsOrAnother) {
  const std::string in = write("in", random_text(1000, 2)), out = folder + "/out";
  auto run = [&](const std::string& options) { return shell("data/tokenize --out " + out + " " + options + " " + in); };
  auto expect_refused = [&](const std::string& options, const std::string& why) {
    const Finished other = run(options);
    EXPECT_EQ(other.exit_code, 1) << options << other.output;
    expect_in(out + ": holds other tokens: their " + why, other.output);
  };
  ASSERT_EQ(run("").exit_code, 0);
  expect_refused("--pack 64", "pack was not given, and now is 64");
  expect_refused("--any-bytes", "any_bytes was false, and now is true");
  // A version without the two options wrote this.
  std::string manifest = read_file(out + "/MANIFEST.json");
  const size_t begin = manifest.find(",\n  \"pack\": null"), end = manifest.find("\"any_bytes\": false");
  ASSERT_NE(begin, std::string::npos);
  write("out/MANIFEST.json", manifest.erase(begin, end + 18 - begin));
  expect_in("exists already", run("").output);
  expect_refused("--pack 64", "pack was not given, and now is 64");
  expect_refused("--pack 064", "pack was not given, and now is 64");
  ASSERT_EQ(run("--update --pack 64").exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(out + "/train_packed_000000.bin"));
  expect_in("exists already", run("--pack 64").output);
  expect_refused("", "pack was 64, and now is not given");
  expect_refused("--pack 32", "pack was 64, and now is 32");
  ASSERT_EQ(run("--update").exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(out + "/train_000000.bin"));
}

TEST_F(Tokenize, AFolderWithAnythingElseInItIsNeverReplaced) {
  std::string in = write("in", random_text(1000, 2));
  mkdir((folder + "/mine").c_str(), 0755);
  write("mine/thesis.tex", "years of work");
  for (std::string force : {"", "--force "}) {
    Finished done = shell("data/tokenize " + force + "--out " + folder + "/mine " + in);
    EXPECT_EQ(done.exit_code, 1);
    expect_in("holds thesis.tex, which is no shard", done.output);
  }
  EXPECT_EQ(read_file(folder + "/mine/thesis.tex"), "years of work");
  mkdir((folder + "/here").c_str(), 0755);
  for (std::string name : {".", "../here/."})
    expect_in("give the folder by its name",
              shell("tool=$PWD/data/tokenize; cd " + folder + "/here && $tool --out " + name + " " + in).output);
  mkdir((folder + "/model").c_str(), 0755);
  write("model/tokenizer.json", "{}");
  for (std::string more : {"--update ", "--force "})
    expect_in("holds tokenizer.json, but no shard",
              shell("data/tokenize " + more + "--out " + folder + "/model " + in).output);
  EXPECT_EQ(read_file(folder + "/model/tokenizer.json"), "{}");
  mkdir((folder + "/empty").c_str(), 0755);
  EXPECT_EQ(shell("data/tokenize --out " + folder + "/empty " + in).exit_code, 0);
  EXPECT_EQ(names_in(folder + "/empty").size(), 4u);
}

TEST_F(Tokenize, BadInputIsAnErrorAndLeavesNoFiles) {
  std::string empty = write("empty", ""), text = write("text", random_text(1000, 4)), one = write("one", "x");
  mkdir((folder + "/hollow").c_str(), 0755);
  struct Case {
    std::string arguments, message;
  };
  const std::string out = "--out " + folder + "/out ";
  std::vector<Case> cases = {
      {out + folder + "/none", "error: " + folder + "/none: no such file or folder"},
      {out + text + " " + folder + "/none", "/none: no such file or folder"},
      {out + empty, "error: " + empty + ": no text in it: 1 files, 0 bytes"},
      {out + folder + "/hollow", "/hollow: no text in it: 0 files"},
      {out + one, "1 bytes are too few to split"},
      {out + "/dev/null", "/dev/null: is neither a file nor a folder"},
      {out + "/proc/self/mem", "error: /proc/self/mem: cannot read"},  // even for root
      {"--out /proc/none/out " + text, "error: /proc/none/out: cannot be written: No such file"},
      {"--out " + folder + "/text/out " + text, "Not a directory"},
      {"--out " + folder + "/no/such/out " + text, "out: cannot be written: No such file"},
      {out, "PATH is required"},
      {text, "--out is required"},
      {out + "--tokenizer bpe " + text, "bpe: cannot be read"},
      {out + "--val-fraction 2 " + text, "--val-fraction"},
      {out + "--val-fraction much " + text, "--val-fraction"},
      {out + "--nonsense " + text, "--nonsense"},
  };
  for (const Case& c : cases) {
    Finished done = shell("data/tokenize " + c.arguments);
    EXPECT_EQ(done.exit_code, 1) << c.arguments;
    EXPECT_EQ(done.output.rfind("error: ", 0), 0u) << done.output;
    expect_in(c.message, done.output);
    EXPECT_EQ(names_in(folder), (std::set<std::string>{"empty", "hollow", "one", "text"})) << c.arguments;
  }
}

TEST_F(Tokenize, AFullDiskIsAnErrorAndLeavesNoFiles) {
  std::string in = write("in", random_text(5 * 1000 * 1000, 5));
  Finished done = shell("ulimit -f 2048; data/tokenize --out " + folder + "/out " + in);  // 1 MiB, or 2 if sh is bash
  EXPECT_EQ(done.exit_code, 1);
  expect_in("train_000000.bin: cannot write: File too large", done.output);
  EXPECT_EQ(names_in(folder), std::set<std::string>{"in"});
}

static int tokenize_and_signal(const std::string& in, const std::string& out, int signal, int microseconds) {
  return run_and_signal("data/tokenize --force --out " + out + " " + in + " >/dev/null 2>&1", signal, microseconds);
}

TEST_F(LongTokenize, AKilledRunLeavesNoPartialFolder) {
  const std::string in = write("in", random_text(2 * 1000 * 1000, 6)), out = folder + "/out", good = folder + "/good";
  auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(shell("data/tokenize --out " + good + " " + in).exit_code, 0);
  double longest = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  auto complete = [&] {
    return names_in(out) == names_in(good) &&
           read_file(out + "/train_000000.bin") == read_file(good + "/train_000000.bin") &&
           read_file(out + "/val_000000.bin") == read_file(good + "/val_000000.bin");
  };
  std::mt19937 random(7);
  // A folder out.tmp.*, which a killed run has left.
  const auto is_left = [&] {
    const std::set<std::string> names = names_in(folder);
    return std::any_of(names.begin(), names.end(), [](const auto& name) { return name.rfind("out.tmp.", 0) == 0; });
  };
  int absent = 0, left_behind = 0;
  for (int i = 0; i < 30; i++) {
    int status = tokenize_and_signal(in, out, SIGKILL, int(random() % unsigned(longest + 1)));
    longest *= WIFSIGNALED(status) ? 1.2 : 0.7;  // about as many are killed as finish, however fast the disk is
    left_behind += is_left();
    if (std::filesystem::exists(out)) {
      ASSERT_TRUE(complete()) << "kill " << i;
    } else {
      absent++;
      ASSERT_EQ(shell("data/tokenize --out " + out + " " + in).exit_code, 0);
      ASSERT_TRUE(complete());
      EXPECT_FALSE(is_left());
    }
    std::filesystem::remove_all(out);
  }
  EXPECT_GE(left_behind, 3);  // otherwise the times were not random enough
  EXPECT_GE(absent, 3);
}

TEST_F(LongTokenize, KilledWhileReplacingLeavesOldNewOrNoFolder) {
  const std::string in = write("in", random_text(2 * 1000 * 1000, 6)), out = folder + "/out";
  std::string old_text = random_text(1000, 7);
  ASSERT_EQ(shell("data/tokenize --out " + folder + "/new " + in).exit_code, 0);
  ASSERT_EQ(shell("data/tokenize --out " + folder + "/old " + write("in2", old_text)).exit_code, 0);
  std::mt19937 random(8);
  for (int i = 0; i < 40; i++) {
    std::filesystem::remove_all(out);
    std::filesystem::copy(folder + "/old", out);
    tokenize_and_signal(in, out, SIGKILL, int(random() % 40000));
    if (!std::filesystem::exists(out)) continue;
    std::string train = read_file(out + "/train_000000.bin"), val = read_file(out + "/val_000000.bin");
    bool is_old = train == read_file(folder + "/old/train_000000.bin") && val == read_file(folder + "/old/"
                                                                                                    "val_000000.bin");
    bool is_new = train == read_file(folder + "/new/train_000000.bin") && val == read_file(folder + "/new/"
                                                                                                    "val_000000.bin");
    EXPECT_TRUE(is_old || is_new) << "kill " << i;
  }
  ASSERT_EQ(shell("data/tokenize --force --out " + out + " " + in).exit_code, 0);
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "in2", "new", "old", "out"}));  // no .tmp, no .old
}

TEST_F(Tokenize, AFolderThatIsReplacedIsThereAtAllTimes) {
  const std::string in = write("in", random_text(1000, 2)), out = folder + "/out",
                    command = "data/tokenize --force --out " + out + " " + in;
  ASSERT_EQ(shell(command).exit_code, 0);
  std::atomic<bool> done = false;
  int gaps = 0;
  std::thread reader([&] {
    while (!done) gaps += !std::filesystem::exists(out + "/MANIFEST.json");
  });
  for (int i = 0; i < 20; i++) EXPECT_EQ(shell(command).exit_code, 0);
  done = true, reader.join();
  EXPECT_EQ(gaps, 0);
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "out"}));
}

TEST_F(Tokenize, AnInterruptedRunLeavesNoFiles) {
  const std::string in = write("in", random_text(30 * 1000 * 1000, 9));
  for (int moment : {20000, 40000, 60000}) {
    int status = tokenize_and_signal(in, folder + "/out", SIGTERM, moment);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) std::filesystem::remove_all(folder + "/out");  // it was faster
    EXPECT_EQ(names_in(folder), std::set<std::string>{"in"});
  }
}

TEST_F(Tokenize, TwoRunsAtOnceDoNotDisturbEachOther) {
  const std::string in = write("in", random_text(2 * 1000 * 1000, 10)), out = folder + "/out";
  std::string run = "data/tokenize --out " + out + " " + in;
  for (int i = 0; i < 5; i++) {
    Finished both = shell(run + " & " + run + "; wait");
    EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "out"})) << both.output;
    EXPECT_TRUE(decoded(out, "train").substr(1) + decoded(out, "val").substr(1) == read_file(in));
    std::filesystem::remove_all(out);
  }
}

// ------------------------------------------------------------------------------------------------------------------
// The scripts, in a copy of data/, so that existing corpora are not touched.

static std::string copy_scripts(const std::string& folder) {
  std::filesystem::create_directories(folder + "/root/data");
  for (const char* name : {"common.sh", "gpt2.sh", "gcide.sh", "tinyshakespeare.sh", "text.sh", "linux.sh",
                           "fineweb.sh", "openwebtext.sh", "tokenize"})
    std::filesystem::copy_file(std::string("data/") + name, folder + "/root/data/" + name);
  return folder + "/root/data";
}

static std::string last_line(const std::string& output) {
  size_t end = output.find_last_not_of('\n'), newline = output.rfind('\n', end);
  return output.substr(newline + 1, end - newline);
}

TEST_F(Scripts, TextIsTokenizedAgainOnlyWhenItIsAnother) {
  std::string data = copy_scripts(folder);
  mkdir((folder + "/my text").c_str(), 0755);
  write("my text/a", "abcdefghijklmnopqrst");
  std::string command = "cd '" + folder + "/my text' && " + data + "/text.sh ../my\\ text";
  Finished first = shell(command);
  ASSERT_EQ(first.exit_code, 0) << first.output;
  std::string out = last_line(first.output);
  EXPECT_EQ(out.rfind(data + "/text-my_text-", 0), 0u) << out;
  EXPECT_EQ(decoded(out, "train"), "|abcdefghijklmnopqr");
  expect_in("exists already", shell(command).output);
  write("my text/b", "uvwxyzuvwx");
  Finished again = shell(command);
  EXPECT_EQ(last_line(again.output), out);
  EXPECT_EQ(decoded(out, "train") + decoded(out, "val"), "|abcdefghijklmnopqrst|uvwxyzu|vwx");
  expect_in("exists already", shell(command).output);
  write("my text/b", "UVWXYZUVWX");
  const struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
  utimensat(AT_FDCWD, (folder + "/my text/b").c_str(), old, 0);  // as long and older
  EXPECT_EQ(shell(command).exit_code, 0);
  EXPECT_EQ(decoded(out, "train") + decoded(out, "val"), "|abcdefghijklmnopqrst|UVWXYZU|VWX");
  expect_in("no such file or folder", shell(data + "/text.sh /none").output);
}

// `make train`'s script, with a trainer that says how it was called and nothing to build or install. Returns the folder
// that it lies in.
static std::string copy_make_train(const std::string& folder) {
  copy_scripts(folder);
  const std::string root = folder + "/root";
  std::filesystem::create_directory(root + "/scripts");
  std::filesystem::create_directory(root + "/bin");
  for (const char* name : {"train.sh", "ladder.sh", "gpu.sh", "runs.sh", "stoppable.sh"})
    std::filesystem::copy(std::string("scripts/") + name, root + "/scripts/" + name);
  for (const char* stub : {"/scripts/setup.sh", "/bin/make", "/train_gpt2_sla_cpu"}) {
    write_file(root + stub, R"(#!/bin/sh
      echo called: "$0" "$@"
      while [ $# -gt 0 ]; do
        if [ "$1" = --config ] && [ "$3" = -i ]; then cat "$2"; fi
        if [ "$1" = -o ]; then
          mkdir -p "$2"
          printf '{"run":{"flops_per_token":9}}\n{"step":1,"loss":1,"ms":95}\n' >"$2/log.jsonl"
        fi
        shift
      done
    )");
    chmod((root + stub).c_str(), 0755);
  }
  std::filesystem::create_directories(root + "/runs/text/step_1");
  return root;
}

TEST_F(Scripts, TooLittleTextForMakeTrainIsToldSo) {
  const std::string root = copy_make_train(folder);
  auto train = [&](const std::string& text) {
    return shell("cd " + root + " && PATH=" + root + "/bin:/usr/bin:/bin OUT=runs/text TEXT=" + text +
                 " scripts/train.sh");
  };
  const Finished done = train(write("enough", random_text(10300, 4)));
  EXPECT_EQ(done.exit_code, 0) << done.output;
  expect_in("called: ./train_gpt2_sla_cpu --config runs/text.toml -i", done.output);
  const Finished refused = train(write("little", random_text(9000, 4)));
  EXPECT_EQ(refused.exit_code, 1);
  expect_in("error: " + folder + "/little: is too little text: ", refused.output);
  EXPECT_EQ(refused.output.find("called: ./train_gpt2_sla_cpu"), std::string::npos) << refused.output;
}

TEST_F(Scripts, MakeTrainTakesAVocabularyLearnedFromItsText) {
  const std::string root = copy_make_train(folder);
  std::string words;
  std::mt19937 random(5);
  while (words.size() < 60000) words += random() % 3 ? " often" : " seldom" + std::to_string(random() % 100);
  const std::string text = write("mine", words);
  auto train = [&](const std::string& environment) {
    return shell("cd " + root + " && PATH=" + root + "/bin:/usr/bin:/bin TEXT=" + text + " " + environment +
                 " scripts/train.sh");
  };
  const std::string out = "OUT=runs/text ";
  const Finished done = train(out + "VOCABULARY=300");
  EXPECT_EQ(done.exit_code, 0) << done.output;
  expect_in("-bpe300/train_*.bin", done.output);
  expect_in(" --vocab-size 300 ", done.output);
  expect_in(" --prompt often ", done.output);
  expect_in("TEXT=" + text + " VOCABULARY=300 HOURS=1", done.output);
  const Finished fewer = train(out + "VOCABULARY=9000");
  EXPECT_EQ(fewer.output.find("--vocab-size 9000"), std::string::npos) << fewer.output;
  expect_in("the vocabulary has ", fewer.output);
  const Finished bytes = train(out);
  expect_in(" --vocab-size 257 ", bytes.output);
  EXPECT_EQ(bytes.output.find("VOCABULARY"), std::string::npos) << bytes.output;
  std::set<std::string> folders = names_in(root + "/data");
  EXPECT_EQ(std::count_if(folders.begin(), folders.end(), [](const auto& name) { return name.rfind("text-", 0) == 0; }),
            3);
  expect_in(" -o runs/mine-", train("VOCABULARY=300").output);
  for (const char* size : {"256", "65537", "99999999999", "4k", "-300"}) {
    const Finished refused = train("VOCABULARY=" + std::string(size));
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_EQ(refused.output,
              "error: VOCABULARY=" + std::string(size) + ": it must be a number of tokens, 257 to 65536\n");
  }
}

TEST_F(Scripts, TextOfItsOwnVocabularyIsMadeAgainWhenItChanges) {
  const std::string data = copy_scripts(folder), text = write("in", "one two one two one two three three");
  const std::string command = "TOKENIZER=bpe270 " + data + "/text.sh " + text;
  const Finished done = shell(command);
  ASSERT_EQ(done.exit_code, 0) << done.output;
  const std::string out = last_line(done.output), before = read_file(out + "/tokenizer.json");
  EXPECT_EQ(out.substr(out.size() - 7), "-bpe270");
  expect_in("exists already", shell(command).output);
  write("in", "owt eno owt eno owt eno eerht eerht");
  expect_in("is another text than theirs", shell(command).output);
  EXPECT_NE(read_file(out + "/tokenizer.json"), before);
  for (const char* tokenizer : {"bpe", "bpe1", "bpe4k", "bpe0300", "bpe../x"})
    expect_in("it must be bytes (the default) or gpt2, or, as bpe4096, bpe and",
              shell("TOKENIZER=" + std::string(tokenizer) + " " + data + "/text.sh " + text).output);
  expect_in("error: TOKENIZER=bpe270: it must be gpt2 (the default) or bytes",
            shell("TOKENIZER=bpe270 data/hellaswag.sh").output);
}

TEST_F(Scripts, TextOfPairsHasAMaskAndAFolderOfItsOwn) {
  std::string data = copy_scripts(folder);
  std::string lines;
  for (int i = 0; i < 200; i++) lines += "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n";
  Finished done = shell(data + "/text.sh --pairs " + write("in.jsonl", lines));
  ASSERT_EQ(done.exit_code, 0) << done.output;
  const std::string out = last_line(done.output);
  EXPECT_EQ(out.rfind(data + "/pairs-in.jsonl-", 0), 0u) << out;
  EXPECT_EQ(decoded(out, "train").substr(0, 6), "1+1=2|");
  const TokenFile file(out + "/train_000000.bin", 257);
  EXPECT_EQ(file.mask.scored(3, 2), (std::vector<uint8_t>{0, 1}));
}

TEST_F(Scripts, AWrongShakespeareIsRefusedAndNotKept) {
  std::string data = copy_scripts(folder);
  std::string wrong = write("wrong", random_text(1115394, 1));
  Finished done = shell("TINYSHAKESPEARE_URL=file://" + wrong + " " + data + "/tinyshakespeare.sh");
  EXPECT_EQ(done.exit_code, 1);
  expect_in("another checksum", done.output);
  EXPECT_TRUE(names_in(data + "/.download").empty());
  EXPECT_FALSE(std::filesystem::exists(data + "/tinyshakespeare"));
  EXPECT_EQ(shell("TINYSHAKESPEARE_URL=file:///none " + data + "/tinyshakespeare.sh").exit_code, 1);
  // Of a server that sends no parts, a part is of no use.
  std::filesystem::create_directories(folder + "/bin");
  std::ofstream(folder + "/bin/curl") << "#!/bin/sh\nexit 33\n";
  chmod((folder + "/bin/curl").c_str(), 0755);
  std::ofstream(data + "/.download/tinyshakespeare.txt.part") << "First Citizen:";
  expect_in("run again to resume", shell("PATH=" + folder + "/bin:$PATH " + data + "/tinyshakespeare.sh").output);
  EXPECT_TRUE(names_in(data + "/.download").empty());
}

// A replacement for apt-get that makes the package: a licence, then entries. Every tenth entry has a head of two
// lines.
static void fake_apt_get(const std::string& folder, int entries) {
  std::filesystem::create_directories(folder + "/bin");
  std::string path = folder + "/bin/apt-get";
  std::ofstream(path) << "#!/bin/bash\nset -e\nmkdir -p p/DEBIAN p/usr/share/dictd\n"
                         "printf '%s: x\\n' Maintainer Description >p/DEBIAN/control\n"
                         "printf 'Package: dict-gcide\\nVersion: 1\\nArchitecture: all\\n' >>p/DEBIAN/control\n"
                         "{ printf '00-database-info\\n   Licence\\n\\nMore licence\\n  --Locke.\\n0 \\\\0\\\\ adj.\\n "
                         "  zero\\n\\n'\n"
                         "  seq "
                      << entries - 1
                      << " | awk '{ printf \"%d \\\\%d\\\\,\", $1, $1\n"
                         "    if ($1 % 10 == 0) printf \"\\n\\\\more\\\\\"\n"
                         "    print \" n.\\n   A number.\\n\" }'; } | gzip -1 >p/usr/share/dictd/gcide.dict.dz\n"
                         "dpkg-deb -Znone --build p dict-gcide_1_all.deb\n";
  chmod(path.c_str(), 0755);
}

TEST_F(Scripts, EachDictionaryEntryIsADocumentWithoutTheLicence) {
  if (shell("command -v dpkg-deb").exit_code != 0) GTEST_SKIP() << "no dpkg-deb";
  std::string data = copy_scripts(folder);
  fake_apt_get(folder, 100000);
  Finished done = shell("PATH=" + folder + "/bin:$PATH; cd / && " + data + "/gcide.sh");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  EXPECT_EQ(last_line(done.output), data + "/gcide");
  expect_in("documents: 100000,", done.output);
  std::string train = decoded(data + "/gcide", "train");
  EXPECT_EQ(train.rfind("|0 \\0\\ adj.\n   zero\n\n|1 \\1\\, n.\n   A number.\n\n|2 ", 0), 0u) << train.substr(0, 99);
  expect_in("\n\n|10 \\10\\,\n\\more\\ n.\n   A number.\n\n|11 ", train);
  EXPECT_EQ(std::count(train.begin(), train.end(), '|'), 95000);
  EXPECT_TRUE(names_in(data + "/.download").empty());
  expect_in("exists already", shell("PATH=/usr/bin:/bin; " + data + "/gcide.sh").output);
}

TEST_F(Scripts, AFailedDownloadOfTheDictionarySaysWhatToDo) {
  std::string data = copy_scripts(folder);
  fake_apt_get(folder, 10);
  Finished few = shell("PATH=" + folder + "/bin:$PATH " + data + "/gcide.sh");
  EXPECT_EQ(few.exit_code, 1);
  expect_in("found 10 dictionary entries", few.output);
  std::ofstream(folder + "/bin/apt-get") << "#!/bin/sh\necho 'E: Unable to locate package' >&2; exit 100\n";
  Finished failed = shell("PATH=" + folder + "/bin:$PATH " + data + "/gcide.sh");
  EXPECT_EQ(failed.exit_code, 1);
  expect_in("run apt-get update, as root", failed.output);
  EXPECT_TRUE(names_in(data + "/.download").empty());
  EXPECT_FALSE(std::filesystem::exists(data + "/gcide"));
}

// A small vocabulary in place of GPT-2's, under the name of the fetched file.
static void use_small_vocabulary(const std::string& data) {
  std::filesystem::copy_file("dev/test/tokenizer/small.tiktoken", data + "/gpt2.tiktoken");
}

TEST_F(Scripts, ACorpusOfGpt2TokensHasItsOwnFolder) {
  std::string data = copy_scripts(folder), text = write("text", "the text of the text");
  Finished wrong = shell("GPT2_VOCABULARY_URL=file://" + text + " TOKENIZER=gpt2 " + data + "/text.sh " + text);
  EXPECT_EQ(wrong.exit_code, 1);
  expect_in("gpt2: error: file://" + text + " gave 20 bytes with another checksum than expected", wrong.output);
  use_small_vocabulary(data);
  Finished done = shell("TOKENIZER=gpt2 " + data + "/text.sh " + text);
  ASSERT_EQ(done.exit_code, 0) << done.output;
  std::string out = last_line(done.output);
  EXPECT_EQ(out.substr(out.size() - 5), "-gpt2");
  TokenShards shards(out + "/*.bin", 657);
  EXPECT_LT(shards.num_tokens, 20);
  EXPECT_EQ(last_line(shell(data + "/text.sh " + text).output) + "-gpt2", out);  // of bytes
  expect_in("it must be bytes (the default) or gpt2", shell("TOKENIZER=llama " + data + "/text.sh " + text).output);
}

// As where a proxy lets only the registry through: with a package that has another file.
TEST_F(Scripts, Gpt2sVocabularyMayComeFromAPackage) {
  const std::string data = copy_scripts(folder), bin = folder + "/bin";
  std::filesystem::create_directories(bin);
  std::ofstream(bin + "/python3") << "#!/bin/bash\nset -e\nd=${*: -2:1}\nmkdir -p \"$d/p/whisper/assets\"\n"
                                     "printf abc >\"$d/p/whisper/assets/gpt2.tiktoken\"\ntar czf \"$d/p.tar.gz\" -C "
                                     "\"$d\" p\n";
  const std::string curl = shell("command -v curl").output;
  std::ofstream(bin + "/curl") << "#!/bin/sh\ncase \"$*\" in *https:*) exit 6 ;; esac\nexec "
                               << curl.substr(0, curl.find('\n')) << " \"$@\"\n";
  shell("chmod +x " + bin + "/*");
  const Finished other = shell("PATH=" + bin + ":$PATH " + data + "/gpt2.sh");
  EXPECT_EQ(other.exit_code, 1);
  expect_in("taking it from the Python package openai-whisper", other.output);
  expect_in("/whisper/assets/gpt2.tiktoken gave 3 bytes with another checksum than expected", other.output);
  EXPECT_FALSE(std::filesystem::exists(data + "/gpt2.tiktoken"));
}

TEST_F(Scripts, TheKernelIsReadFromItsPackagesArchive) {
  if (shell("command -v dpkg-deb && command -v bzip2").exit_code != 0) GTEST_SKIP() << "no dpkg-deb or bzip2";
  std::string data = copy_scripts(folder);
  std::filesystem::create_directories(folder + "/bin");
  std::ofstream(folder + "/bin/apt-cache") << "#!/bin/sh\nprintf 'linux-source\\n  Depends: linux-source-9.9\\n'\n";
  std::ofstream(folder + "/bin/apt-get") << "#!/bin/bash\nset -e\nmkdir -p p/DEBIAN p/usr/src s/linux-source-9.9/a/b\n"
                                            "printf 'Package: linux-source-9.9\\nVersion: 1\\nArchitecture: "
                                            "all\\nMaintainer: x\\nDescription: x\\n' >p/DEBIAN/control\n"
                                            "for i in $(seq 300 599); do echo \"file $i\" >s/linux-source-9.9/$i.c; "
                                            "done\nmv s/linux-source-9.9/55?.c s/linux-source-9.9/a/b\n"
                                            "tar --sort=name -cjf p/usr/src/linux-source-9.9.tar.bz2 -C s "
                                            "linux-source-9.9\nrm -r s\n"
                                            "dpkg-deb -Znone --build p linux-source-9.9_1_all.deb\nrm -r p\n";
  for (const char* name : {"apt-cache", "apt-get"}) chmod((folder + "/bin/" + name).c_str(), 0755);
  Finished done = shell("PATH=" + folder + "/bin:$PATH " + data + "/linux.sh");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  expect_in("documents: 300,", done.output);
  std::string train = decoded(data + "/linux", "train");
  EXPECT_EQ(std::count(train.begin(), train.end(), '|'), 285);
  expect_in("|file 599\n", train + decoded(data + "/linux", "val"));
  EXPECT_TRUE(names_in(data + "/.download").empty());
  rename((data + "/tokenize").c_str(), (data + "/built").c_str());
  std::ofstream(folder + "/bin/make") << "#!/bin/sh\n[ -z \"$PART\" ] && mv " + data + "/built " + data + "/tokenize\n";
  chmod((folder + "/bin/make").c_str(), 0755);
  done = shell("PATH=" + folder + "/bin:$PATH PART=a/b " + data + "/linux.sh");
  EXPECT_EQ(last_line(done.output), data + "/linux-a-b");
  expect_in("documents: 10,", done.output);
  expect_in("tar cannot unpack it", shell("PATH=" + folder + "/bin:$PATH PART=a/c " + data + "/linux.sh").output);
  expect_in("PART=../b: it must be a folder", shell("PART=../b " + data + "/linux.sh").output);
  std::filesystem::remove_all(data + "/linux");
  std::ofstream(folder + "/bin/apt-cache") << "#!/bin/sh\nexit 100\n";
  expect_in("apt knows no linux-source", shell("PATH=" + folder + "/bin:$PATH " + data + "/linux.sh").output);
}

TEST_F(Scripts, FinewebsShardsAreCheckedAndDownloadsResume) {
  std::string data = copy_scripts(folder);
  use_small_vocabulary(data);
  mkdir((folder + "/web").c_str(), 0755);
  write_shard("web/fineweb_val_000000.bin", counting(100));
  write_shard("web/fineweb_train_000001.bin", counting(200));
  write_shard("web/fineweb_train_000002.bin", counting(300), 20240520, 1, 7);  // a header with too many tokens
  std::string command = "FINEWEB_URL=file://" + folder + "/web " + data + "/fineweb.sh ";
  std::filesystem::create_directories(data + "/fineweb");
  std::string whole = read_file(folder + "/web/fineweb_train_000001.bin");
  std::ofstream(data + "/fineweb/fineweb_train_000001.bin.part") << whole.substr(0, 1100);
  Finished one = shell(command + "1");
  ASSERT_EQ(one.exit_code, 0) << one.output;
  EXPECT_EQ(last_line(one.output), data + "/fineweb");
  EXPECT_TRUE(read_file(data + "/fineweb/fineweb_train_000001.bin") == whole);
  EXPECT_EQ(Tokenizer::load(data + "/fineweb").vocab_size(), 657);
  expect_in("fetching 0 files", shell(command + "1").output);
  Finished two = shell(command + "2");
  EXPECT_EQ(two.exit_code, 1);
  expect_in("fineweb_train_000002.bin gave no shard; deleted, run again", two.output);
  const std::string second = data + "/fineweb/fineweb_train_000002.bin";
  EXPECT_FALSE(std::filesystem::exists(second) || std::filesystem::exists(second + ".part"));
  write_shard("web/fineweb_train_000002.bin", counting(300));
  std::ofstream(second + ".part") << std::string(2000, '<');  // a page with "please log in", once
  expect_in("gave no shard; deleted, run again", shell(command + "2").output);
  EXPECT_EQ(shell(command + "2").exit_code, 0);
  expect_in("cannot download file://" + folder + "/web/fineweb_train_000003.bin", shell(command + "3").output);
  for (const char* number : {"104", "0", "010"}) expect_in("of 1 to 103", shell(command + number).output);
}

TEST_F(Scripts, OpenwebtextsArchivesAreReadAsTheyAre) {
  if (shell("command -v tar && command -v xz").exit_code != 0) GTEST_SKIP() << "no tar or xz";
  std::string data = copy_scripts(folder);
  use_small_vocabulary(data);
  ASSERT_EQ(shell("cd " + folder +
                  " && mkdir web pages && for a in 00 01; do for x in 1 2; do rm -f pages/*; "
                  "for p in $(seq 100 199); do echo \"page $p of $x in $a\" >pages/$p.txt; done; "
                  "tar --sort=name -cJf urlsf_subset$a-${x}_data.xz -C pages .; done; "
                  "tar --sort=name -cf web/urlsf_subset$a.tar urlsf_subset$a-*; done")
                .exit_code,
            0);
  std::string command = "OPENWEBTEXT_URL=file://" + folder + "/web " + data + "/openwebtext.sh ";
  Finished done = shell(command + "2");
  ASSERT_EQ(done.exit_code, 0) << done.output;
  EXPECT_EQ(last_line(done.output), data + "/openwebtext-gpt2-2");
  expect_in("documents: 400,", done.output);
  EXPECT_EQ(TokenShards(data + "/openwebtext-gpt2-2/val_*.bin", 657).files.size(), 1u);
  EXPECT_TRUE(names_in(data + "/.download").empty());
  expect_in("of 1 to 21", shell(command + "010").output);
  Finished three = shell(command + "3");
  EXPECT_EQ(three.exit_code, 1);
  expect_in("cannot download file://" + folder + "/web/urlsf_subset02.tar", three.output);
  EXPECT_EQ(shell("TOKENIZER=bytes " + command + "1").exit_code, 0);
  EXPECT_EQ(names_in(data + "/.download/openwebtext"), std::set<std::string>{"urlsf_subset01.tar"});
  // Killed when all had come, but before it was read to its end.
  rename((data + "/.download/openwebtext/urlsf_subset01.tar").c_str(),
         (data + "/.download/openwebtext/urlsf_subset01.tar.part").c_str());
  EXPECT_EQ(shell("TOKENIZER=bytes " + command + "2").exit_code, 0);
  std::ofstream(folder + "/web/urlsf_subset02.tar") << "<html>please log in</html>";
  expect_in("urlsf_subset02.tar gave no tar archive; deleted, run again", shell(command + "3").output);
  // Cut between two files, where tar has no error.
  shell("cd " + folder + " && head -c $((512 + ($(stat -c %s urlsf_subset01-1_data.xz) + 511) / 512 * 512)) " +
        "web/urlsf_subset01.tar >web/urlsf_subset02.tar");
  ASSERT_EQ(shell("tar -tf " + folder + "/web/urlsf_subset02.tar").exit_code, 0);
  expect_in("urlsf_subset02.tar gave no tar archive; deleted, run again", shell(command + "3").output);
}
