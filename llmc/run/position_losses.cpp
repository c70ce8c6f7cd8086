#include "position_losses.h"
#include <algorithm>           // std::min
#include <cstdio>              // sscanf
#include <sstream>             // std::istringstream
#include "llmc/utils/error.h"  // format, user_error
#include "llmc/utils/text.h"   // shortest

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

PositionLosses parse_positions(const std::string& path, const std::string& csv) {
  constexpr long long most = int64_t(1) << 24;  // positions: more than any context has
  PositionLosses positions(0);
  std::istringstream lines(csv);
  std::string line;
  for (int number = 1; std::getline(lines, line); number++) {
    if (number == 1 && line == csv_head) continue;
    long long position, tokens;
    double loss;
    int length = 0;
    const bool is_read = sscanf(line.c_str(), "%lld,%lld,%lf%n", &position, &tokens, &loss, &length) == 3 &&
                         size_t(length) == line.size();
    if (number == 1 || !is_read || position < int64_t(positions.counts.size()) || position > most || tokens < 1)
      user_error("%s:%d: is not a line of losses by position, as evaluate_gpt2_sla --positions writes them",
                 path.c_str(), number);
    positions.counts.resize(size_t(position) + 1), positions.sums.resize(size_t(position) + 1);
    positions.counts[size_t(position)] = tokens, positions.sums[size_t(position)] = loss * double(tokens);
  }
  return positions;
}
