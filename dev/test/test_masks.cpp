// Which keys a query sees: each primitive of a mask, unions and conjunctions of them, key by key and query by query.
// What the wiring makes of them is compared with the reference, which shares no code with the masks.
//
// COVERS llmc/ops/attention_mask.h llmc/wiring/terms/
#include <gtest/gtest.h>
#include <algorithm>
#include <climits>
#include <map>
#include <string>
#include <vector>
#include "dev/test/mask_case.h"
#include "llmc/wiring/config.h"
#include "llmc/model/kv_cache.h"
#include "dev/test/reference/reference.h"
#include "llmc/base/error.h"

namespace {

// Each pattern with several periods, alone and with windows, and pairs of patterns.
std::vector<MaskCase> cases() {
  std::vector<MaskTerm> terms = {{MaskPattern::all}};
  for (int s : {1, 2, 5, 8, 33}) {
    for (MaskPattern pattern : {MaskPattern::stride, MaskPattern::local_or_stride, MaskPattern::block})
      terms.push_back({pattern, s});
    for (int c : {1, 4})
      for (MaskPattern pattern : {MaskPattern::column, MaskPattern::block_or_column})
        if (c <= s) terms.push_back({pattern, s, c});
    for (int before : {1, 7, 40}) terms.push_back({MaskPattern::block_and_before, s, before});
  }
  std::vector<MaskCase> cases;
  for (const MaskTerm& m : terms)
    for (int window : {0, 1, 5, 16}) cases.push_back({window, m.pattern, m.s, m.c});
  for (const MaskTerm& strided : {MaskTerm{MaskPattern::stride, 3}, MaskTerm{MaskPattern::local_or_stride, 6}})
    for (const MaskTerm& fixed : terms)
      for (int window : {0, 7}) {
        cases.push_back({window, strided.pattern, strided.s, strided.c, fixed});
        cases.push_back({window, fixed.pattern, fixed.s, fixed.c, strided});
      }
  return cases;
}

// Whether one condition alone decides what is seen: then what masks say of tiles is exact.
bool has_one_condition(const MaskCase& m) {
  return int(m.window > 0) + int(m.pattern != MaskPattern::all) + int(m.second.pattern != MaskPattern::all) <= 1;
}

constexpr int T = 44;  // positions

// sees(m, t, j) for all pairs of positions.
struct Seen {
  bool of[T][T] = {};
  explicit Seen(const MaskCase& m) {
    for (int t = 0; t < T; t++)
      for (int j = 0; j <= t; j++) of[t][j] = sees(m, t, j);
  }
  bool some(int q0, int q1, int k0, int k1) const {
    for (int t = q0; t < std::min(q1, T); t++)
      for (int j = k0; j < std::min(k1, T); j++)
        if (of[t][j]) return true;
    return false;
  }
  bool all(int q0, int q1, int k0, int k1) const {
    for (int t = q0; t < q1; t++)
      for (int j = k0; j < k1; j++)
        if (!of[t][j]) return false;
    return true;
  }
};

struct TestedMask {
  MaskCase terms;
  AttentionMask mask;
  Seen seen;
};

std::vector<TestedMask> masks() {
  std::vector<TestedMask> masks;
  for (const MaskCase& m : cases()) masks.push_back({m, attention_mask(m), Seen(m)});
  return masks;
}

const std::vector<int> sizes = {1, 2, 7, 16};  // of tiles, which begin anywhere

}  // namespace

TEST(Masks, ShowWhatTheirTermsSay) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    for (int t = 0; t < T; t++)
      for (int j = 0; j < T; j++) ASSERT_EQ(mask.sees(t, j), seen.of[t][j]) << t << " " << j;
  }
}

