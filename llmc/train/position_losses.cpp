#include "position_losses.h"
#include <algorithm>
#include <sstream>
#include "llmc/base/error.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"

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

PositionLosses parse_positions(const std::string& path, const std::string& csv) {
  constexpr int64_t most = int64_t(1) << 24;  // positions: more than any context has
  PositionLosses positions(0);
  std::istringstream lines(csv);
  std::string line;
  int number = 1;
  auto check = [&](bool is_right, const std::string& what) {
    if (!is_right)
      user_error("%s:%d: is not a line of losses by position, as evaluate_gpt2_sla --positions writes them: %s", path,
                 number, what);
  };
  std::getline(lines, line);
  const bool has_ponder = line == csv_head_with_ponder;
  check(has_ponder || line == csv_head, "the first one is " + csv_head);
  for (number = 2; std::getline(lines, line); number++) {
    const std::vector<std::string> cells = split(line, ',');
    check(cells.size() == (has_ponder ? 4 : 3), has_ponder ? "it has not four numbers" : "it has not three numbers");
    int64_t position = 0, tokens = 0;
    double loss = 0, ponder = 0;
    try {
      position = parse_number<int64_t>(cells[0]), tokens = parse_number<int64_t>(cells[1]);
      loss = parse_number<double>(cells[2]), ponder = has_ponder ? parse_number<double>(cells[3]) : 0;
    } catch (const UserError& e) { check(false, e.what()); }
    const bool is_next = int64_t(positions.counts.size()) <= position && position <= most;
    check(is_next && tokens >= 1, "positions ascend, and each has tokens");
    positions.resize(size_t(position) + 1);
    positions.counts[size_t(position)] = tokens;
    positions.sums[size_t(position)] = loss * double(tokens);
    positions.ponder[size_t(position)] = ponder * double(tokens);
  }
  check(number > 2 && csv.back() == '\n', "the file is incomplete; measure them again");
  return positions;
}
