// Losses by how many tokens the model read before the one that is predicted: what evaluate_gpt2_sla measures and
// reports show.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Sums of losses, in nats, at each position: 1 ... context tokens before. And of how many cycles the token before the
// predicted one ran, where the model has `act`; else these are 0.
struct PositionLosses {
  std::vector<int64_t> counts;
  std::vector<double> sums, ponder;

  explicit PositionLosses(int64_t context) { resize(size_t(context) + 1); }
  void resize(size_t positions) { counts.resize(positions), sums.resize(positions), ponder.resize(positions); }
  void add(int64_t position, double loss, double pondered = 0) {
    counts[position]++, sums[position] += loss, ponder[position] += pondered;
  }
  bool has_ponder() const;
};

// Positions first ... last, the mean loss there, and the mean of cycles, 0 without them.
struct PositionRange {
  int64_t first, last, tokens;
  double loss, ponder = 0;
};

// 1, 2 to 3, 4 to 7, ...; ranges without tokens are left out.
std::vector<PositionRange> ranges_of(const PositionLosses& positions);

// The losses as CSV: position, tokens, loss and, where there is one, the mean of cycles, ponder. Numbers have all their
// digits.
std::string positions_csv(const PositionLosses& positions);

// Reads what positions_csv wrote; `path` is for errors. Throws UserError, with the line, for anything else, and for a
// file that is empty or ends in the middle of a line.
PositionLosses parse_positions(const std::string& path, const std::string& csv);