TEST(Masks, NameTheNextKeyThatCounts) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    for (int size : sizes)
      for (int q0 = 0; q0 + size <= T; q0++)
        for (int from = 0; from < T; from++) {
          const int q1 = q0 + size, key = mask.next_key(q0, q1, from);
          ASSERT_GE(key, from);
          ASSERT_FALSE(seen.some(q0, q1, from, key)) << "queries " << q0 << " to " << q1 << ", from " << from;
          if (has_one_condition(m)) {
            ASSERT_TRUE(key >= q1 || seen.some(q0, q1, key, key + 1))
                << "queries " << q0 << " to " << q1 << ", from " << from << ", key " << key;
          }
        }
  }
}

// The interval of a wiring's clause is never shorter than the distance of its recurring keys; here it is.
TEST(Masks, NameTheFirstKeyOfAShortInterval) {
  MaskClause clause;
  clause.s = 8, clause.last = 3, clause.residue = true;
  AttentionMask mask;
  mask.add(clause);
  std::vector<int> keys;
  for (int j = mask.next_key(20, 21, 0); j <= 20; j = mask.next_key(20, 21, j + 1)) keys.push_back(j);
  EXPECT_EQ(keys, (std::vector<int>{4, 12, 18, 19, 20}));
  EXPECT_EQ(mask.visible_keys(20), 5);
}

TEST(Masks, NameTheNextQueryThatCounts) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    for (int size : sizes)
      for (int k0 = 0; k0 + size <= T; k0++)
        for (int from = 0; from < T; from++) {
          const int k1 = k0 + size, query = mask.next_query(k0, k1, from, T);
          ASSERT_GE(query, from);
          ASSERT_FALSE(seen.some(from, query, k0, k1)) << "keys " << k0 << " to " << k1 << ", from " << from;
          if (has_one_condition(m)) {
            ASSERT_TRUE(query >= T || seen.some(query, query + 1, k0, k1))
                << "keys " << k0 << " to " << k1 << ", from " << from << ", query " << query;
          }
        }
  }
}

TEST(Masks, HideAndShowWholeTiles) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    for (int queries : sizes)
      for (int keys : sizes)
        for (int q0 = 0; q0 + queries <= T; q0++)
          for (int k0 = 0; k0 + keys <= T; k0++) {
            const int q1 = q0 + queries, k1 = k0 + keys;
            const bool some = seen.some(q0, q1, k0, k1), all = seen.all(q0, q1, k0, k1);
            ASSERT_TRUE(mask.sees_some(q0, q1, k0, k1) || !some) << q0 << " " << q1 << " " << k0 << " " << k1;
            ASSERT_TRUE(!mask.keeps_all(q0, q1, k0, k1) || all) << q0 << " " << q1 << " " << k0 << " " << k1;
            if (has_one_condition(m)) { ASSERT_EQ(mask.sees_some(q0, q1, k0, k1), some) << q0 << " " << k0; }
            if (mask.is_interval()) { ASSERT_EQ(mask.keeps_all(q0, q1, k0, k1), all) << q0 << " " << k0; }
          }
  }
}

// The comparisons that the CPU's loops make of remainders.
TEST(Masks, AreComparisonsOfPositionsAndRemainders) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    for (int size : sizes)
      for (int q0 = 0; q0 + size <= T; q0++)
        for (int j = mask.first_key(q0); j < q0 + size; j++) {
          bool included = true;
          for (int c = 0; c < mask.num_clauses; c++) {
            const SeenKeys keys = mask.clauses[c].seen_by(q0, q0 + size);
            included = included && keys.includes(j, j % keys.s);
          }
          ASSERT_TRUE(included || !seen.some(q0, q0 + size, j, j + 1)) << q0 << " " << size << " " << j;
          if (size == 1) { ASSERT_EQ(included, seen.of[q0][j]) << q0 << " " << j; }
        }
  }
}

TEST(Masks, CountTheKeysThatAreSeen) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    int64_t pairs = 0;
    for (int t = 0; t < T; t++) {
      const int64_t keys = std::count(seen.of[t], seen.of[t] + T, true);
      ASSERT_EQ(mask.visible_keys(t), keys) << t;
      ASSERT_EQ(mask.visible_pairs(t), pairs) << t;
      pairs += keys;
    }
  }
}

