// Token files, the loader's order, and the programs under data/ that make token files.
#include <gtest/gtest.h>
#include <signal.h>     // SIGKILL, SIGTERM
#include <sys/stat.h>   // mkdir, mkfifo, chmod
#include <sys/wait.h>   // WIFSIGNALED
#include <unistd.h>     // seteuid, usleep
#include <algorithm>    // std::count, std::remove, std::replace
#include <chrono>       // std::chrono::steady_clock
#include <filesystem>   // std::filesystem::remove_all, rename
#include <fstream>      // std::ifstream, std::ofstream
#include <functional>   // std::function
#include <random>       // std::mt19937
#include <set>          // std::set
#include <type_traits>  // std::is_copy_constructible_v
#include "child.h"      // run_and_signal
#include "files.h"      // FolderTest, read_file, names_in
#include "helpers.h"    // error_of
#include "llmc/text/dataloader.h"
#include "llmc/text/step_loader.h"
#include "llmc/text/tokenizer.h"

// ------------------------------------------------------------------------------------------------------------------
// Helpers: a temporary folder, files in it, programs, errors.

struct Data : FolderTest {
  Data() { CHECK(chmod(folder.c_str(), 0755) == 0); }  // some tests give up root's rights

  std::string write_headerless(const std::string& name, const std::vector<uint16_t>& tokens) const {
    return write(name, std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  }
  std::string write_shard(const std::string& name, const std::vector<uint16_t>& tokens, int magic = 20240520,
                          int version = 1, int extra_count = 0) const {
    int32_t header[256] = {magic, version, int32_t(tokens.size()) + extra_count};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    return write(name, bytes + std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  }
};
using TokenShardsOf = Data;
using Loader = Data;
using Shuffle = Data;
using Tokenize = Data;
using Scripts = Data;

// first, first + 1, ...
static std::vector<uint16_t> counting(int n, int first = 0) {
  std::vector<uint16_t> tokens(n);
  for (int i = 0; i < n; i++) tokens[i] = uint16_t(first + i);
  return tokens;
}

// `call` must throw a UserError that contains each of `parts`.
static void expect_error(const std::function<void()>& call, const std::vector<std::string>& parts) {
  const std::string message = error_of(call);
  EXPECT_NE(message, "") << "no error";
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

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

// The tokens of a loader's sequences: (count, T) inputs, then (count, T) targets.
static std::vector<int> sequences(const DataLoader& loader, int64_t first, int64_t count) {
  std::vector<int> both(size_t(2 * count * loader.T));
  loader.load_sequences(first, count, both.data(), both.data() + count * loader.T);
  return both;
}

// ------------------------------------------------------------------------------------------------------------------
// Opening token files.

TEST_F(TokenShardsOf, TheGoldenCasesOpen) {
  TokenShards shards("dev/test/golden/*/tokens.bin", 257);
  ASSERT_EQ(shards.files.size(), 17u);
  EXPECT_EQ(shards.files[0].path, "dev/test/golden/adjacent/tokens.bin");
  EXPECT_EQ(shards.files[0].num_tokens, 641);
  int64_t sum = 0;
  for (const TokenFile& file : shards.files) sum += file.num_tokens;
  EXPECT_EQ(shards.num_tokens, sum);
}

TEST_F(TokenShardsOf, AGlobOpensItsFilesSortedByName) {
  write_shard("train_001.bin", {4, 5, 6});
  write_shard("train_000.bin", {1, 2});
  write_shard("val_000.bin", {9});
  TokenShards shards(folder + "/train_*.bin", 10);
  ASSERT_EQ(shards.files.size(), 2u);
  EXPECT_EQ(shards.num_tokens, 5);
  EXPECT_EQ(shards.files[0].tokens[0], 1);
  EXPECT_EQ(shards.files[1].tokens[2], 6);
}

TEST_F(TokenShardsOf, AFileNamedLikeAGlobCanBeOpened) {
  write_shard("a.bin", {1});
  EXPECT_EQ(TokenShards(write_shard("[a].bin", {7}), 10).files[0].tokens[0], 7);
}

TEST_F(TokenShardsOf, AMissingFileIsRefused) {
  std::string path = folder + "/none.bin";
  expect_error([&] { TokenShards(path, 10); }, {path + ": no such file", "data/README.md"});
}

TEST_F(TokenShardsOf, AnEmptyGlobIsRefused) {
  expect_error([&] { TokenShards(folder + "/train_*.bin", 10); }, {folder + "/train_*.bin: no file matches"});
}

TEST_F(TokenShardsOf, AFolderIsRefused) {
  expect_error([&] { TokenShards(folder, 10); }, {folder + ": is a folder", "/train_*.bin"});
}

TEST_F(TokenShardsOf, ANamedPipeIsRefusedWithoutWaitingForItsWriter) {
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  expect_error([&] { TokenShards(folder + "/pipe", 10); }, {"/pipe: is not a regular file"});
}

TEST_F(TokenShardsOf, AnUnreadableFileIsRefused) {
  std::string path = write_shard("a.bin", {1, 2});
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  uid_t self = geteuid();
  if (self == 0) CHECK(seteuid(65534) == 0);  // root may read everything
  expect_error([&] { TokenShards(path, 10); }, {path + ": cannot open: Permission denied"});
  CHECK(seteuid(self) == 0);
}

TEST_F(TokenShardsOf, AnEmptyFileIsRefused) {
  expect_error([&] { TokenShards(write("a.bin", ""), 10); }, {"/a.bin: is empty"});
}

TEST_F(TokenShardsOf, AShardWithoutAPositiveNumberOfTokensIsRefused) {
  expect_error([&] { TokenShards(write_shard("a.bin", {}), 10); }, {"/a.bin", "says 0 tokens"});
  expect_error([&] { TokenShards(write_shard("a.bin", {1}, 20240520, 1, -9), 10); }, {"/a.bin", "says -8 tokens"});
}

TEST_F(TokenShardsOf, AShardShorterThanItsHeaderSaysIsRefused) {
  expect_error(
      [&] {
        TokenShards(write_shard("a.bin", {1, 2, 3}, 20240520, 1, 1), 10);
      },
      {"/a.bin: truncated", "says 4 tokens, which take 1032 bytes, but the file has 1030"});
  expect_error([&] { TokenShards(write_shard("a.bin", {1, 2, 3}, 20240520, 1, INT32_MAX - 3), 10); }, {"truncated"});
}

TEST_F(TokenShardsOf, AShardCutAnywhereInItsHeaderIsRefused) {
  std::string whole = read_file(write_shard("a.bin", counting(8)));
  for (size_t bytes : {4, 5, 8, 11, 12, 1000, 1023})
    expect_error([&] { TokenShards(write("a.bin", whole.substr(0, bytes)), 10); },
                 {"/a.bin: truncated: " + std::to_string(bytes) + " bytes, but a shard's header alone has 1024"});
}

TEST_F(TokenShardsOf, AShardLongerThanItsHeaderSaysIsRefused) {
  expect_error(
      [&] {
        TokenShards(write_shard("a.bin", {1, 2, 3}, 20240520, 1, -1), 10);
      },
      {"/a.bin: longer than its header says", "says 2 tokens"});
}

TEST_F(TokenShardsOf, AnotherVersionIsRefused) {
  expect_error([&] { TokenShards(write_shard("a.bin", {1}, 20240520, 2), 10); }, {"/a.bin", "version 2", "version 1"});
}

TEST_F(TokenShardsOf, OtherFilesOfLlmcAreRefusedByTheirMagic) {
  for (int magic : {20240801, 20240522, 20240326})
    expect_error(
        [&] {
          TokenShards(write_shard("a.bin", {1, 2}, magic), 65536);
        },
        {"/a.bin: bad magic " + std::to_string(magic), "begins with 20240520"});
}

TEST_F(TokenShardsOf, AHeaderlessFileOfOddSizeIsRefused) {
  expect_error([&] { TokenShards(write("a.bin", std::string("\1\0\2\0\3", 5)), 10); },
               {"/a.bin: odd size, 5 bytes", "bad magic"});
  expect_error([&] { TokenShards(write("a.bin", "x"), 10); }, {"odd size, 1 bytes"});
}

TEST_F(TokenShardsOf, TextInPlaceOfTokensIsRefused) {
  std::string text;
  while (text.size() < 1000) text += "It was the best of times,\n";
  expect_error([&] { TokenShards(write("a.txt", text), 50257); }, {"/a.txt: is text", "data/text.sh"});
}

TEST_F(TokenShardsOf, ATokenOutsideTheVocabularyIsFoundAnywhere) {
  const int n = 200001;  // four of the blocks that are checked at a time, the last not whole
  for (int position : {0, 65535, 65536, 131072, 200000}) {
    std::vector<uint16_t> tokens(n, 99);
    tokens[position] = 100;
    std::string path = write_shard("b.bin", tokens);
    write_shard("a.bin", {1, 2});
    std::string where = path + ": token 100 at position " + std::to_string(position);
    expect_error([&] { TokenShards(folder + "/?.bin", 100); }, {where + " is outside the vocabulary of 100"});
    EXPECT_EQ(TokenShards(path, 101).num_tokens, n);
  }
}

TEST_F(TokenShardsOf, TheLargestUint16IsInTheLargestVocabularyOnly) {
  std::string path = write_headerless("a.bin", {0, 65535});
  EXPECT_EQ(TokenShards(path, 65536).num_tokens, 2);
  EXPECT_EQ(TokenShards(path, 100000).num_tokens, 2);
  expect_error([&] { TokenShards(path, 65535); }, {"token 65535 at position 1"});
}

// ------------------------------------------------------------------------------------------------------------------
// The order of sequences.

TEST_F(Loader, RowsOfMicroBatchesAreConsecutiveSequences) {
  const int B = 3, T = 5, n = 61;  // 12 sequences: four micro-batches per epoch
  DataLoader loader(write_shard("a.bin", counting(n)), 100, T);
  ASSERT_EQ(loader.num_sequences, 12);
  std::vector<int> inputs(B * T), targets(B * T);
  for (int s = 0; s < 9; s++) {
    loader.load_batches(s * B, 1, inputs.data(), targets.data(), B);
    for (int b = 0; b < B; b++)
      for (int t = 0; t < T; t++) {
        int token = (s * B + b) % 12 * T + t;
        EXPECT_EQ(inputs[b * T + t], token);
        EXPECT_EQ(targets[b * T + t], token + 1);
      }
  }
}

TEST_F(Loader, RanksTogetherReadWhatOneProcessReads) {
  const int B = 3, T = 7, accumulation = 2, n = accumulation * B * T;
  const std::string path = write_shard("a.bin", counting(1000));
  for (bool shuffle : {false, true}) {
    const DataLoader loader(path, 1000, T, shuffle, 11);
    for (int ranks : {2, 5}) {
      for (int64_t step = 0; step < 20; step++) {  // beyond the first epoch
        const int64_t first = step * accumulation * ranks * B;
        for (int rank = 0; rank < ranks; rank++) {
          std::vector<int> inputs(n), targets(n);
          loader.load_batches(first, accumulation, inputs.data(), targets.data(), B, rank, ranks);
          for (int i = 0; i < accumulation; i++) {
            std::vector<int> batch(inputs.begin() + i * B * T, inputs.begin() + (i + 1) * B * T);
            batch.insert(batch.end(), targets.begin() + i * B * T, targets.begin() + (i + 1) * B * T);
            EXPECT_EQ(batch, sequences(loader, first + (i * ranks + rank) * B, B))
                << "step " << step << ", rank " << rank;
          }
        }
      }
    }
  }
}

TEST_F(Loader, NoSequenceCrossesAShardAndShortShardsAreSkipped) {
  const int T = 4;
  write_shard("0.bin", counting(9, 0));     // sequences at 0 and 4
  write_shard("1.bin", counting(4, 100));   // none: only three targets
  write_shard("2.bin", counting(12, 200));  // sequences at 200 and 204; the last three tokens have no fourth target
  write_shard("3.bin", counting(5, 300));   // one sequence, up to the last token
  DataLoader loader(folder + "/*.bin", 1000, T);
  ASSERT_EQ(loader.num_sequences, 5);
  std::vector<int> begins = {0, 4, 200, 204, 300, 0, 4};  // into the second epoch
  std::vector<int> both = sequences(loader, 0, 7);
  for (int w = 0; w < 7; w++)
    for (int t = 0; t < T; t++) {
      EXPECT_EQ(both[w * T + t], begins[w] + t);
      EXPECT_EQ(both[7 * T + w * T + t], begins[w] + t + 1);
    }
}

TEST_F(Loader, TheGoldenShardsFollowTheFormulaToo) {
  const int B = 2, T = 16;
  TokenFile file("dev/test/golden/baseline/tokens.bin");
  DataLoader loader("dev/test/golden/baseline/tokens.bin", 257, T);
  std::vector<int> inputs(B * T), targets(B * T);
  for (int s = 0; s < 20; s++) {
    loader.load_batches(s * B, 1, inputs.data(), targets.data(), B);
    for (int i = 0; i < B * T; i++) {
      EXPECT_EQ(inputs[i], file.tokens[s * B * T + i]);
      EXPECT_EQ(targets[i], file.tokens[s * B * T + i + 1]);
    }
  }
}

TEST_F(Loader, AHeaderlessFileGivesTheSameBatchesAsAShard) {
  std::string shard = write_shard("a.bin", counting(1000)), headerless = write_headerless("b.bin", counting(1000));
  for (bool shuffle : {false, true}) {
    DataLoader a(shard, 1000, 7, shuffle, 5), b(headerless, 1000, 7, shuffle, 5);
    EXPECT_EQ(a.num_sequences, b.num_sequences);
    EXPECT_EQ(sequences(a, 0, 300), sequences(b, 0, 300));
  }
}

// Two slots for a StepLoader.
struct Slots {
  std::vector<int> memory;
  size_t n;
  explicit Slots(int tokens) : memory(4 * size_t(tokens), -1), n(size_t(tokens)) {}
  std::array<StepTokens, 2> both() { return {{{&memory[0], &memory[n]}, {&memory[2 * n], &memory[3 * n]}}}; }
  std::vector<int> tokens(const StepTokens& slot) const {
    std::vector<int> all(slot.inputs, slot.inputs + n);
    all.insert(all.end(), slot.targets, slot.targets + n);
    return all;
  }
};

TEST_F(Loader, ASavedPositionResumesWithTheNextStep) {
  const int B = 3, T = 7;
  std::string path = write_shard("a.bin", counting(1000));
  for (bool shuffle : {false, true}) {
    DataLoader first(path, 1000, T, shuffle, 11);
    Slots slots(B * T), other_slots(B * T);
    StepLoader steps(first, 1, B, 0, 1, slots.both());
    for (int s = 0; s < 60; s++) {  // beyond the first epoch
      ASSERT_EQ(first.next_sequence, s * B);
      ASSERT_EQ(slots.tokens(steps.next()), sequences(first, s * B, B)) << "step " << s;
    }
    DataLoader second(path, 1000, T, shuffle, 11);
    second.next_sequence = first.next_sequence;
    StepLoader resumed(second, 1, B, 0, 1, other_slots.both());
    for (int s = 0; s < 60; s++)
      ASSERT_EQ(other_slots.tokens(resumed.next()), slots.tokens(steps.next())) << "step " << s;
  }
}

// BUG llmc/text/step_loader.h: `micro_batches_ * B_ * ranks_;` -> `micro_batches_ * B_;`
TEST_F(Loader, StepLoaderReadsWhatLoadBatchesReads) {
  const int B = 2, T = 5, accumulation = 3, ranks = 2;
  DataLoader data(write_shard("a.bin", counting(1000)), 1000, T);
  Slots slots(accumulation * B * T);
  StepLoader steps(data, accumulation, B, 1, ranks, slots.both());
  for (int s = 0; s < 3; s++) {
    std::vector<int> expected(2 * slots.n);
    data.load_batches(s * accumulation * ranks * B, accumulation, expected.data(), expected.data() + slots.n, B, 1,
                      ranks);
    ASSERT_EQ(slots.tokens(steps.next()), expected);
    ASSERT_EQ(data.next_sequence, (s + 1) * accumulation * ranks * B);
  }
}

// BUG llmc/text/step_loader.h: `std::launch::async` -> `std::launch::deferred`
TEST_F(Loader, TheNextStepIsLoadedWithoutOverwritingTheCurrentOne) {
  const int B = 3, T = 7;
  DataLoader data(write_shard("a.bin", counting(1000)), 1000, T);
  Slots slots(B * T);
  StepLoader steps(data, 1, B, 0, 1, slots.both());
  for (int s = 0; s < 10; s++) {
    const StepTokens now = steps.next(),
                     other = now.inputs == slots.both()[0].inputs ? slots.both()[1] : slots.both()[0];
    const std::vector<int> expected = sequences(data, (s + 1) * B, B);
    const auto begin = std::chrono::steady_clock::now();
    while (slots.tokens(other) != expected && std::chrono::steady_clock::now() - begin < std::chrono::seconds(10))
      usleep(100);
    EXPECT_EQ(slots.tokens(other), expected) << "the next step has not been requested";
    EXPECT_EQ(slots.tokens(now), sequences(data, s * B, B));
    EXPECT_EQ(data.next_sequence, (s + 1) * B) << "loading ahead does not count";
  }
}

TEST_F(Loader, LoadSequencesDoesNotChangeThePosition) {
  DataLoader loader(write_shard("a.bin", counting(500)), 500, 3, true, 2);
  std::vector<int> all = sequences(loader, 160, 8);
  for (int row = 0; row < 8; row++) {
    std::vector<int> one = sequences(loader, 160 + row, 1);
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + 3, all.begin() + row * 3));
    EXPECT_TRUE(std::equal(one.begin() + 3, one.end(), all.begin() + 24 + row * 3));
  }
  EXPECT_EQ(loader.next_sequence, 0);
}

TEST_F(Loader, AMovedLoaderStillWorks) {
  DataLoader first(write_shard("a.bin", counting(100)), 100, 3);
  std::vector<int> before = sequences(first, 0, 40);
  DataLoader second = std::move(first);
  EXPECT_EQ(sequences(second, 0, 40), before);
  static_assert(!std::is_copy_constructible_v<TokenFile>, "two owners of one mapping");
}

TEST_F(Loader, FilesWithoutASequenceAreRefused) {
  std::string path = write_shard("a.bin", counting(64));
  EXPECT_EQ(DataLoader(path, 100, 63).num_sequences, 1);
  expect_error([&] { DataLoader(path, 100, 64); }, {path + ": has 64 tokens, a sequence needs T + 1 = 65"});
  write_shard("b.bin", counting(70));
  expect_error([&] { DataLoader(folder + "/*.bin", 100, 70); }, {"has 70 tokens in its longest file", "T + 1 = 71"});
}

TEST_F(Shuffle, EveryEpochIsAPermutation) {
  for (int64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4097})
    for (int64_t epoch = 0; epoch < 4; epoch++) {
      std::vector<bool> seen(size_t(n), false);
      for (int64_t i = 0; i < n; i++) {
        int64_t p = permuted_index(42, epoch, i, n);
        ASSERT_TRUE(p >= 0 && p < n && !seen[p]) << "n " << n << " epoch " << epoch << " index " << i;
        seen[p] = true;
      }
    }
}

