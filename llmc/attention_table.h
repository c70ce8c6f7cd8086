// How an attention kernel sees a layer's wiring: pointers to each K/V pair that its heads read, wherever it was projected.
#pragma once
#include <cstdint>         // int64_t
#include <vector>          // std::vector
#include "device_array.h"  // DeviceArray

// One k, v pair. Row (b, t) lies at `k + (b * T + t) * stride` and has head-size elements; v likewise, and the gradients with
// their own stride.
template <class T>
struct KVView {
  T *k, *v;
  int64_t stride;
  T *dk, *dv;
  int64_t dstride;
  bool accumulate;  // dk and dv are += (somebody wrote there before); else =
  int first_reader, num_readers;  // the heads that read the pair are readers[first_reader, first_reader + num_readers)
};

template <class T>
struct AttentionTable {
  std::vector<KVView<T>> views;  // one a pair
  std::vector<int> readers;      // (h): the layer's heads, grouped by the pair they read
  std::vector<int> view_of;      // (h): the pair that each head reads
  DeviceArray<KVView<T>> device_views;  // the same three on the device
  DeviceArray<int> device_readers, device_view_of;

  AttentionTable() = default;
  AttentionTable(std::vector<KVView<T>> the_views, std::vector<int> the_readers)
      : views(std::move(the_views)), readers(std::move(the_readers)), view_of(readers.size()) {
    for (size_t i = 0; i < views.size(); i++)
      for (int r = 0; r < views[i].num_readers; r++) view_of[size_t(readers[size_t(views[i].first_reader + r)])] = int(i);
    device_views = DeviceArray<KVView<T>>(views);
    device_readers = DeviceArray<int>(readers);
    device_view_of = DeviceArray<int>(view_of);
  }
};

struct AttentionShape {
  int64_t B, T;         // sequences and positions
  int64_t NH, HS;       // heads and their size
  int64_t first_query;  // queries are the positions [first_query, T); the keys before them are already cached. B = 1 if > 0
};
