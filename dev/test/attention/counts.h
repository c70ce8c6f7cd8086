// What the kernels read and how, by the emulated GPU's counters; how they find the keys with the highest scores.
#pragma once
#ifdef SLA_EMU
#include <gtest/gtest.h>
#include <algorithm>
#include <climits>
#include <tuple>
#include "dev/test/attention/layer.h"
#include "dev/test/long.h"

// A copy of shared K/V would take more launches, or more reads. The kernels load each tile of queries once, with the k
// and v of the keys that it sees, and in the backward pass also each tile of keys with the q and dout of the queries
// that see it.
TEST(Attention, ReadsSharedKVInPlace) {
  const Case own = {2, 300, 64, {0, 1, 2, 3}, 4}, shared = {2, 300, 64, {0, 1, 2, 3}, 1};
  const bool stores_ds = attention_backward_scratch(own.B, own.T, own.HS, own.NH()) > 0;
  std::vector<emu::Counters> counts;
  for (const Case& c : {own, shared}) {
    Layer layer(c);
    layer.d_qkv.to_host();  // waits for everything queued so far
    const emu::Counters before = emu::counters();
    layer.forward();
    layer.backward();
    layer.d_out.to_host();
    emu::Counters after = emu::counters();
    EXPECT_EQ(after.kernels - before.kernels, stores_ds ? 4u : 3u) << "a forward, a dq, a dkdv and perhaps a delta "
                                                                      "kernel";
    EXPECT_EQ(after.bytes_on_device, before.bytes_on_device) << "no copy";
    EXPECT_EQ(after.memsets, before.memsets);
    after.bytes_read_async -= before.bytes_read_async;
    counts.push_back(after);
  }
  EXPECT_EQ(counts[0].bytes_read_async, counts[1].bytes_read_async);
#ifdef PRECISION_BF16
  uint64_t rows = 0, floats = 0;  // of one head in one sequence
  for (int64_t q0 = 0; q0 < own.T; q0 += ForwardTiles<64, false>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + ForwardTiles<64, false>::queries);
    rows += uint64_t(end - q0 + 2 * end);
  }
  static_assert(int(DqTiles<64, false>::queries) == int(DsDqTiles<64>::queries));
  for (int64_t q0 = 0; q0 < own.T; q0 += DqTiles<64, false>::queries) {
    const int64_t end = std::min<int64_t>(own.T, q0 + DqTiles<64, false>::queries);
    rows += uint64_t(stores_ds ? end + 2 * ceil_div(end, 64) * 64 : 2 * (end - q0) + 2 * end);  // dS: 128 queries
  }
  for (int64_t k0 = 0; k0 < own.T; k0 += DkdvTiles<64, false>::keys) {
    const int64_t end = std::min<int64_t>(own.T, k0 + DkdvTiles<64, false>::keys);
    rows += uint64_t(2 * (end - k0) + 2 * (own.T - k0));
    floats += uint64_t(2 * (own.T - k0));
  }
  EXPECT_EQ(counts[0].bytes_read_async,
            uint64_t(own.B * own.NH()) * (rows * 64 * sizeof(floatX) + floats * sizeof(float)));
#endif
}

#ifdef PRECISION_BF16
TEST(LONG_ON_EMU(Attention), HasNoBankConflicts) {
  const emu::Counters before = emu::counters();
  for (int64_t HS : {32, 64, 80, 96, 128}) {
    const Case plain = {1, 300, HS, {0, 1}, 1};
    Case relative = {1, 100, HS, {0, 1}, 1};
    relative.distances = relative.T;
    for (const Case& c : {plain, relative}) {
      Layer layer(c);
      layer.forward();
      layer.backward();
    }
  }
  DeviceArray<float>(std::vector<float>(1)).to_host();  // waits
  EXPECT_GT(emu::counters().matrices_loaded, before.matrices_loaded);
  EXPECT_EQ(emu::counters().bank_conflicts, before.bank_conflicts);
}
#endif