TEST_F(Shuffle, AnEpochReadsEverySequenceOfEveryShardOnce) {
  write_shard("0.bin", counting(101, 0));
  write_shard("1.bin", counting(57, 1000));
  DataLoader loader(folder + "/*.bin", 2000, 4, true, 9);
  ASSERT_EQ(loader.num_sequences, 25 + 14);
  for (int64_t epoch : {0, 1, 5}) {
    std::vector<int> both = sequences(loader, epoch * 39, 39);
    std::set<int> begins;
    for (int w = 0; w < 39; w++) begins.insert(both[w * 4]);
    EXPECT_EQ(begins.size(), 39u);
  }
}

// BUG llmc/text/dataloader.h: `RandomStream::shuffle, uint32_t(epoch),` -> `RandomStream::shuffle, 0,`
TEST_F(Shuffle, EpochsAndSeedsDifferAndTheSameOnesAgree) {
  const int64_t n = 1000;
  auto order = [&](uint64_t seed, int64_t epoch) {
    std::vector<int64_t> p;
    for (int64_t i = 0; i < n; i++) p.push_back(permuted_index(seed, epoch, i, n));
    return p;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  std::vector<std::vector<int64_t>> orders = {order(1, 0), order(1, 1), order(1, 2), order(2, 0), order(2, 1)};
  for (size_t a = 0; a < orders.size(); a++)
    for (size_t b = 0; b < a; b++) {
      int same = 0;  // two random orders agree in one place on average
      for (size_t i = 0; i < size_t(n); i++) same += orders[a][i] == orders[b][i];
      EXPECT_LT(same, 10) << a << " and " << b;
    }
}

TEST_F(Shuffle, NeighboursAreAsFarApartAsInARandomOrder) {
  const int64_t n = 10000;
  double distance = 0;  // two random numbers below n are n/3 apart on average
  for (int64_t i = 0; i + 1 < n; i++)
    distance += std::abs(double(permuted_index(3, 0, i, n) - permuted_index(3, 0, i + 1, n)));
  EXPECT_NEAR(distance / double(n - 1), double(n) / 3, double(n) / 3 * 0.03);
}

// ------------------------------------------------------------------------------------------------------------------
// data/tokenize, as a process.

// The tokens of a prefix's shards as text, with | for the end of text.
static std::string decoded(const std::string& folder, const std::string& prefix) {
  TokenShards shards(folder + "/" + prefix + "_*.bin", 257);
  std::string text;
  for (const TokenFile& file : shards.files)
    for (int64_t i = 0; i < file.num_tokens; i++) text += file.tokens[i] == 256 ? '|' : char(file.tokens[i]);
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
  ASSERT_EQ(shell("data/tokenize --out " + folder + "/none " + in).exit_code, 0);
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
  write("in", random_text(1000, 3));
  Finished again = shell("data/tokenize --out " + out + " " + in);
  EXPECT_EQ(again.exit_code, 0);
  expect_in("exists already", again.output);
  EXPECT_TRUE(read_file(out + "/train_000000.bin") == before);
  EXPECT_EQ(shell("data/tokenize --force --shard-tokens 100 --out " + out + " " + in).exit_code, 0);
  EXPECT_FALSE(read_file(out + "/train_000000.bin") == before);
  EXPECT_EQ(shell("data/tokenize --force --out " + out + " " + in).exit_code, 0);
  // No shard of the larger set.
  EXPECT_EQ(names_in(out),
            (std::set<std::string>{"MANIFEST.json", "tokenizer.json", "train_000000.bin", "val_000000.bin"}));
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"in", "out"}));
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
      {"--out /proc/none/out " + text, "error: /proc/none/out.tmp: cannot create the folder"},
      {"--out " + folder + "/text/out " + text, "Not a directory"},
      {"--out " + folder + "/no/such/out " + text, "cannot create the folder: No such file"},
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

