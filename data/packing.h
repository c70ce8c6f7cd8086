// Texts packed into rows of T tokens, so that few texts are cut: best-fit decreasing, as in Ding et al. 2024, "Fewer
// Truncations Improve Language Modeling", section 3. A text of more than T tokens is cut every T tokens, and what is
// left of it begins a row. All other rows begin where a text does. A row that is not full ends with padding.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>
#include "shards.h"

struct Piece {
  int64_t begin, length;  // in tokens
  bool begins_text, ends_text;
};
using Row = std::vector<Piece>;

// Packs the texts that begin at `begins` (ascending, the first at 0); the last ends at `end`. Rows are in the order of
// their first pieces in the input. In a row, the rest of a cut text comes first, then texts in the input's order.
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

struct PackingCounts {
  int64_t texts = 0, cut = 0;  // texts, and how many of them have more tokens than a row
  int64_t tokens = 0;          // of texts
  int64_t padding = 0;         // tokens after the texts of a row that is not full
};

struct PackerSettings {
  int64_t row_tokens, shard_tokens;    // of a row; of a shard at most, and one more than a row has at least
  uint16_t end_of_text;                // which stands
  bool is_before;                      //   before each text, or after it
  int64_t packed_at_a_time = 1 << 26;  // tokens to collect before their texts are packed into rows

  int64_t rows_in_shard() const { return (shard_tokens - 1) / row_tokens; }
};

// Writes the texts that it is given, in any portions, as rows of T tokens. Rows are padded with ends of text; only the
// first of them is scored, and only after a whole text. What a row begins with is not scored after another
// row, unless it is the end of a whole text before it. A shard ends with a token that is its last row's last target.
struct Packer {
  Packer(const PackerSettings& settings, ShardWriter& shard_writer, PackingCounts& packing_counts)
      : s(settings), shards(shard_writer), counts(packing_counts) {}

  void add(const std::vector<uint16_t>& more, const std::vector<uint8_t>& more_scored) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    scored.insert(scored.end(), more_scored.begin(), more_scored.end());
    if (int64_t(tokens.size()) >= s.packed_at_a_time) pack_texts(/*at_end=*/false);
  }
  void finish() {
    pack_texts(/*at_end=*/true);
    if (rows_in_shard_ > 0) end_shard();
    shards.finish();
  }

 private:
  const PackerSettings s;
  ShardWriter& shards;
  PackingCounts& counts;
  std::vector<uint16_t> tokens;  // that have not been packed
  std::vector<uint8_t> scored;
  int64_t rows_in_shard_ = 0;
  bool follows_text_ = false;  // whether the last row is full, and ends with the end of a text

  // Writes all texts but the last one, which may go on; at the end that one too.
  void pack_texts(bool at_end) {
    std::vector<int64_t> begins = {0};
    for (int64_t i = 0; i < int64_t(tokens.size()); i++) {
      const int64_t begin = s.is_before ? i : i + 1;
      if (tokens[i] == s.end_of_text && begin > 0 && begin < int64_t(tokens.size())) begins.push_back(begin);
    }
    int64_t end = int64_t(tokens.size());
    if (!at_end) end = begins.back(), begins.pop_back();
    if (end == 0) return;
    for (const Row& row : pack(begins, end, s.row_tokens)) write(row);
    counts.texts += int64_t(begins.size()), counts.tokens += end;
    tokens.erase(tokens.begin(), tokens.begin() + end);
    scored.erase(scored.begin(), scored.begin() + end);
  }

  void write(const Row& row) {
    std::vector<uint16_t> row_tokens;
    std::vector<uint8_t> row_scored;
    for (const Piece& piece : row) {
      row_tokens.insert(row_tokens.end(), &tokens[piece.begin], &tokens[piece.begin] + piece.length);
      row_scored.insert(row_scored.end(), &scored[piece.begin], &scored[piece.begin] + piece.length);
      counts.cut += piece.begins_text && !piece.ends_text;
    }
    row_scored[0] &= follows_text_ && row_tokens[0] == s.end_of_text;
    const size_t T = size_t(s.row_tokens), length = row_tokens.size();
    const bool is_whole = row.back().ends_text && row_tokens.back() != s.end_of_text;
    row_tokens.resize(T, s.end_of_text);
    row_scored.resize(T, 0);
    if (length < T) row_scored[length] = is_whole;
    follows_text_ = length == T && is_whole;
    counts.padding += int64_t(T - length);
    shards.add(row_tokens.data(), int64_t(T), row_scored.data());
    if (++rows_in_shard_ == s.rows_in_shard()) end_shard();
  }

  void end_shard() {
    const uint8_t is_scored = follows_text_;
    shards.add(&s.end_of_text, 1, &is_scored);
    rows_in_shard_ = 0;
  }
};