// A reach is the farthest that a query sees, where that is less than all; positions may be counted from any multiple of
// the period.
TEST(Masks, SeeAsFarAsTheyReachWithTheirPeriod) {
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    int farthest = 0;
    for (int t = 0; t < T; t++)
      for (int j = 0; j <= t; j++)
        if (seen.of[t][j]) farthest = std::max(farthest, t - j + 1);
    if (mask.reach() < INT_MAX) { ASSERT_GE(mask.reach(), farthest); }
    const int p = int(mask.period());
    if (mask.reach() < T - p && has_one_condition(m)) { ASSERT_EQ(mask.reach(), farthest); }
    for (int t = p; t < T; t++)
      for (int j = p; j <= t; j++) ASSERT_EQ(seen.of[t][j], seen.of[t - p][j - p]) << t << " " << j;
  }
}

TEST(Masks, OfAResidueAreSequencesOfTheirOwn) {
  int with_step = 0;
  for (const auto& [m, mask, seen] : masks()) {
    SCOPED_TRACE(testing::Message() << m);
    const AttentionMask of_numbers = mask_of_each_residue(mask);
    const int s = mask.stride();
    with_step += s > 1;
    for (int t = 0; t < T && s > 1; t++)
      for (int j = 0; j <= t; j++)
        ASSERT_EQ(seen.of[t][j], t % s == j % s && of_numbers.sees(t / s, j / s)) << t << " " << j;
  }
  EXPECT_GT(with_step, 16);
}

TEST(Masks, AreSeenThroughAViewAsTheyAre) {
  const AttentionMask mask = attention_mask({30, MaskPattern::local_or_stride, 4, 0, {MaskPattern::block, 9}});
  const MaskView view = view_of(mask);
  for (int t = 0; t < T; t++)
    for (int j = 0; j < T; j++) EXPECT_EQ(view.sees(t, j), mask.sees(t, j));
}

// Masks have the same text only if they show the same keys, and in whichever order that was said.
TEST(Masks, HaveTextsThatTellThemApart) {
  std::map<std::string, MaskCase> known;
  for (const MaskCase& m : cases()) {
    const auto [it, is_new] = known.try_emplace(attention_mask(m).text(), m);
    const Seen seen(m), other(it->second);
    EXPECT_TRUE(std::equal(&seen.of[0][0], &seen.of[0][0] + T * T, &other.of[0][0])) << m << ": " << it->first;
  }
  auto text = [](const MaskCase& m) { return attention_mask(m).text(); };
  EXPECT_EQ(text({}), "all");
  EXPECT_EQ(text({9}), "last 9");
  EXPECT_EQ(text({0, MaskPattern::stride, 8}), "every 8");
  EXPECT_EQ(text({0, MaskPattern::stride, 1}), "all");
  EXPECT_EQ(text({0, MaskPattern::local_or_stride, 8}), "last 9 or every 8");
  EXPECT_EQ(text({3, MaskPattern::block, 8}), "last 3, block of 8");
  EXPECT_EQ(text({0, MaskPattern::column, 8, 2}), "last 2 of each 8");
  EXPECT_EQ(text({0, MaskPattern::block_and_before, 8, 5}), "block of 8 and 5 before");
  EXPECT_EQ(text({0, MaskPattern::block_or_column, 8, 2}), "block of 8 or last 2 of each 8");
  const char* both = "every 5, last 2 of each 8";
  EXPECT_EQ(text({0, MaskPattern::column, 8, 2, {MaskPattern::stride, 5}}), both);
  EXPECT_EQ(text({0, MaskPattern::stride, 5, 0, {MaskPattern::column, 8, 2}}), both);
}

// ----------------------------------------------------------------------------
// Masks of wirings

