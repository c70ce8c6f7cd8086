// Fewer points of a curve, without losing what stands out.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

// The indexes, ascending, of the values to draw: of each of `pieces` pieces of equal length the lowest and the highest
// value, and one that is not finite, if there is one; the first and the last of all. All of them if they are at most
// twice as many as pieces.
inline std::vector<size_t> thin(const std::vector<double>& values, size_t pieces) {
  const size_t n = values.size();
  std::vector<size_t> kept;
  if (n <= 2 * pieces) {
    for (size_t i = 0; i < n; i++) kept.push_back(i);
    return kept;
  }
  kept = {0, n - 1};
  for (size_t piece = 0; piece < pieces; piece++) {
    const size_t begin = n * piece / pieces, end = n * (piece + 1) / pieces;
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
