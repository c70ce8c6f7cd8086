// How an attention kernel sees a layer's wiring: pointers to each K/V pair that its heads read, wherever it was projected.
#pragma once
#include <cstdint>         // int64_t
#include <vector>          // std::vector
#include "device_array.h"  // DeviceArray

// One k, v pair. Row (b, t) lies at `k + (b * T + t) * stride` and has head-size elements; v likewise, and the gradients with
// their own stride.
template <class T>
struct KVHead {
  T *k, *v;
  int64_t stride;
  T *dk, *dv;
  int64_t dstride;
  bool accumulate;  // dk and dv are += (somebody wrote there before); else =
  int first_query_head, num_query_heads;  // the heads that read the pair are readers[first_query_head, first_query_head + num_query_heads)
};

template <class T>
struct AttentionTable {
  std::vector<KVHead<T>> views;  // one a pair
  std::vector<int> readers;      // (h): the layer's heads, grouped by the pair they read
  std::vector<int> kv_of_head;      // (h): the pair that each head reads
  DeviceArray<KVHead<T>> device_kv_heads;  // the same three on the device
  DeviceArray<int> device_query_heads, device_kv_of_head;

  AttentionTable() = default;
  AttentionTable(std::vector<KVHead<T>> the_kv_heads, std::vector<int> the_query_heads)
      : views(std::move(the_kv_heads)), readers(std::move(the_query_heads)), kv_of_head(readers.size()) {
    for (size_t i = 0; i < views.size(); i++)
      for (int r = 0; r < views[i].num_query_heads; r++) kv_of_head[size_t(readers[size_t(views[i].first_query_head + r)])] = int(i);
    device_kv_heads = DeviceArray<KVHead<T>>(views);
    device_query_heads = DeviceArray<int>(readers);
    device_kv_of_head = DeviceArray<int>(kv_of_head);
  }
};

struct AttentionShape {
  int64_t B, T;         // sequences and positions
  int64_t NH, HS;       // heads and their size
  int64_t first_query;  // queries are the positions [first_query, T); the keys before them are already cached. B = 1 if > 0
};