namespace {
ModelConfig config_of(const std::string& wiring) {
  ModelConfig config;
  config.num_layers = 3, config.num_heads = 3, config.channels = 24, config.vocab_size = 9, config.max_seq_len = T;
  config.wiring = parse_wiring(wiring);
  validate(config);
  return config;
}

// Wirings with each way to say which heads or layers have which mask, one term and two.
std::vector<std::string> mask_wirings() {
  std::vector<std::string> wirings = {"plain", "window(7)", "window(7,SL)"};
  for (const char* how : {"", ",heads", ",layers", ",union"}) {
    wirings.push_back(format("strided(5%s)", how));
    wirings.push_back(format("fixed(6,2%s)", how));
    wirings.push_back(format("strided(5%s) window(9)", how));
    wirings.push_back(format("window(4) strided(5%s)", how));
    for (const char* other : {"", ",layers", ",union"})
      for (const char* window : {"", "window(13) ", "window(20,LS) "}) {
        wirings.push_back(format("%sstrided(5%s) fixed(6,2%s)", window, how, other));
        wirings.push_back(format("fixed(7,1%s) %sstrided(4%s)", how, window, other));
      }
  }
  return wirings;
}
}  // namespace

TEST(WiringMasks, AreThoseOfTheReference) {
  for (const std::string& wiring : mask_wirings()) {
    SCOPED_TRACE(wiring);
    const ModelConfig config = config_of(wiring);
    const WiringTable table = wiring_table(config.wiring, config.num_layers, config.num_heads);
    for (int l = 0; l < config.num_layers; l++)
      for (int i = 0; i < config.num_heads; i++)
        for (int t = 0; t < T; t++)
          for (int j = 0; j < T; j++)
            ASSERT_EQ(table.mask(l, i).sees(t, j), reference::is_visible(config, l, i, t, j))
                << "layer " << l << ", head " << i << ", query " << t << ", key " << j;
  }
}

// Numbered from the first position that the cache keeps, every key that a query sees is seen, and no other.
TEST(WiringMasks, MeanTheSameInTheKVCache) {
  int that_forget = 0;
  for (const std::string& wiring : mask_wirings()) {
    SCOPED_TRACE(wiring);
    const ModelConfig config = config_of(wiring);
    const AttentionPlan plan = make_attention_plan(config);
    constexpr int length = 200;
    KVCache cache(plan_kv_cache(plan, 1, length, 1));
    std::vector<KVCacheMove> moves;
    for (int t = 0; t < length; t++) {
      cache.append(0, 1, moves);
      for (int l = 0; l < config.num_layers; l++) {
        const int first = int(cache.first_position(0, l));
        that_forget += first > 0;
        for (int i = 0; i < config.num_heads; i++)
          for (int j = 0; j <= t; j++)
            ASSERT_EQ(reference::is_visible(config, l, i, t, j),
                      j >= first && plan.table.mask(l, i).sees(t - first, j - first))
                << "layer " << l << ", head " << i << ", query " << t << ", key " << j << ", first " << first;
      }
    }
  }
  EXPECT_GT(that_forget, 0);
}

// Layer 0 sees the last 10 keys of a block of 8, layer 1 the last 10 that are in certain columns.
TEST(WiringMasks, ReachAsFarAsTheNearestOfTheirConditions) {
  const ModelConfig config = config_of("window(10) fixed(8,2,layers)");
  const KVCachePlan cache = plan_kv_cache(make_attention_plan(config), 1, 200, 1);
  ASSERT_EQ(cache.groups.size(), 3u);
  EXPECT_EQ(cache.groups[0].reach, 8);
  EXPECT_EQ(cache.groups[1].reach, 10);
  EXPECT_EQ(cache.groups[0].capacity, 2 * (8 - 1 + 8) + 1);
  EXPECT_EQ(cache.groups[1].capacity, 2 * (10 - 1 + 8) + 1);
}