#ifdef PRECISION_BF16
// Bytes that attention with relative positions reads asynchronously. A tile of queries and keys has the rows of r for
// its distances; a tile of queries and distances, the rows of k and v for its keys.
static uint64_t bytes_of_relative_attention(const Case& c) {
  const int64_t T = c.T, HS = c.HS;
  using Forward = RelativeForwardTiles<64>;
  using Dq = RelativeDqTiles<64>;
  using Dkdv = RelativeDkdvTiles<64>;
  using Dr = DrTiles<64>;
  auto rows = [](int64_t first, int64_t count, int64_t end) {  // those that exist
    return std::max<int64_t>(0, std::min(end, first + count) - std::max<int64_t>(0, first));
  };
  auto distances = [&](int64_t q0, int64_t queries, int64_t k0, int64_t keys) {
    return rows(k0 - (q0 + queries - 1) + c.distances - 1, queries + keys, c.distances);
  };
  int64_t total = 0, floats = 0;  // rows and floats of one head in one sequence
  for (const auto& [queries, keys, operands] :
       {std::tuple<int64_t, int64_t, int64_t>{Forward::queries, Forward::keys, 2}, {Dq::queries, Dq::keys, 3}})
    for (int64_t q0 = 0; q0 < T; q0 += queries) {
      const int64_t end = std::min(T, q0 + queries);
      total += operands * (end - q0) + 2 * end;
      for (int64_t k0 = 0; k0 < end; k0 += keys) total += distances(q0, queries, k0, keys);
    }
  for (int64_t k0 = 0; k0 < T; k0 += Dkdv::keys) {
    total += 2 * rows(k0, Dkdv::keys, T) + 3 * (T - k0), floats += 2 * (T - k0);
    for (int64_t q0 = k0; q0 < T; q0 += Dkdv::queries) total += distances(q0, Dkdv::queries, k0, Dkdv::keys);
  }
  for (int64_t row = 0; row < c.distances; row += Dr::distances) {
    const int64_t end = std::min(c.distances, row + Dr::distances), first = c.distances - end;
    total += end - row + 3 * (T - first), floats += 2 * (T - first);
    for (int64_t q0 = first; q0 < T; q0 += Dr::queries) total += 2 * rows(q0 + row - c.distances + 1, Dr::keys, T);
  }
  return uint64_t(c.B * c.NH() * (total * HS * int64_t(sizeof(floatX)) + floats * int64_t(sizeof(float))));
}

// Nothing of size T * T, neither written nor read.
TEST(LONG_ON_EMU(AttentionRelative), ReadsTheRowsOfEachTilesDistances) {
  Case c = {2, 300, 64, {0, 1}, 2};
  c.distances = c.T;
  Layer layer(c);
  layer.d_qkv.to_host();  // waits
  const emu::Counters before = emu::counters();
  layer.forward();
  layer.backward();
  layer.d_out.to_host();
  const emu::Counters after = emu::counters();
  EXPECT_EQ(after.kernels - before.kernels, 5u) << "a forward, a dq, a dkdv and a dr kernel, and the sum of sequences";
  EXPECT_EQ(after.bytes_on_device, before.bytes_on_device);
  EXPECT_EQ(after.bytes_read_async - before.bytes_read_async, bytes_of_relative_attention(c));
}
#endif

// Decoding reads each key of a K/V head that one of its query heads sees exactly once.
TEST(AttentionDecode, ReadsWhatIsSeenOnce) {
  const int64_t T = 300, HS = 64, B = 2;
  Case c = {B, T, HS, {0, 0, 0, {0, 1}, 1, 2}, 1};
  for (bool has_masks : {false, true}) {
    if (has_masks) c.masks = {{5}, {70}, {0, MaskPattern::stride, 9}, {5}, {0, MaskPattern::column, 100, 3}, {2}};
    Layer layer(c);
    layer.d_qkv.to_host();  // waits
    const uint64_t before = emu::counters().bytes_read_async;
    const PartialForward part(layer, T - 1, T);
    int64_t rows = 0;
    for (int n = 0; n < c.num_kv_heads(); n++)
      for (int64_t j = 0; j < T; j++) {
        bool seen = false;
        for (int64_t head = 0; head < c.NH(); head++)
          for (int source : c.kv_of_head[head]) seen |= source == n && sees(c.mask(head), T - 1, j);
        rows += seen;
      }
    EXPECT_EQ(has_masks, rows < 3 * T);
    EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(B * rows * 2 * HS) * sizeof(floatX));
  }
}

#ifdef PRECISION_BF16
// With a window of w the kernels read, for each tile of queries, the keys from the tile that the first query's window
// begins in; and for each tile of keys, the queries up to the end of the tile that the last key's window ends in.
template <bool Large>
inline void expect_the_windows_tiles_alone() {
  using Forward = ForwardTiles<64, false>;
  using Dq = DqTiles<64, Large>;
  using Dkdv = DkdvTiles<64, Large>;
  const int64_t T = 600, HS = 64;
  for (int w : {1, 60, 64, 65, 200}) {
    Layer layer(with_mask({2, T, HS, {0, 0}, 1}, {w}));
    layer.d_qkv.to_host();  // waits
    std::vector<uint64_t> read = {emu::counters().bytes_read_async};
    for (bool forward : {true, false}) {
      if (forward) layer.forward();
      else layer.backward();
      layer.d_out.to_host();
      read.push_back(emu::counters().bytes_read_async);
    }
    // How many rows of k or v a head reads in a sequence, with tiles of `queries` queries and `keys` keys.
    auto key_rows = [&](int64_t queries, int64_t keys) {
      int64_t rows = 0;
      for (int64_t q0 = 0; q0 < T; q0 += queries)
        rows += std::min(T, q0 + queries) - std::max<int64_t>(0, q0 - w + 1) / keys * keys;
      return rows;
    };
    int64_t query_rows = 0;
    for (int64_t k0 = 0; k0 < T; k0 += Dkdv::keys) {
      const int64_t last_query = std::min<int64_t>(T, k0 + Dkdv::keys) - 1 + w - 1;
      query_rows += std::min<int64_t>(T, (last_query / Dkdv::queries + 1) * Dkdv::queries) - k0;
    }
    const int64_t heads = 2 * 2, kv_heads = 2, row = HS * int64_t(sizeof(floatX));
    const int64_t forward = heads * (T + 2 * key_rows(Forward::queries, Forward::keys)) * row;
    const int64_t dq = heads * (2 * T + 2 * key_rows(Dq::queries, Dq::keys)) * row;
    const int64_t dkdv = kv_heads * 2 * T * row + heads * 2 * query_rows * (row + int64_t(sizeof(float)));
    EXPECT_EQ(read[1] - read[0], uint64_t(forward)) << "window " << w << ", large tiles " << Large;
    EXPECT_EQ(read[2] - read[1], uint64_t(dq + dkdv)) << "window " << w << ", large tiles " << Large;
  }
}
TEST(LONG_ON_EMU(AttentionMasks), ReadTheWindowsTilesAlone) {
  ASSERT_TRUE(gpu().has_large_shared_memory);
  expect_the_windows_tiles_alone<true>();
  gpu().has_large_shared_memory = false;
  expect_the_windows_tiles_alone<false>();
  gpu().has_large_shared_memory = true;
}

