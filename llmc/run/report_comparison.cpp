#include <algorithm>
#include <set>
#include "llmc/utils/error.h"
#include "print.h"
#include "report.h"
#include "report_parts.h"
#include "statistics.h"

namespace report {

// Of what all of the runs say: an older version of this program wrote less down.
static nlohmann::json key_of(const RunHistory& run, const std::vector<RunHistory>& runs) {
  nlohmann::json key;
  for (const auto& [name, value] : run.description.items()) {
    const auto says_it = [&, n = name](const RunHistory& other) { return other.description.contains(n); };
    if (name != "seed" && derived_fields.count(name) == 0 && std::all_of(runs.begin(), runs.end(), says_it))
      key[name] = value;
  }
  return key;
}

// The wiring, and what else is not the same for all kinds.
static std::string label_of(const Kind& kind, const std::vector<Kind>& kinds) {
  std::string label = string_in(kind.key, "wiring");
  for (const auto& [name, value] : kind.key.items()) {
    const auto has_it = [&, n = name, v = value](const Kind& other) {
      return other.key.contains(n) && other.key[n] == v;
    };
    if (name != "wiring" && !std::all_of(kinds.begin(), kinds.end(), has_it))
      label += (label.empty() ? "" : ", ") + name + " " + (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return label;
}

static std::vector<std::string> names_of(const std::vector<RunHistory>& runs) {
  std::vector<std::string> names;
  for (const RunHistory& run : runs) names.push_back(folder_name(run.name));
  if (std::set<std::string>(names.begin(), names.end()).size() == names.size()) return names;
  for (size_t i = 0; i < runs.size(); i++) names[i] = runs[i].name;
  return names;
}

Comparison::Comparison(const std::vector<RunHistory>& the_runs) : runs(the_runs), names(names_of(the_runs)) {
  for (const RunHistory& run : runs) {
    const nlohmann::json key = key_of(run, runs);
    auto it = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) { return kind.key == key; });
    if (it == kinds.end()) {
      it = kinds.insert(kinds.end(), Kind());
      it->key = key, it->kv_bytes = run.number("kv_bytes_per_token", NAN);
      it->flops_per_token = run.number("flops_per_token", NAN);
    }
    kind_of_run.push_back(int(it - kinds.begin()));
    if (!run.is_finished() || !std::isfinite(run.final_loss())) continue;
    it->losses.emplace(int64_t(run.number("seed", 0)), run.final_loss());
    it->validations.emplace(int64_t(run.number("seed", 0)), run.validations);
    std::vector<double> speeds;
    for (const TrainPoint& p : run.steps) speeds.push_back(p.tokens_per_second);
    it->speeds.push_back(median(speeds));
    if (!run.positions.empty()) it->positions.emplace(int64_t(run.number("seed", 0)), run.positions);
  }
  for (Kind& kind : kinds) kind.label = label_of(kind, kinds);
}

// What is a column of the table only where a run has it.
struct OptionalColumn {
  const char* head;
  double ValPoint::*value;  // of the last validation; NaN if the run has none
  std::string (*text)(double);
};

static std::vector<OptionalColumn> known_columns(const std::vector<RunHistory>& runs) {
  std::vector<OptionalColumn> known;
  for (const OptionalColumn& column : {OptionalColumn{"bits a byte", &ValPoint::bits_per_byte, loss_text},
                                       {"cycles of a token, N + R", &ValPoint::ponder, loss_text},
                                       {"accuracy", &ValPoint::accuracy, percent_text}})
    if (std::any_of(runs.begin(), runs.end(),
                    [&](const RunHistory& run) { return std::isfinite(run.final(column.value)); }))
      known.push_back(column);
  return known;
}

std::string final_losses(const Comparison& c) {
  const auto& [runs, names, kinds, kind_of_run] = c;
  std::vector<std::string> head = {"run",           "wiring",          "seed",
                                   "steps",         "tokens",          "training",
                                   "tokens/s",      "parameters",      "K/V a token",
                                   "FLOPs a token", "validation loss", "difference to the first"};
  const std::vector<OptionalColumn> optional_columns = known_columns(runs);
  for (const OptionalColumn& column : optional_columns) head.push_back(column.head);
  std::string rows = row(head, "th");
  const double first = runs[0].final_loss();
  for (size_t i = 0; i < runs.size(); i++) {
    const RunHistory& run = runs[i];
    auto count = [&](const char* key) {
      return std::isfinite(run.number(key, NAN)) ? count_text(run.number(key, NAN)) : std::string("-");
    };
    const bool timed = std::isfinite(run.seconds()) && run.seconds() > 0;
    std::vector<std::string> cells = {format("<span class=\"key\" style=\"background:var(--series-%d)\"></span>",
                                             kind_of_run[i] % 8) +
                                          html(names[i]),
                                      html(string_in(run.description, "wiring")),
                                      html(string_in(run.description, "seed")),
                                      format("%lld", (long long)run.last_step()) +
                                          (run.is_finished() ? "" : format(" of %lld", (long long)run.planned_steps())),
                                      count_text(run.tokens()),
                                      timed ? time_text(run.seconds()) : "-",
                                      timed ? count_text(run.tokens() / run.seconds()) : "-",
                                      count("num_parameters"),
                                      count("kv_bytes_per_token"),
                                      count("flops_per_token"),
                                      loss_text(run.final_loss()),
                                      i == 0 ? "" : signed_text(run.final_loss() - first)};
    for (const OptionalColumn& column : optional_columns) cells.push_back(column.text(run.final(column.value)));
    rows += row(cells);
  }
  return "<div class=\"wide\"><table class=\"runs\">\n" + rows + "</table></div>\n";
}

// In words, what a difference to the first kind shows.
static std::string verdict(const Estimate& difference, size_t pairs) {
  if (!std::isfinite(difference.interval)) return "one pair shows nothing about other seeds";
  if (std::fabs(difference.mean) > difference.interval) return difference.mean < 0 ? "lower" : "higher";
  const int needed = pairs_needed(difference.mean, difference.deviation);
  return "no difference is shown: 0 lies in the interval" +
         (needed > int(pairs) ? format("; if it is as large as it looks, it takes %d seeds", needed) : std::string());
}

// What it would take to see differences of some sizes, up to the largest that the paper found, if all vary from seed to
// seed as these do.
static std::string seeds_for(double squares, int freedom) {
  if (freedom < 1 || squares <= 0) return "";
  const double deviation = std::sqrt(squares / freedom);
  std::string text = format("<p>From seed to seed, differences vary with a standard deviation of %.4f nats (of all "
                            "rows together). ",
                            deviation);
  const char* before = "To find a true difference with p &lt; 0.05 in four of five experiments takes";
  for (const auto& [nats, name] : {std::pair(0.01, "0.01 nats"),
                                   {0.05, "0.05"},
                                   {0.133, "0.133, the largest in the paper on skip-layer attention"}}) {
    const int pairs = pairs_needed(nats, deviation);
    text += before + (pairs > 0 ? format(" %d pairs for ", pairs) : std::string(" over 10,000 pairs for ")) + name;
    before = ",";
  }
  return text + ".</p>\n";
}

std::string over_seeds(const std::vector<Kind>& kinds, const std::map<int, std::string>& published) {
  if (std::none_of(kinds.begin(), kinds.end(), [](const Kind& kind) { return kind.losses.size() > 1; })) return "";
  std::vector<std::string> heads = {"runs that differ by seed alone",
                                    "seeds",
                                    "mean validation loss",
                                    "difference to the first, by pairs",
                                    "pairs",
                                    "p",
                                    "tokens/s, to the first's",
                                    "K/V, to the first's",
                                    ""};
  if (!published.empty()) heads.push_back("difference, published");
  std::string rows = row(heads, "th");
  auto with_interval = [](const Estimate& e, const std::string& mean) {
    return mean + (std::isfinite(e.interval) ? format(" &#177; %.5f", e.interval) : "");
  };
  double squares = 0;
  int freedom = 0;
  for (const Kind& kind : kinds) {
    std::vector<double> losses, differences;
    for (const auto& [seed, loss] : kind.losses) {
      losses.push_back(loss);
      const auto first = kinds[0].losses.find(seed);
      if (first != kinds[0].losses.end()) differences.push_back(loss - first->second);
    }
    const Estimate mean = estimate(losses), difference = estimate(differences);
    std::vector<std::string> cells = {html(kind.label), format("%zu", losses.size()),
                                      with_interval(mean, loss_text(mean.mean))};
    cells.resize(9);
    if (&kind != &kinds[0] && !differences.empty()) {
      cells[3] = with_interval(difference, signed_text(difference.mean));
      cells[4] = format("%zu", differences.size());
      cells[5] = std::isfinite(difference.p) ? format("%.3g", difference.p) : "-";
      cells[8] = verdict(difference, differences.size());
      const int more = int(differences.size()) - 1;
      if (more > 0) squares += difference.deviation * difference.deviation * more, freedom += more;
    }
    const double speed = median(kind.speeds) / median(kinds[0].speeds), kv = kind.kv_bytes / kinds[0].kv_bytes;
    if (&kind != &kinds[0] && std::isfinite(speed)) cells[6] = format("%.2f", speed);
    if (&kind != &kinds[0] && std::isfinite(kv)) cells[7] = format("%.1f %%", 100 * kv);
    if (!published.empty()) {
      const auto found = published.find(int(&kind - &kinds[0]));
      cells.push_back(found == published.end() ? "" : html(found->second));
    }
    rows += row(cells);
  }
  return "<p>Means with 95 % confidence intervals by Student's t; differences are of runs with the same seed, and p "
         "that of the paired t-test. Speeds are medians, over steps and then over runs. Only runs that are finished "
         "count.</p>\n<div class=\"wide\"><table class=\"seeds\">\n" +
         rows + "</table></div>\n" + seeds_for(squares, freedom);
}

// The loss at the positions of `range` in the run of a kind with this seed; NaN where it has not been measured.
static double loss_at(const Kind& kind, int64_t seed, const PositionRange& range) {
  const auto run = kind.positions.find(seed);
  if (run == kind.positions.end()) return NAN;
  for (const PositionRange& r : run->second)
    if (r.first == range.first && r.last == range.last) return r.loss;
  return NAN;
}

// Means over seeds of the losses by position; with `first`, of the differences to those of its runs with the same seed.
static std::vector<PositionRange> mean_by_position(const Kind& kind, const Kind* first) {
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> values;  // of each range
  for (const auto& [seed, positions] : kind.positions)
    for (const PositionRange& range : positions) {
      const double loss = range.loss - (first == nullptr ? 0 : loss_at(*first, seed, range));
      if (std::isfinite(loss)) values[{range.first, range.last}].push_back(loss);
    }
  std::vector<PositionRange> means;
  for (const auto& [range, losses] : values) means.push_back({range.first, range.second, 0, estimate(losses).mean});
  return means;
}

json comparison_charts(const Comparison& c, size_t runs_of_page) {
  const auto& [runs, names, kinds, kind_of_run] = c;
  const size_t buckets = std::clamp<size_t>(6000 / runs_of_page, 50, buckets_of_a_run);
  std::vector<json> val, accuracy, train, scatter(kinds.size());
  for (size_t i = 0; i < runs.size(); i++) {
    const RunHistory& run = runs[i];
    const int colour = kind_of_run[i];
    val.push_back(styled(series(run, run.validations, &ValPoint::loss, buckets), names[i], colour, "points"));
    accuracy.push_back(styled(series(run, run.validations, &ValPoint::accuracy, buckets), names[i], colour, "points"));
    train.push_back(
        styled(series(run, run.steps, smoothed(run, &TrainPoint::loss), buckets), names[i], colour, "line"));
    json& dots = scatter[size_t(colour)];
    if (dots.is_null())
      dots = styled({{"x", json::array()}, {"y", json::array()}}, kinds[size_t(colour)].label, colour, "dots");
    dots["x"].push_back(rounded(run.number("kv_bytes_per_token", NAN)));
    dots["y"].push_back(std::isfinite(run.number("kv_bytes_per_token", NAN)) ? rounded(run.final_loss())
                                                                             : json(nullptr));
  }
  json charts = json::array();
  add_chart(charts, "Validation loss", "nats a token", std::move(val));
  add_chart(charts, "Accuracy of validation", "share of scored tokens", std::move(accuracy));
  add_chart(charts, "Training loss, smoothed", "nats a token", std::move(train));
  add_chart(charts, "Final validation loss against K/V", "validation loss", std::move(scatter), "bytes of K/V a token");
  std::vector<json> positions, differences;
  for (size_t k = 0; k < kinds.size(); k++) {
    positions.push_back(styled(by_position(mean_by_position(kinds[k], nullptr)), kinds[k].label, int(k), "points"));
    if (k > 0)
      differences.push_back(
          styled(by_position(mean_by_position(kinds[k], &kinds[0])), kinds[k].label, int(k), "points"));
  }
  add_position_chart(charts, "Loss by position, mean over seeds", std::move(positions));
  add_position_chart(charts, "The same, minus the first's", std::move(differences));
  return charts;
}

}  // namespace report

