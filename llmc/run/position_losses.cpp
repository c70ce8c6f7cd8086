#include "position_losses.h"
#include <algorithm>            // std::min
#include <sstream>              // std::istringstream
#include <string_view>          // std::string_view
#include "llmc/utils/error.h"   // format, user_error
#include "llmc/utils/number.h"  // parse_number
#include "llmc/utils/text.h"    // shortest

std::vector<PositionRange> ranges_of(const PositionLosses& positions) {
  std::vector<PositionRange> ranges;
  const int64_t context = int64_t(positions.counts.size()) - 1;
  for (int64_t first = 1; first <= context; first *= 2) {
    PositionRange range = {first, std::min(2 * first - 1, context), 0, 0};
    for (int64_t p = range.first; p <= range.last; p++)
      range.tokens += positions.counts[p], range.loss += positions.sums[p];
    range.loss /= double(range.tokens);
    if (range.tokens > 0) ranges.push_back(range);
  }
  return ranges;
}

static const char* const csv_head = "position,tokens,loss";

std::string positions_csv(const PositionLosses& positions) {
  std::string csv = std::string(csv_head) + "\n";
  for (size_t p = 1; p < positions.counts.size(); p++)
    if (const int64_t count = positions.counts[p]; count > 0)
      csv += format("%zu,%lld,%s\n", p, (long long)count, shortest(positions.sums[p] / double(count)).c_str());
  return csv;
}

namespace {

struct PositionRow {
  int64_t position, tokens;
  double loss;
};

// Throws UserError for a line that is not "POSITION,TOKENS,LOSS".
PositionRow read_row(const std::string& line) {
  const size_t first = line.find(','), second = line.find(',', first + 1);
  if (first == std::string::npos || second == std::string::npos) user_error("it has not three numbers");
  const std::string_view text = line;
  return {parse_number<int64_t>(text.substr(0, first)),
          parse_number<int64_t>(text.substr(first + 1, second - first - 1)),
          parse_number<double>(text.substr(second + 1))};
}

}  // namespace

PositionLosses parse_positions(const std::string& path, const std::string& csv) {
  constexpr int64_t most = int64_t(1) << 24;  // positions: more than any context has
  PositionLosses positions(0);
  std::istringstream lines(csv);
  std::string line;
  int number = 1;
  auto check = [&](bool is_right, const std::string& what) {
    if (!is_right)
      user_error("%s:%d: is not a line of losses by position, as evaluate_gpt2_sla --positions writes them: %s",
                 path.c_str(), number, what.c_str());
  };
  check(std::getline(lines, line) && line == csv_head, std::string("the first one is ") + csv_head);
  for (number = 2; std::getline(lines, line); number++) {
    PositionRow row = {};
    try {
      row = read_row(line);
    } catch (const UserError& e) { check(false, e.what()); }
    check(row.position >= int64_t(positions.counts.size()) && row.position <= most && row.tokens >= 1, "positions "
                                                                                                       "ascend, and "
                                                                                                       "each has "
                                                                                                       "tokens");
    positions.counts.resize(size_t(row.position) + 1), positions.sums.resize(size_t(row.position) + 1);
    positions.counts[size_t(row.position)] = row.tokens;
    positions.sums[size_t(row.position)] = row.loss * double(row.tokens);
  }
  check(number > 2 && csv.back() == '\n', "the file is incomplete; measure them again");
  return positions;
}
