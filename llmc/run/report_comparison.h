// Runs side by side, as pages compare them (report.h).
#pragma once
#include <cmath>
#include <map>
#include <string>
#include <vector>
#include "report_parts.h"

namespace report {

// Runs that differ by their seed alone.
struct Kind {
  nlohmann::json key;  // the description without the seed
  std::string label;
  std::map<int64_t, double> losses;  // by seed: the final ones of runs that are finished
  std::vector<double> speeds;  // tokens/s of those runs, each its median step's: other programs' bursts do not count
  double kv_bytes = NAN;       // of a token
  std::map<int64_t, std::vector<PositionRange>> positions;  // by seed: of the runs where they have been measured
  std::map<int64_t, std::vector<ValPoint>> validations;     // by seed: of runs that are finished
  double flops_per_token = NAN;
};

// The kinds in the order of the runs, and of which kind each run is.
std::vector<Kind> kinds_of(const std::vector<RunHistory>& runs, std::vector<int>& kind_of_run);

// The last part of each path, or the paths where those are not different.
std::vector<std::string> names_of(const std::vector<RunHistory>& runs);

std::string final_losses(const std::vector<RunHistory>& runs, const std::vector<std::string>& names,
                         const std::vector<int>& kind_of_run);

// Means over seeds; nothing if no kind has two. `published`: of some kinds, by their number, the difference that a
// publication found.
std::string over_seeds(const std::vector<Kind>& kinds, const std::map<int, std::string>& published = {});

// runs_of_page: how many runs the page has curves of, that all together are below 2 MB.
json comparison_charts(const std::vector<RunHistory>& runs, const std::vector<std::string>& names,
                       const std::vector<Kind>& kinds, const std::vector<int>& kind_of_run, size_t runs_of_page);

}  // namespace report
