// topk: of the keys that a query sees, attention uses those with the highest scores. Shared by the kernels that find
// them and those that use them.
//
// A query's keys are ranked by 64 bits: the score, higher ones first, and the key's index, T * (which K/V head of the
// query head) + position. A radix selection finds the one of rank topk without storing scores: each pass computes all
// scores, counts in a histogram a digit of 8 bits, of the keys that have all digits so far in common with the one that
// is sought, and so learns the next digit. After four passes the score is known, and only where it is the score of more
// keys than are to be taken does the index need passes, too.
#pragma once
#include <climits>
#include <cstdint>
#include "llmc/ops/attention_args.h"
#include "vec.h"

// The chosen keys of neighbouring queries, with one element of each array for a query: those whose score is higher than
// `score`, or equal to it with an index of at most `last`.
struct TopK {
  float* score;
  int* last;
};

// The chosen keys of the queries from the position `query` on, of one head in sequence b.
__device__ inline TopK chosen_from(const AttentionArgs& a, int64_t b, int head, int query) {
  const int64_t at = (b * a.NH + head) * (a.T - a.first_query) + query - a.first_query;
  return {a.topk_score + at, a.topk_last + at};
}

// The index of position 0 of a K/V head among the keys of a query head.
__device__ inline int first_index(const AttentionArgs& a, int head, int kv_head) {
  return source_of(a, head, kv_head) * int(a.T);
}

// ----------------------------------------------------------------------------
// Selection

constexpr int digits = 256;                   // values of a digit
constexpr int histogram_stride = digits + 1;  // the same digit of neighbouring queries is in different banks
constexpr int score_passes = 4, passes = 8;

// How far the search for a query's last chosen key has come.
struct RadixSearch {
  uint64_t prefix;  // its digits so far, then zeros
  int rank;         // its rank among the keys with these digits, from 1 on; 0: it has been found
};

// A high score has a low rank. -0 is 0.
__device__ inline unsigned rank_of_score(float score) {
  const unsigned bits = __float_as_uint(score == 0 ? 0.0f : score);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}
__device__ inline float score_of_rank(unsigned rank) {
  return __uint_as_float(rank >> 31 ? rank : ~rank & 0x7fffffffu);
}

__device__ inline int digit_of(uint64_t key, int pass) { return int(key >> (56 - 8 * pass)) & (digits - 1); }

// Counts a key that its query sees, by one of any number of threads.
__device__ inline void count_key(int* histogram, const RadixSearch& search, int pass, float score, int index) {
  const uint64_t key = uint64_t(rank_of_score(score)) << 32 | unsigned(index);
  const bool same_digits = pass == 0 || (key ^ search.prefix) >> (64 - 8 * pass) == 0;
  if (search.rank > 0 && same_digits) atomicAdd(&histogram[digit_of(key, pass)], 1);
}

// After a pass: the digit, by one thread, which writes *score and *last as soon as they are known. Returns whether the
// query needs the next pass.
__device__ inline bool choose_digit(const int* histogram, RadixSearch& search, int pass, float* score, int* last) {
  if (search.rank == 0) return false;
  int digit = 0, before = 0;  // how many keys have a lower digit
  while (digit < digits && before + histogram[digit] < search.rank) before += histogram[digit++];
  if (digit == digits) {  // the query sees fewer keys
    search.rank = 0, *score = -INFINITY, *last = INT_MAX;
    return false;
  }
  search.prefix |= uint64_t(digit) << (56 - 8 * pass);
  search.rank -= before;
  if (pass == score_passes - 1) {
    *score = score_of_rank(unsigned(search.prefix >> 32)), *last = INT_MAX;
    if (search.rank == histogram[digit]) search.rank = 0;  // all keys with this score
  }
  if (pass == passes - 1) search.rank = 0, *last = int(unsigned(search.prefix));
  return search.rank > 0;
}

// The pass after this one, where indices are below `indices`: not those whose digit is 0 in every index.
__device__ inline int next_pass(int pass, int indices) {
  pass++;
  while (score_passes <= pass && pass < passes - 1 && (indices - 1) >> (56 - 8 * pass) == 0) pass++;
  return pass;
}
