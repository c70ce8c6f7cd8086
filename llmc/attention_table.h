// How an attention kernel sees a layer's wiring: pointers to each K/V pair that its heads read, wherever it was projected.
#pragma once
#include <cstdint> // int64_t
#include <vector>  // std::vector

// One k, v pair. Row (b, t) lies at `k + (b * T + t) * stride` and has head-size elements; v likewise, and the gradients with
// their own stride. Heads that read the pair are readers[first_reader, first_reader + num_readers) of the table.
template <class T>
struct KVView {
  T *k, *v;
  int64_t stride;
  T *dk, *dv;
  int64_t dstride;
  bool accumulate;  // dk and dv are += (somebody wrote there before); else =
  int first_reader, num_readers;
};

template <class T>
struct AttentionTable {
  std::vector<KVView<T>> views;  // one a pair
  std::vector<int> readers;      // (h): the layer's heads, grouped by the pair they read
};
