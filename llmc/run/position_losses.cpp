#include "position_losses.h"
#include <algorithm>
#include <sstream>
#include "llmc/utils/error.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"

bool PositionLosses::has_ponder() const {
  return std::any_of(ponder.begin(), ponder.end(), [](double sum) { return sum > 0; });
}

std::vector<PositionRange> ranges_of(const PositionLosses& positions) {
  std::vector<PositionRange> ranges;
  const int64_t context = int64_t(positions.counts.size()) - 1;
  for (int64_t first = 1; first <= context; first *= 2) {
    PositionRange range = {first, std::min(2 * first - 1, context), 0, 0};
    for (int64_t p = range.first; p <= range.last; p++)
      range.tokens += positions.counts[p], range.loss += positions.sums[p], range.ponder += positions.ponder[p];
    range.loss /= double(range.tokens), range.ponder /= double(range.tokens);
    if (range.tokens > 0) ranges.push_back(range);
  }
  return ranges;
}

static const std::string csv_head = "position,tokens,loss", csv_head_with_ponder = csv_head + ",ponder";

std::string positions_csv(const PositionLosses& positions) {
  const bool has_ponder = positions.has_ponder();
  std::string csv = (has_ponder ? csv_head_with_ponder : csv_head) + "\n";
  for (size_t p = 1; p < positions.counts.size(); p++) {
    const int64_t count = positions.counts[p];
    if (count == 0) continue;
    csv += format("%zu,%lld,%s", p, (long long)count, shortest(positions.sums[p] / double(count)).c_str());
    if (has_ponder) csv += "," + shortest(positions.ponder[p] / double(count));
    csv += "\n";
  }
  return csv;
}

namespace {

struct PositionRow {
  int64_t position, tokens;
  double loss, ponder;
};

// Throws UserError for a line that is not "POSITION,TOKENS,LOSS", or with `has_ponder` "POSITION,TOKENS,LOSS,PONDER".
PositionRow read_row(const std::string& line, bool has_ponder) {
  const std::vector<std::string> cells = split(line, ',');
  if (cells.size() != (has_ponder ? 4 : 3)) user_error("it has not %s numbers", has_ponder ? "four" : "three");
  return {parse_number<int64_t>(cells[0]), parse_number<int64_t>(cells[1]), parse_number<double>(cells[2]),
          has_ponder ? parse_number<double>(cells[3]) : 0};
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
  std::getline(lines, line);
  const bool has_ponder = line == csv_head_with_ponder;
  check(has_ponder || line == csv_head, "the first one is " + csv_head);
  for (number = 2; std::getline(lines, line); number++) {
    PositionRow row = {};
    try {
      row = read_row(line, has_ponder);
    } catch (const UserError& e) { check(false, e.what()); }
    const bool is_next = int64_t(positions.counts.size()) <= row.position && row.position <= most;
    check(is_next && row.tokens >= 1, "positions ascend, and each has tokens");
    positions.resize(size_t(row.position) + 1);
    positions.counts[size_t(row.position)] = row.tokens;
    positions.sums[size_t(row.position)] = row.loss * double(row.tokens);
    positions.ponder[size_t(row.position)] = row.ponder * double(row.tokens);
  }
  check(number > 2 && csv.back() == '\n', "the file is incomplete; measure them again");
  return positions;
}
