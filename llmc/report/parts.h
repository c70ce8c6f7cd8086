// What pages of runs (report.h) are made of: texts, tables and charts, in HTML and JSON.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>
#include "llmc/wiring/wiring.h"
#include "llmc/train/run_history.h"

namespace report {

using json = nlohmann::ordered_json;

// ----------------------------------------------------------------------------
// Text in a page

// Any text, as the content of an element or of an attribute in double quotes.
std::string html(const std::string& text);

std::string loss_text(double loss);
std::string percent_text(double share);
std::string signed_text(double x);

// A value of a description, as text; "" where it has none.
std::string string_in(const json& object, const char* key);
std::string folder_name(const std::string& path);

// A row of a table; `tag` is that of its cells.
std::string row(const std::vector<std::string>& cells, const char* tag = "td");
// "" without content.
std::string section(const std::string& title, const std::string& content);
std::string page(const std::string& title, const std::string& body, const json& charts);

inline const char* const axes = "<p id=\"axes\" class=\"quiet\">Curves over </p>\n";
inline const char* const chart_places = "<div class=\"charts\" id=\"charts\"></div>\n";

// What a reader must know to read a run's curves right.
std::string notices(const RunHistory& run);

// The wiring of a description, with its numbers of layers and heads; none for one that does not fit these, as in a log
// from elsewhere, and for a model too large to be drawn.
struct DescribedWiring {
  Wiring wiring;
  int num_layers, num_heads;
};
std::optional<DescribedWiring> wiring_of(const RunHistory& run);

// "" without a wiring.
std::string picture_of(const RunHistory& run, const std::string& id);

std::string fact(const std::string& name, const std::string& value);  // "" without a value

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

// ----------------------------------------------------------------------------
// Charts, as the JSON that report.js draws: {"charts": [{"title", "y", "x"?, "place", "series": [{"name", "colour",
// "style", ...}]}]}. A chart is drawn in the element with the id `place`; one with the title of its x axis is of x and
// y, the others are curves over steps. A series has either x and y, or for each y its step s, seconds t and tokens k,
// and the FLOPs of a token, f; low and high are the ends of a band around y. Style: line, faint, points (a line with
// points) or dots. logX: the x axis is logarithmic at first; lastHalf: only the last half of the steps is drawn.

// Six digits: more than a screen shows.
json rounded(double x);

constexpr size_t buckets_of_a_run = 1000;  // a chart is about half as many pixels wide

// What of a run's points a series shows: a value for each.
template <class Point>
json series(const RunHistory& run, const std::vector<Point>& points, const std::vector<double>& values,
            size_t buckets = buckets_of_a_run) {
  json s = {{"f", run.number("flops_per_token", 0)}};
  for (const char* key : {"s", "t", "k", "y"}) s[key] = json::array();
  for (size_t i : thin(values, buckets)) {
    s["s"].push_back(points[i].step);
    s["t"].push_back(rounded(points[i].seconds));
    s["k"].push_back(rounded(points[i].tokens));
    s["y"].push_back(rounded(values[i]));
  }
  return s;
}
template <class Point>
json series(const RunHistory& run, const std::vector<Point>& points, double Point::*what,
            size_t buckets = buckets_of_a_run) {
  std::vector<double> values;
  for (const Point& point : points) values.push_back(point.*what);
  return series(run, points, values, buckets);
}

json styled(json s, const std::string& name, int colour, const char* style);

inline size_t smoothing_steps(const RunHistory& run) { return std::max<size_t>(1, run.steps.size() / 100); }

// Means of each step's value and those before it, a hundredth of the run; without what is not finite, and NaN where the
// step's own is not, unless it had no token to score.
std::vector<double> smoothed(const RunHistory& run, double TrainPoint::*what);

// Adds a chart of those series that have a value; none if no one has.
void add_chart(json& charts, const std::string& title, const std::string& y, std::vector<json> all,
               const std::string& x = "");

// Losses, or N + R, by position, a point for each range, at its (geometric) middle.
json by_position(const std::vector<PositionRange>& positions, double PositionRange::*what = &PositionRange::loss);
void add_position_chart(json& charts, const std::string& title, std::vector<json> all,
                        const char* y = "nats per token");

// ----------------------------------------------------------------------------
// Runs side by side

// Runs that differ by their seed alone.
struct Arm {
  nlohmann::json key;  // the description without the seed
  std::string label;
  // What validation read otherwise than for the first arm, so that losses cannot be compared; "" if nothing.
  std::string other_validation;
  std::map<int64_t, double> losses;  // by seed: the final ones of runs that are finished
  std::vector<double> speeds;  // tokens/s of those runs, each its median step's: other programs' bursts do not count
  double kv_bytes = NAN;       // of a token
  std::map<int64_t, std::vector<PositionRange>> positions;  // by seed: of the runs where they have been measured
  std::map<int64_t, std::vector<ValPoint>> validations;     // by seed: of runs that are finished
  double flops_per_token = NAN;
};

struct Comparison {
  const std::vector<RunHistory>& runs;
  std::vector<std::string> names;  // the last part of each path, or the paths where those are not different
  std::vector<Arm> arms;           // in the order of the runs
  std::vector<int> arm_of_run;     // of which arm each run is

  explicit Comparison(const std::vector<RunHistory>& the_runs);
};

// What keeps losses of runs from being compared, or makes their differences those of something else than the wiring: a
// sentence each.
std::vector<std::string> comparison_warnings(const Comparison& c);
// `lines` as a page shows what is to be noticed: the first 20 of them.
std::string warning_lines(const std::vector<std::string>& lines);

std::string final_losses(const Comparison& c);

// Means over seeds; nothing if no arm has two. `published`: of some arms, by their number, the difference that a
// publication found.
std::string over_seeds(const std::vector<Arm>& arms, const std::map<int, std::string>& published = {});

// runs_of_page: how many runs the page has curves of, that all together are below 2 MB.
json comparison_charts(const Comparison& c, size_t runs_of_page);

}  // namespace report
