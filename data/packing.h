// Texts packed into rows of T tokens, so that few texts are cut: best-fit decreasing, as in Ding et al. 2024, "Fewer
// Truncations Improve Language Modeling", section 3. A text of more than T tokens is cut every T tokens, and what is
// left of it begins a row. All other rows begin where a text does. A row that is not full ends with padding.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

struct Piece {
  int64_t begin, length;  // in tokens
  bool begins_text, ends_text;
};
using Row = std::vector<Piece>;

// Packs the texts that begin at `begins` (ascending, the first at 0), the last of which ends at `end`. Rows are in the
// order of what they begin with, and the texts in a row in theirs.
inline std::vector<Row> pack(const std::vector<int64_t>& begins, int64_t end, int64_t T) {
  std::vector<Row> rows;
  std::multimap<int64_t, size_t> by_room;  // the tokens that are free in a row, and the row
  auto put = [&](const Piece& piece, size_t row, int64_t room) {
    rows[row].push_back(piece);
    if (room > piece.length) by_room.insert({room - piece.length, row});
  };
  auto put_into_new_row = [&](const Piece& piece) {
    rows.emplace_back();
    put(piece, rows.size() - 1, T);
  };
  std::vector<Piece> whole;
  for (size_t i = 0; i < begins.size(); i++) {
    const int64_t text_end = i + 1 < begins.size() ? begins[i + 1] : end;
    if (text_end - begins[i] <= T) whole.push_back({begins[i], text_end - begins[i], true, true});
    else
      for (int64_t at = begins[i]; at < text_end; at += T)
        put_into_new_row({at, std::min(T, text_end - at), at == begins[i], at + T >= text_end});
  }
  std::stable_sort(whole.begin(), whole.end(), [](const Piece& a, const Piece& b) { return a.length > b.length; });
  for (const Piece& piece : whole) {
    const auto fits = by_room.lower_bound(piece.length);
    if (fits == by_room.end()) {
      put_into_new_row(piece);
    } else {
      const auto [room, row] = *fits;
      by_room.erase(fits);
      put(piece, row, room);
    }
  }
  auto in_order = [](const Piece& a, const Piece& b) {
    return std::tie(a.begins_text, a.begin) < std::tie(b.begins_text, b.begin);
  };
  for (Row& row : rows) std::sort(row.begin(), row.end(), in_order);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a[0].begin < b[0].begin; });
  return rows;
}
