// Fewer points of a curve, without losing what stands out.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

// The indexes, ascending, of the values to draw: of each of `buckets` pieces of equal length the lowest and the highest
// value, and one that is not finite, if there is one; the first and the last of all. All of them if they are at most
// twice as many as buckets.
inline std::vector<size_t> thin(const std::vector<double>& values, size_t buckets) {
  const size_t n = values.size();
  std::vector<size_t> kept;
  if (n <= 2 * buckets) {
    for (size_t i = 0; i < n; i++) kept.push_back(i);
    return kept;
  }
  kept = {0, n - 1};
  for (size_t bucket = 0; bucket < buckets; bucket++) {
    const size_t begin = n * bucket / buckets, end = n * (bucket + 1) / buckets;
    size_t low = n, high = n, gap = n;
    for (size_t i = begin; i < end; i++) {
      if (!std::isfinite(values[i])) gap = i;
      else if (low == n) low = high = i;
      else if (values[i] < values[low]) low = i;
      else if (values[i] > values[high]) high = i;
    }
    for (size_t i : {low, high, gap})
      if (i < n) kept.push_back(i);
  }
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  return kept;
}