using namespace report;

std::string comparison_page(const std::vector<RunHistory>& runs) {
  CHECK(!runs.empty());
  const Comparison compared(runs);
  std::string all_notices, pictures;
  std::set<int64_t> lengths;
  for (const RunHistory& run : runs) all_notices += notices(run), lengths.insert(run.last_step());
  if (lengths.size() > 1)
    all_notices += "<p class=\"warn\">The runs have different lengths; each one's final loss is that at its own "
                   "end.</p>\n";
  std::set<std::string> drawn;
  for (const RunHistory& run : runs) {
    const std::string id = format("wiring-%zu", drawn.size());
    if (!drawn.insert(string_in(run.description, "wiring")).second) continue;
    const std::string picture = picture_of(run, id);
    if (!picture.empty()) pictures += "<div>" + picture + "</div>\n";
  }
  return page(format("%zu runs", runs.size()),
              format("<h1>%zu runs side by side</h1>\n", runs.size()) + all_notices +
                  section("Over seeds", over_seeds(compared.kinds)) + "<h2>Curves</h2>\n" + axes + chart_places +
                  section("Final losses", final_losses(compared)) +
                  section("Wirings", pictures.empty() ? "" : "<div class=\"wirings\">" + pictures + "</div>\n"),
              comparison_charts(compared, runs.size()));
}
