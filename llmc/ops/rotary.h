// Rotary positions (RoFormer, Su et al. 2021): q and k of each head are rotated by angles that grow with the position,
// so that a score depends on the distance of query and key.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>
#include "precision.h"

// Heads that lie beside each other in rows of a matrix, and the angles to rotate them by.
struct RotaryHeads {
  floatX* x = nullptr;  // (rows, heads, HS), rows `stride` apart
  int64_t stride = 0;
  int heads = 0, HS = 0;         // HS is even
  const float* table = nullptr;  // rotary_table, on the device
};

// (positions, HS/2, 2): cosine and sine of position * base^(-2i/HS), for each of the positions.
inline std::vector<float> rotary_table(const std::vector<int>& positions, int HS, double base) {
  std::vector<float> table;
  table.reserve(positions.size() * size_t(HS));
  for (int position : positions)
    for (int i = 0; i < HS / 2; i++) {
      const double angle = double(position) * std::pow(base, -2.0 * i / HS);
      table.push_back(float(std::cos(angle)));
      table.push_back(float(std::sin(angle)));
    }
  return table;
}
