// Token files as they are opened, and the order in which the loader reads them.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <type_traits>
#include "data_test.h"
#include "golden_case.h"
#include "helpers.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/step_loader.h"
#include "llmc/text/validation_batches.h"
#include "llmc/base/files.h"

using TokenShardsOf = Data;
using Masks = Data;
using Loader = Data;
using Shuffle = Data;

// `call` must throw a UserError that contains each of `parts`.
static void expect_error(const std::function<void()>& call, const std::vector<std::string>& parts) {
  const std::string message = error_of(call);
  EXPECT_NE(message, "") << "no error";
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
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
  ASSERT_EQ(shards.files.size(), golden_case_names().size());
  EXPECT_EQ(shards.files[0].path, "dev/test/golden/a_alibi/tokens.bin");
  EXPECT_EQ(shards.files[0].num_tokens, 801);
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
  EXPECT_EQ(shards.files[0].read(0, 1)[0], 1);
  EXPECT_EQ(shards.files[1].read(2, 1)[0], 6);
}

TEST_F(TokenShardsOf, AFileNamedLikeAGlobCanBeOpened) {
  write_shard("a.bin", {1});
  EXPECT_EQ(TokenShards(write_shard("[a].bin", {7}), 10).files[0].read(0, 1)[0], 7);
}

