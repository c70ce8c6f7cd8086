// Where the documents of B sequences of T tokens begin and end: each begins at a token `end_of_text`, and the first one
// of a sequence with it.
//
//   document_bounds:  first_keys =, last_queries = (B, T): the first and the last position of each token's document
#pragma once
#include <cstdint>
#include "threads.h"

inline void document_bounds(int* first_keys, int* last_queries, const int* tokens, int end_of_text, int64_t B,
                            int64_t T) {
#pragma omp parallel for schedule(static) if (is_worth_threads(5 * int64_t(sizeof(int)) * B * T))
  for (int64_t b = 0; b < B; b++) {
    const int* of_sequence = tokens + b * T;
    int first = 0, last = int(T) - 1;
    for (int t = 0; t < T; t++) first_keys[b * T + t] = first = of_sequence[t] == end_of_text ? t : first;
    for (int t = int(T) - 1; t >= 0; t--) {
      last_queries[b * T + t] = last;
      if (of_sequence[t] == end_of_text) last = t - 1;
    }
  }
}