TEST(AttentionMasks, ReadTheColumnsTilesAlone) {
  const int64_t T = 1024, HS = 64;
  Case c = with_mask({1, T, HS, {0}, 1}, {0, MaskPattern::column, 256, 32});  // keys 224 to 255, 480 to 511 and so on
  Layer layer(c);
  layer.d_qkv.to_host();
  const uint64_t before = emu::counters().bytes_read_async;
  layer.forward();
  layer.d_out.to_host();
  int64_t rows = T;
  using Tiles = ForwardTiles<64, false>;
  for (int64_t end = Tiles::queries; end <= T; end += Tiles::queries) rows += 2 * Tiles::keys * (end / 256);
  EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(rows * HS) * sizeof(floatX));
}

// All positions with one remainder fit into one tile: each row is read once.
TEST(AttentionMasks, WithStridesReadEachRowOnce) {
  const int64_t T = 512, HS = 64;
  Layer layer(with_mask({1, T, HS, {0}, 1}, {0, MaskPattern::stride, 16}));
  layer.d_qkv.to_host();
  uint64_t before = emu::counters().bytes_read_async;
  layer.forward();
  layer.d_out.to_host();
  EXPECT_EQ(emu::counters().bytes_read_async - before, uint64_t(3 * T * HS) * sizeof(floatX));  // q, k, v
  before = emu::counters().bytes_read_async;
  layer.backward();
  layer.d_out.to_host();
  EXPECT_EQ(emu::counters().bytes_read_async - before,
            uint64_t(T) * (8 * HS * sizeof(floatX) + 2 * sizeof(float)));  // q, k, v, dout by two kernels
}

TEST(LONG_ON_EMU(AttentionMasks), HaveNoBankConflicts) {
  const emu::Counters before = emu::counters();
  for (int64_t HS : {32, 64, 80, 96, 128})
    for (int topk : {0, 9}) {
      Case c = general_case(1, 200, HS);
      c.topk = topk;
      Layer layer(c);
      layer.forward();
      layer.backward();
      layer.d_out.to_host();
    }
  EXPECT_GT(emu::counters().matrices_loaded, before.matrices_loaded);
  EXPECT_EQ(emu::counters().bank_conflicts, before.bank_conflicts);
}
#endif

// The selection alone, from any scores and indices: the reference sorts.
TEST(AttentionTopK, FindsTheKeyOfEveryRank) {
  const std::vector<float> values = {0.0f,  -0.0f,  1.0f,     -1.0f,      1e-40f,      -1e-40f,
                                     3e38f, -3e38f, INFINITY, 1.0000001f, -1.0000001f, 5.5f};
  for (int indices : {100, 256, 257, 500, 65536, 130000, INT_MAX})
    for (int count : {1, 40, 100})
      for (int topk : {1, 2, 22, 39, 40, 41, 55, 100}) {  // 22 of 40 and 55 of 100: amid zeros of both signs
        std::vector<std::pair<float, int>> keys;          // minus the score, and the index, of keys in no order
        for (int i = 0; i < count; i++)
          keys.push_back({-values[size_t(i * 7 % 12)] * float(i % 3 == 0 ? 0.5 : 1),
                          int((int64_t(i) * 37 % count + 1) * indices / count - 1)});
        RadixSearch search = {0, topk};
        float score = NAN;
        int last = -7;
        bool unfinished = true;
        for (int pass = 0; unfinished; pass = next_pass(pass, indices)) {
          ASSERT_LT(pass, passes);
          std::vector<int> histogram(digits);
          for (const auto& [minus, index] : keys) count_key(histogram.data(), search, pass, -minus, index);
          unfinished = choose_digit(histogram.data(), search, pass, &score, &last);
        }
        std::sort(keys.begin(), keys.end());
        for (int i = 0; i < count; i++) {
          const float x = -keys[size_t(i)].first;
          EXPECT_EQ(x > score || (x == score && keys[size_t(i)].second <= last), i < topk)
              << "rank " << i << " of " << count << ", topk " << topk << ", " << indices << " indices";
        }
      }
}

#endif