// Escaped, as scripts do, a folder's name is a pattern that matches it.
TEST_F(TokenShardsOf, AFolderNamedLikeAGlobIsThatFolder) {
  for (const char* name : {"a[1]", "a1", "b*"}) ASSERT_EQ(mkdir((folder + "/" + name).c_str(), 0700), 0);
  write_shard("a[1]/train_0.bin", {1});
  write_shard("a1/train_0.bin", {2});
  write_shard("b*/train_1.bin", {3});
  for (const auto& [pattern, token] : {std::pair("a[1]/train_*.bin", 1),
                                       {"a\\[1\\]/train_*.bin", 1},
                                       {"a[0-9]/train_*.bin", 2},
                                       {"b*/*_[1].bin", 3}}) {
    const TokenShards shards(folder + "/" + pattern, 10);
    ASSERT_EQ(shards.files.size(), 1u) << pattern;
    EXPECT_EQ(shards.files[0].read(0, 1)[0], token) << pattern;
  }
  expect_error([&] { TokenShards(folder + "/a[1]/val_*.bin", 10); }, {"/a[1]/val_*.bin: no file matches"});
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

TEST_F(TokenShardsOf, NumbersOf32BitsInPlaceOfTokensAreRefused) {
  std::vector<uint16_t> tokens = counting(64);
  for (size_t i = 1; i < tokens.size(); i += 2) tokens[i] = 0;
  expect_error([&] { TokenShards(write_headerless("a.bin", tokens), 1000); }, {"/a.bin: ", "numbers of 32 bits"});
  tokens.back() = 1;
  EXPECT_EQ(TokenShards(write_headerless("b.bin", tokens), 1000).num_tokens, 64);
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
// Masks beside token files.

TEST_F(Masks, TargetsThatAreNotScoredAreMinusOne) {
  const std::vector<uint16_t> tokens = counting(10, 20);
  write_mask("a.mask", tokens, "0010110011");
  DataLoader loader(write_shard("a.bin", tokens), 257, 4);
  EXPECT_EQ(sequences(loader, 0, 2), (std::vector<int>{20, 21, 22, 23, 24, 25, 26, 27,  //
                                                       -1, 22, -1, 24, 25, -1, -1, 28}));
  EXPECT_TRUE(loader.shards.files[0].mask.exists());
  EXPECT_EQ(loader.shards.num_scored, 5);
  int inputs, target;
  ASSERT_EQ(loader.rests().size(), 1u);
  EXPECT_EQ(loader.rests()[0].load(&inputs, &target), 1);
  EXPECT_EQ(inputs, 28);
  EXPECT_EQ(target, 29);
}

TEST_F(Masks, EachFileHasItsOwn) {
  const std::vector<uint16_t> tokens = counting(5);
  for (const char* name : {"a_0.bin", "a_1.bin", "a_2.bin"}) write_shard(name, tokens);
  write_mask("a_0.mask", tokens, "11111");
  write_mask("a_2.mask", tokens, "00000");  // a file without a scored token is right
  DataLoader loader(folder + "/a_?.bin", 10, 4);
  EXPECT_EQ(sequences(loader, 0, 3), (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3, 0,  1,  2,  3,  //
                                                       1, 2, 3, 4, 1, 2, 3, 4, -1, -1, -1, -1}));
  EXPECT_EQ(loader.shards.num_scored, 8);
  EXPECT_FALSE(TokenShards(folder + "/a_1.bin", 10).files[0].mask.exists());
}

TEST_F(Masks, AHeaderlessFileCanHaveOne) {
  write_mask("train.mask", {7, 8, 9}, "001");
  EXPECT_EQ(sequences(DataLoader(write_headerless("train.bin", {7, 8, 9}), 257, 2), 0, 1),
            (std::vector<int>{7, 8, -1, 9}));
}

TEST_F(Masks, DataWithoutAScoredTokenAreRefused) {
  write_shard("a.bin", {1, 2, 3});
  write_mask("a.mask", {1, 2, 3}, "100");  // the first token is no target
  expect_error([&] { TokenShards(folder + "/a.bin", 10); }, {folder + "/a.bin: ", "no token to score", "remove them"});
}

TEST_F(Masks, AMaskOfOtherTokensIsRefused) {
  write_shard("a.bin", {1, 2, 3});
  const std::string path = write_mask("a.mask", {1, 2, 4}, "111");
  for (int vocab_size : {10, 65536})
    expect_error([&] { TokenShards(folder + "/a.bin", vocab_size); }, {path + ": was made for other tokens"});
  write_mask("a.mask", {1, 2, 3, 4}, "1111");
  expect_error([&] { TokenShards(folder + "/a.bin", 10); }, {path + ": is a mask of 4 tokens, but its shard has 3"});
}

TEST_F(Masks, ADamagedMaskIsRefused) {
  write_shard("a.bin", {1, 2, 3});
  const std::string path = write_mask("a.mask", {1, 2, 3}, "111"), whole = read_whole_file(path);
  auto expect_refused = [&](const std::string& bytes, const std::string& why) {
    write("a.mask", bytes);
    expect_error([&] { TokenShards(folder + "/a.bin", 10); }, {path + ": " + why});
  };
  expect_refused("", "is empty");
  expect_refused(whole.substr(0, 1000), "truncated: 1000 bytes");
  expect_refused(whole.substr(0, 1024), "a mask of 3 tokens takes 1025 bytes, but the file has 1024");
  expect_refused(whole + "x", "a mask of 3 tokens takes 1025 bytes, but the file has 1026");
  expect_refused("x" + whole.substr(1), "bad magic");
  expect_refused(whole.substr(0, 4) + '\2' + whole.substr(5), "is a mask of version 2");
}

TEST_F(Masks, APatternThatMatchesMasksIsRefused) {
  for (int n : {1, 7, 8, 16}) {
    write_shard("train_0.bin", counting(n));
    const std::string path = write_mask("train_0.mask", counting(n), "1");
    expect_error([&] { TokenShards(folder + "/train_*", 257); }, {path + ": is a mask", "'train_*.bin'"});
  }
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

// Three rows over all ranks: stream r has the sequences 4 r to 4 r + 3 of 14, and the last two are in no stream.
TEST_F(Loader, StreamsAreContiguousAndEachRowReadsTheNextSegmentOfItsOwn) {
  const int T = 5, segments = 4;
  for (const auto& [ranks, B] : {std::pair(1, 3), std::pair(3, 1)}) {
    DataLoader loader(write_shard("a.bin", counting(14 * T + 1)), 100, T, /*shuffled=*/true, 11);
    loader.cut_into_streams(3);
    EXPECT_EQ(loader.num_sequences, 12);
    std::vector<int> inputs(size_t(2 * B * T)), targets(inputs.size());
    for (int step = 0; step < 5; step++)  // two segments each: the streams begin anew after the second step
      for (int rank = 0; rank < ranks; rank++) {
        loader.load_batches(step * 6, 2, inputs.data(), targets.data(), B, rank, ranks);
        for (int i = 0; i < 2; i++)
          for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
              const int token = ((rank * B + b) * segments + (2 * step + i) % segments) * T + t;
              ASSERT_EQ(inputs[(i * B + b) * T + t], token) << "step " << step << ", rank " << rank;
              ASSERT_EQ(targets[(i * B + b) * T + t], token + 1);
            }
      }
    for (int number = 0; number < 30; number++) EXPECT_EQ(loader.begins_stream(number), number % 12 < 3) << number;
    expect_error([&] { loader.cut_into_streams(13); }, {"has 12 sequences of T = 5", "each of the 13 rows"});
  }
}

// Validation reads all streams from their beginnings, and as many segments of each.
TEST_F(Loader, ValidatesOnTheFirstSegmentsOfStreams) {
  const int T = 5, B = 2;
  DataLoader loader(write_shard("a.bin", counting(17 * T + 1)), 100, T);
  loader.cut_into_streams(4);
  for (const auto& [wanted, segments] : {std::pair(0, 4), std::pair(1, 1), std::pair(3, 2), std::pair(100, 4)})
    for (int rank : {0, 1}) {
      const ValidationBatches batches(loader, B, wanted, rank, 2);
      ASSERT_EQ(batches.count(), segments) << wanted;
      std::vector<int> inputs(size_t(B * T)), targets(inputs.size());
      for (int i = 0; i < segments; i++) {
        const auto shape = batches.load(i, inputs.data(), targets.data());
        EXPECT_TRUE(shape.B == B && shape.T == T);
        for (int b = 0; b < B; b++) EXPECT_EQ(inputs[b * T], ((rank * B + b) * 4 + i) * T);
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
  const TokenFile file("dev/test/golden/baseline/tokens.bin", 257);
  const std::vector<uint16_t> tokens = file.read(0, file.num_tokens);
  DataLoader loader("dev/test/golden/baseline/tokens.bin", 257, T);
  std::vector<int> inputs(B * T), targets(B * T);
  for (int s = 0; s < 20; s++) {
    loader.load_batches(s * B, 1, inputs.data(), targets.data(), B);
    for (int i = 0; i < B * T; i++) {
      EXPECT_EQ(inputs[i], tokens[s * B * T + i]);
      EXPECT_EQ(targets[i], tokens[s * B * T + i + 1]);
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
