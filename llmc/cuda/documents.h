// Where documents begin and end: the operation of llmc/cpu/documents.h.
#pragma once
#include <cstdint>
#include "device.h"

constexpr int document_threads = 256;

// A block owns a sequence, a thread neighbouring tokens of it: it tells the others where its first and its last
// document begin, and takes the nearest ones before and after its own from theirs.
static __global__ void __launch_bounds__(document_threads)
    document_bounds_kernel(int* first_keys, int* last_queries, const int* tokens, int end_of_text, int T) {
  int* begins = reinterpret_cast<int*>(shared_memory);  // (threads, 2): the first and the last; T and 0 without one
  tokens += int64_t(blockIdx.x) * T, first_keys += int64_t(blockIdx.x) * T, last_queries += int64_t(blockIdx.x) * T;
  const int thread = int(threadIdx.x), count = (T + document_threads - 1) / document_threads,
            begin = min(T, thread * count), end = min(T, begin + count);
  int first = T, last = 0;
  for (int t = begin; t < end; t++)
    if (tokens[t] == end_of_text) first = min(first, t), last = t;
  begins[2 * thread] = first, begins[2 * thread + 1] = last;
  __syncthreads();
  int before = 0, after = T;
  for (int i = 0; i < thread; i++) before = max(before, begins[2 * i + 1]);
  for (int i = document_threads - 1; i > thread; i--) after = min(after, begins[2 * i]);
  for (int t = begin; t < end; t++) first_keys[t] = before = tokens[t] == end_of_text ? t : before;
  for (int t = end - 1; t >= begin; t--) {
    last_queries[t] = after - 1;
    if (tokens[t] == end_of_text) after = t;
  }
}

inline void document_bounds(int* first_keys, int* last_queries, const int* tokens, int end_of_text, int64_t B,
                            int64_t T) {
  launch(document_bounds_kernel, unsigned(B), document_threads, 2 * document_threads * sizeof(int), first_keys,
         last_queries, tokens, end_of_text, int(T));
}