TEST_F(Tokenize, AKilledRunLeavesNoPartialFolder) {
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
  int absent = 0, left_behind = 0;
  for (int i = 0; i < 30; i++) {
    int status = tokenize_and_signal(in, out, SIGKILL, int(random() % unsigned(longest + 1)));
    longest *= WIFSIGNALED(status) ? 1.2 : 0.7;  // about as many are killed as finish, however fast the disk is
    left_behind += std::filesystem::exists(out + ".tmp");
    if (std::filesystem::exists(out)) {
      ASSERT_TRUE(complete()) << "kill " << i;
    } else {
      absent++;
      ASSERT_EQ(shell("data/tokenize --out " + out + " " + in).exit_code, 0);
      ASSERT_TRUE(complete());
      EXPECT_FALSE(std::filesystem::exists(out + ".tmp"));
    }
    std::filesystem::remove_all(out);
  }
  EXPECT_GE(left_behind, 3);  // otherwise the times were not random enough
  EXPECT_GE(absent, 3);
}

TEST_F(Tokenize, KilledWhileReplacingLeavesOldNewOrNoFolder) {
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

TEST_F(Tokenize, AnInterruptedRunLeavesNoFiles) {
  const std::string in = write("in", random_text(30 * 1000 * 1000, 9));
  for (int moment : {20000, 40000, 60000}) {
    int status = tokenize_and_signal(in, folder + "/out", SIGTERM, moment);
    EXPECT_FALSE(std::filesystem::exists(folder + "/out.tmp"));
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

TEST_F(Scripts, TextIsTokenizedAgainOnlyWhenSomethingIsNewer) {
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
  expect_in("no such file or folder", shell(data + "/text.sh /none").output);
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
}

// A replacement for apt-get that makes the package: a licence, then entries, of which every tenth has a head of two
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
  expect_in("scripts/setup.sh", failed.output);
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

TEST_F(Scripts, TheKernelIsReadFromItsPackagesArchive) {
  if (shell("command -v dpkg-deb && command -v bzip2").exit_code != 0) GTEST_SKIP() << "no dpkg-deb or bzip2";
  std::string data = copy_scripts(folder);
  std::filesystem::create_directories(folder + "/bin");
  std::ofstream(folder + "/bin/apt-cache") << "#!/bin/sh\nprintf 'linux-source\\n  Depends: linux-source-9.9\\n'\n";
  std::ofstream(folder + "/bin/apt-get") << "#!/bin/bash\nset -e\nmkdir -p p/DEBIAN p/usr/src s/linux-source-9.9\n"
                                            "printf 'Package: linux-source-9.9\\nVersion: 1\\nArchitecture: "
                                            "all\\nMaintainer: x\\nDescription: x\\n' >p/DEBIAN/control\n"
                                            "for i in $(seq 300 599); do echo \"file $i\" >s/linux-source-9.9/$i.c; "
                                            "done\n"
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
  expect_in("cannot download file://" + folder + "/web/fineweb_train_000002.bin", two.output);
  EXPECT_FALSE(std::filesystem::exists(data + "/fineweb/fineweb_train_000002.bin"));
  expect_in("of 1 to 103", shell(command + "104").output);
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
  Finished three = shell(command + "3");
  EXPECT_EQ(three.exit_code, 1);
  expect_in("cannot download file://" + folder + "/web/urlsf_subset02.tar", three.output);
}
