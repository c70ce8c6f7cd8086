#include <algorithm>
#include <set>
#include <tuple>
#include "llmc/train/print.h"
#include "llmc/train/settings.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "parts.h"
#include "report.h"
#include "statistics.h"

namespace report {

// Each run's description without its seed and what follows from the rest: of the other keys those that all runs have.
static std::vector<nlohmann::json> keys_of(const std::vector<RunHistory>& runs) {
  std::vector<json> all;
  for (const RunHistory& run : runs) {
    all.push_back(run.description);
    for (const char* key : {model_checksum_key, train_checksum_key, val_checksum_key})
      all.back().emplace(key, "");  // not known, or none
    // The same data are named as the first run of them has it.
    for (const auto& [name, checksum] : {std::pair("train_data", train_checksum_key), {"val_data", val_checksum_key}})
      for (const json& other : all)
        if (other.contains(name) && other[checksum] != "" && other[checksum] == all.back()[checksum]) {
          all.back()[name] = other[name];
          break;
        }
  }
  std::vector<nlohmann::json> keys(runs.size());
  for (const auto& [name, value] : all[0].items()) {
    const auto says_it = [&, n = name](const json& other) { return other.contains(n); };
    if (name == "seed" || derived_fields.count(name) > 0 || !std::all_of(all.begin(), all.end(), says_it)) continue;
    for (size_t i = 0; i < runs.size(); i++) keys[i][name] = all[i][name];
  }
  return keys;
}

// A value of an arm as text; "" if it has none.
static std::string value_in(const Arm& arm, const std::string& name) {
  const auto it = arm.key.find(name);
  return it == arm.key.end() ? "" : with_short_names(it->is_string() ? it->get<std::string>() : it->dump());
}

// Whether two arms have different values, as far as both are known.
static bool differ(const Arm& a, const Arm& b, const std::string& name) {
  const std::string ours = value_in(a, name), theirs = value_in(b, name);
  return !ours.empty() && !theirs.empty() && ours != theirs;
}

// The wiring, and what else is not the same for all arms.
static std::string label_of(const Arm& arm, const std::vector<Arm>& arms) {
  std::string label = value_in(arm, "wiring");
  for (const auto& [name, value] : arm.key.items()) {
    const auto has_it = [&, n = name, v = value](const Arm& other) { return other.key[n] == v; };
    if (name != "wiring" && !std::all_of(arms.begin(), arms.end(), has_it))
      label += (label.empty() ? "" : ", ") + name + " " + value_in(arm, name);
  }
  return label;
}

// Arm::other_validation. Without -m 0 validation reads so many micro-batches (-b) of the data, and with `memory` the
// beginnings of as many streams as all ranks have rows.
static std::string other_validation(const Arm& arm, const Arm& first) {
  const auto has_memory = [](const Arm& k) { return value_in(k, "wiring").find("memory(") != std::string::npos; };
  const bool reads_all = value_in(arm, "val_batches") == "0" && value_in(first, "val_batches") == "0";
  std::vector<std::string> all;
  if (differ(arm, first, val_checksum_key)) all.push_back("other data (-j)");
  for (const auto& [name, what, matters] : {std::tuple("val_batches", "-m", true),
                                            {"seq_len", "-t", true},
                                            {"micro_batch", "-b", !reads_all},
                                            {"ranks", "ranks", !reads_all && has_memory(arm)}})
    if (matters && differ(arm, first, name))
      all.push_back(what + (" " + value_in(arm, name)) + " in place of " + value_in(first, name));
  if (has_memory(arm) != has_memory(first) && !reads_all) all.push_back("other places, for `memory` reads streams");
  return joined(all, ", ");
}

static std::vector<std::string> names_of(const std::vector<RunHistory>& runs) {
  std::vector<std::string> names;
  for (const RunHistory& run : runs) names.push_back(folder_name(run.name));
  if (std::set<std::string>(names.begin(), names.end()).size() == names.size()) return names;
  for (size_t i = 0; i < runs.size(); i++) names[i] = runs[i].name;
  return names;
}

Comparison::Comparison(const std::vector<RunHistory>& the_runs) : runs(the_runs), names(names_of(the_runs)) {
  const std::vector<nlohmann::json> keys = keys_of(runs);
  for (size_t i = 0; i < runs.size(); i++) {
    const RunHistory& run = runs[i];
    const nlohmann::json& key = keys[i];
    auto it = std::find_if(arms.begin(), arms.end(), [&](const Arm& arm) { return arm.key == key; });
    if (it == arms.end()) {
      it = arms.insert(arms.end(), Arm());
      it->key = key, it->kv_bytes = run.number("kv_bytes_per_token", NAN);
      it->flops_per_token = run.number("flops_per_token", NAN);
    }
    arm_of_run.push_back(int(it - arms.begin()));
    if (!run.is_finished() || !std::isfinite(run.final_loss())) continue;
    it->losses.emplace(int64_t(run.number("seed", 0)), run.final_loss());
    it->validations.emplace(int64_t(run.number("seed", 0)), run.validations);
    std::vector<double> speeds;
    for (const TrainPoint& p : run.steps) speeds.push_back(p.tokens_per_second);
    it->speeds.push_back(median(speeds));
    if (!run.positions.empty()) it->positions.emplace(int64_t(run.number("seed", 0)), run.positions);
  }
  for (Arm& arm : arms) {
    arm.label = label_of(arm, arms);
    arm.other_validation = other_validation(arm, arms[0]);
  }
}

std::vector<std::string> comparison_warnings(const Comparison& c) {
  std::vector<std::string> lines;
  const Arm& first = c.arms[0];
  std::set<std::pair<int, int64_t>> seen;  // arms and seeds
  for (size_t i = 0; i < c.runs.size(); i++)
    if (const auto seed = int64_t(c.runs[i].number("seed", 0)); !seen.insert({c.arm_of_run[i], seed}).second)
      lines.push_back(c.names[i] + format(": another run of seed %lld differs in nothing; means over seeds have the "
                                          "first of them that is finished.",
                                          (long long)seed));
  for (const Arm& arm : c.arms) {
    const bool same_tokens = !value_in(arm, val_checksum_key).empty() &&
                             value_in(arm, val_checksum_key) == value_in(first, val_checksum_key);
    if (!arm.other_validation.empty())
      lines.push_back(arm.label + ": validation does not read what that of the first runs does (" +
                      arm.other_validation + "): losses cannot be compared, and no difference is tested.");
    if (differ(arm, first, "vocab_size") && !same_tokens)
      lines.push_back(arm.label + ": the vocabulary is not that of the first runs: losses in nats per token cannot be "
                                  "compared; bits per byte can, if both validate the same text.");
    if (differ(arm, first, train_checksum_key))
      lines.push_back(arm.label + ": trained on other data (-i) than the first runs: training losses cannot be "
                                  "compared, and a difference in validation may be that of the data.");
  }
  return lines;
}

// What is a column of the table only where a run has it.
struct OptionalColumn {
  const char* head;
  double ValPoint::*value;  // of the last validation; NaN if the run has none
  std::string (*text)(double);
};

static std::vector<OptionalColumn> known_columns(const std::vector<RunHistory>& runs) {
  std::vector<OptionalColumn> known;
  for (const OptionalColumn& column : {OptionalColumn{"bits per byte", &ValPoint::bits_per_byte, loss_text},
                                       {"cycles of a token, N + R", &ValPoint::ponder, loss_text},
                                       {"accuracy", &ValPoint::accuracy, percent_text}})
    if (std::any_of(runs.begin(), runs.end(),
                    [&](const RunHistory& run) { return std::isfinite(run.final(column.value)); }))
      known.push_back(column);
  return known;
}

// The run that a run's loss is compared with: the first of the first arm that has the same seed; -1 without one.
static int reference_of(const Comparison& c, size_t i) {
  if (!c.arms[size_t(c.arm_of_run[i])].other_validation.empty()) return -1;
  for (size_t first = 0; first < c.runs.size(); first++)
    if (c.arm_of_run[first] == 0 && c.runs[first].number("seed", 0) == c.runs[i].number("seed", 0)) return int(first);
  return -1;
}

std::string final_losses(const Comparison& c) {
  const auto& [runs, names, arms, arm_of_run] = c;
  std::vector<std::string> head = {"run", "wiring", "seed", "validation loss", "less the first wiring's, same seed"};
  const std::vector<OptionalColumn> optional_columns = known_columns(runs);
  for (const OptionalColumn& column : optional_columns) head.push_back(column.head);
  for (const char* name : {"steps", "tokens", "training", "tokens/s", "parameters", "K/V per token", "FLOPs per token"})
    head.push_back(name);
  std::string rows = row(head, "th");
  for (size_t i = 0; i < runs.size(); i++) {
    const RunHistory& run = runs[i];
    auto count = [&](const char* key) {
      return std::isfinite(run.number(key, NAN)) ? count_text(run.number(key, NAN)) : std::string("-");
    };
    const bool timed = std::isfinite(run.seconds()) && run.seconds() > 0;
    const int reference = reference_of(c, i);
    std::vector<std::string> cells = {format("<span class=\"key\" style=\"background:var(--series-%d)\"></span>",
                                             arm_of_run[i] % 8) +
                                          html(names[i]),
                                      html(value_in(arms[size_t(arm_of_run[i])], "wiring")),
                                      html(string_in(run.description, "seed")), loss_text(run.final_loss()),
                                      reference == int(i) ? ""
                                      : reference < 0
                                          ? "-"
                                          : signed_text(run.final_loss() - runs[size_t(reference)].final_loss())};
    for (const OptionalColumn& column : optional_columns) cells.push_back(column.text(run.final(column.value)));
    for (const std::string& cell : {format("%lld", (long long)run.last_step()) +
                                        (run.is_finished() ? "" : format(" of %lld", (long long)run.planned_steps())),
                                    count_text(run.tokens()), timed ? time_text(run.seconds()) : "-",
                                    timed ? count_text(run.tokens() / run.seconds()) : "-", count("num_parameters"),
                                    count("kv_bytes_per_token"), count("flops_per_token")})
      cells.push_back(cell);
    rows += row(cells);
  }
  return "<div class=\"wide\"><table class=\"runs\">\n" + rows + "</table></div>\n";
}

constexpr double least_difference = 0.01;  // nats: what is smaller counts as none

// Arms whose losses have pairs with the first arm's, and what these show. The p are Holm's: of a difference, and of
// there being none as large as least_difference.
struct PairedDifference {
  Estimate of;
  size_t pairs;
  double holm_p = NAN, same_p = NAN;
};

// In words, what a difference to the first arm shows.
static std::string verdict(const PairedDifference& d) {
  const auto& [difference, pairs, p, same_p] = d;
  if (!std::isfinite(difference.interval)) return "one pair shows nothing about other seeds";
  const std::string same = same_p < 0.05 ? format(" within %g nats (p %.2g)", least_difference, same_p) : "";
  if (p < 0.05) return (difference.mean < 0 ? "lower" : "higher") + (same.empty() ? "" : ", but the same" + same);
  if (!same.empty()) return "the same" + same;
  if (difference.p < 0.05) return "no difference is shown: among so many, one may look like this by chance";
  const int needed = pairs_needed(difference.mean, difference.deviation);
  return "no difference is shown: 0 lies in the interval" +
         (needed > int(pairs) ? format("; if it is as large as it looks, it takes %d seeds", needed) : std::string());
}

// What it would take to see differences of some sizes, up to the largest that the paper found between wirings such as
// these, if all vary from seed to seed as these do.
static std::string seeds_for(double squares, int freedom, bool is_the_papers) {
  if (freedom < 1 || squares <= 0) return "";
  const double deviation = std::sqrt(squares / freedom);
  std::string text = format("<p>From seed to seed, differences vary with a standard deviation of %.4f nats (of all "
                            "rows together). ",
                            deviation);
  const char* before = "To find a true difference with p &lt; 0.05 in four of five experiments takes";
  for (const auto& [nats, name] :
       {std::pair(0.01, "0.01 nats"),
        {0.05, "0.05"},
        {0.133, is_the_papers ? "0.133, the largest in the paper on skip-layer attention" : ""}}) {
    if (!*name) continue;
    const int pairs = pairs_needed(nats, deviation);
    text += before + (pairs > 0 ? format(" %d pairs for ", pairs) : std::string(" over 10,000 pairs for ")) + name;
    before = ",";
  }
  return text + ".</p>\n";
}

static std::map<const Arm*, PairedDifference> paired_differences(const std::vector<Arm>& arms) {
  std::map<const Arm*, PairedDifference> found;
  std::vector<PairedDifference*> tested;
  std::vector<double> ps, same_ps;
  for (size_t k = 1; k < arms.size(); k++) {
    std::vector<double> differences;
    for (const auto& [seed, loss] : arms[k].losses)
      if (const auto first = arms[0].losses.find(seed); first != arms[0].losses.end())
        differences.push_back(loss - first->second);
    if (differences.empty() || !arms[k].other_validation.empty()) continue;
    PairedDifference& d = found[&arms[k]] = {estimate(differences), differences.size()};
    if (!std::isfinite(d.of.p)) continue;
    tested.push_back(&d), ps.push_back(d.of.p), same_ps.push_back(equivalence_p(differences, least_difference));
  }
  ps = holm(ps), same_ps = holm(same_ps);
  for (size_t i = 0; i < tested.size(); i++) tested[i]->holm_p = ps[i], tested[i]->same_p = same_ps[i];
  return found;
}

// The bits per byte of an arm's finished runs; empty if one does not know them.
static std::vector<double> bits_of(const Arm& arm) {
  std::vector<double> bits;
  for (const auto& [seed, points] : arm.validations) bits.push_back(points.back().bits_per_byte);
  const bool are_known = std::all_of(bits.begin(), bits.end(), [](double b) { return std::isfinite(b); });
  return are_known ? bits : std::vector<double>();
}

static std::string with_interval(const Estimate& e, const std::string& mean) {
  return mean + (std::isfinite(e.interval) ? format(" &#177; %.5f", e.interval) : "");
}

// What the table over seeds says besides its numbers.
static std::string how_to_read(const std::vector<Arm>& arms, size_t tests) {
  const auto same = [&](const char* key) {
    return std::all_of(arms.begin(), arms.end(),
                       [&](const Arm& k) { return value_in(k, key) == value_in(arms[0], key); });
  };
  const std::string rate = value_in(arms[0], "learning_rate");
  return "<p>Means with 95 % confidence intervals by Student's t, each for itself; differences are of runs with the "
         "same seed, and p that of the paired t-test" +
         (tests > 1 ? format(", by Holm's correction for %zu tests", tests) : std::string()) +
         format(". What is the same is shown by two one-sided tests, each of %g nats", least_difference) +
         ". Speeds are medians, over steps and then over runs. Only runs that are finished count." +
         (!rate.empty() && same("learning_rate") && !same("wiring")
              ? " All wirings have one learning rate, " + html(rate) + ", which need not be the best of each."
              : "") +
         "</p>\n";
}

std::string over_seeds(const std::vector<Arm>& arms, const std::map<int, std::string>& published) {
  if (std::none_of(arms.begin(), arms.end(), [](const Arm& arm) { return arm.losses.size() > 1; })) return "";
  const std::map<const Arm*, PairedDifference> differences = paired_differences(arms);
  double squares = 0;
  int freedom = 0;
  size_t tests = 0;
  for (const auto& [arm, d] : differences)
    if (d.pairs > 1)
      squares += d.of.deviation * d.of.deviation * double(d.pairs - 1), freedom += int(d.pairs) - 1, tests++;
  std::vector<std::string> heads = {"runs that differ by seed alone",
                                    "seeds",
                                    "mean validation loss",
                                    "difference to the first, by pairs",
                                    "pairs",
                                    tests > 1 ? "p, by Holm" : "p",
                                    "tokens/s, to the first's",
                                    "K/V, to the first's",
                                    "what the pairs show"};
  if (!published.empty()) heads.push_back("difference, published");
  std::string rows = row(heads, "th");
  bool is_the_papers = true;  // plain and sla alone
  for (size_t k = 0; k < arms.size(); k++) {
    const Arm& arm = arms[k];
    std::vector<double> losses;
    for (const auto& [seed, loss] : arm.losses) losses.push_back(loss);
    const Estimate mean = estimate(losses), bits = estimate(bits_of(arm));
    std::vector<std::string> cells = {html(arm.label), format("%zu", losses.size()),
                                      with_interval(mean, loss_text(mean.mean))};
    if (std::isfinite(bits.mean))
      cells[2] += "<br><span class=\"quiet\">" + with_interval(bits, loss_text(bits.mean)) + " bits per byte</span>";
    cells.resize(9);
    if (const auto found = differences.find(&arm); found != differences.end()) {
      const PairedDifference& d = found->second;
      cells[3] = with_interval(d.of, signed_text(d.of.mean));
      cells[4] = format("%zu", d.pairs);
      cells[5] = std::isfinite(d.holm_p) ? format("%.3g", d.holm_p) : "-";
      cells[8] = verdict(d);
    }
    if (!arm.other_validation.empty()) cells[8] = "not compared: other validation data";
    const double speed = median(arm.speeds) / median(arms[0].speeds), kv = arm.kv_bytes / arms[0].kv_bytes;
    if (k > 0 && std::isfinite(speed)) cells[6] = format("%.2f", speed);
    if (k > 0 && std::isfinite(kv)) cells[7] = format("%.1f %%", 100 * kv);
    if (!published.empty()) {
      const auto found = published.find(int(k));
      cells.push_back(found == published.end() ? "" : html(found->second));
    }
    rows += row(cells);
    const std::string wiring = value_in(arm, "wiring");
    is_the_papers &= wiring == "plain" || (begins_with(wiring, "sla(") && wiring.find(" ") == std::string::npos);
  }
  return how_to_read(arms, tests) + "<div class=\"wide\"><table class=\"seeds\">\n" + rows + "</table></div>\n" +
         seeds_for(squares, freedom, is_the_papers);
}

// The loss at the positions of `range` in the run of an arm with this seed; NaN where it has not been measured.
static double loss_at(const Arm& arm, int64_t seed, const PositionRange& range) {
  const auto run = arm.positions.find(seed);
  if (run == arm.positions.end()) return NAN;
  for (const PositionRange& r : run->second)
    if (r.first == range.first && r.last == range.last) return r.loss;
  return NAN;
}

// Means over seeds of the losses by position; with `first`, of the differences to those of its runs with the same seed.
static std::vector<PositionRange> mean_by_position(const Arm& arm, const Arm* first) {
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> values;  // of each range
  for (const auto& [seed, positions] : arm.positions)
    for (const PositionRange& range : positions) {
      const double loss = range.loss - (first == nullptr ? 0 : loss_at(*first, seed, range));
      if (std::isfinite(loss)) values[{range.first, range.last}].push_back(loss);
    }
  std::vector<PositionRange> means;
  for (const auto& [range, losses] : values) means.push_back({range.first, range.second, 0, estimate(losses).mean});
  return means;
}

// A curve of an arm: its run's, or the mean of several at the steps that all of them have, in a band from the lowest to
// the highest.
template <class Point, class Values>
json kind_series(const std::vector<const RunHistory*>& runs, std::vector<Point> RunHistory::*points, Values values_of,
                 size_t buckets) {
  if (runs.size() == 1) return series(*runs[0], runs[0]->*points, values_of(*runs[0]), buckets);
  std::map<int64_t, std::vector<std::pair<const Point*, double>>> by_step;
  for (const RunHistory* run : runs) {
    const std::vector<double> values = values_of(*run);
    for (size_t i = 0; i < values.size(); i++)
      by_step[(run->*points)[i].step].push_back({&(run->*points)[i], values[i]});
  }
  std::vector<Point> mean_points;
  std::vector<double> means, lows, highs;
  for (const auto& [step, of_step] : by_step) {
    if (of_step.size() != runs.size()) continue;
    Point point = *of_step[0].first;
    point.seconds = point.tokens = 0;
    double mean = 0, low = INFINITY, high = -INFINITY;
    for (const auto& [p, value] : of_step) {
      point.seconds += p->seconds / double(runs.size()), point.tokens += p->tokens / double(runs.size());
      mean += value / double(runs.size()), low = std::min(low, value), high = std::max(high, value);
    }
    mean_points.push_back(point), means.push_back(mean), lows.push_back(low), highs.push_back(high);
  }
  json s = series(*runs[0], mean_points, means, buckets);
  for (size_t i : thin(means, buckets)) {
    const bool is_gap = !std::isfinite(means[i]);
    s["low"].push_back(is_gap ? json() : rounded(lows[i])), s["high"].push_back(is_gap ? json() : rounded(highs[i]));
  }
  return s;
}

// The finished runs of an arm; all of them if none is.
static std::vector<const RunHistory*> runs_to_draw(const Comparison& c, size_t arm) {
  std::vector<const RunHistory*> all, finished;
  for (size_t i = 0; i < c.runs.size(); i++) {
    if (size_t(c.arm_of_run[i]) != arm) continue;
    all.push_back(&c.runs[i]);
    if (c.runs[i].is_finished()) finished.push_back(&c.runs[i]);
  }
  return finished.empty() ? all : finished;
}

json comparison_charts(const Comparison& c, size_t runs_of_page) {
  const auto& [runs, names, arms, arm_of_run] = c;
  const size_t buckets = std::clamp<size_t>(6000 / runs_of_page, 50, buckets_of_a_run);
  std::vector<json> val, accuracy, train, scatter;
  int64_t shortest = INT64_MAX, longest = 0;  // what is drawn, in steps
  bool any_band = false;
  for (size_t k = 0; k < arms.size(); k++) {
    const std::vector<const RunHistory*> drawn = runs_to_draw(c, k);
    const auto validations = [](double ValPoint::*what) {
      return [what](const RunHistory& run) {
        std::vector<double> values;
        for (const ValPoint& point : run.validations) values.push_back(point.*what);
        return values;
      };
    };
    const auto training = [](const RunHistory& run) { return smoothed(run, &TrainPoint::loss); };
    const std::string name = arms[k].label.empty() ? names[0] : arms[k].label;
    const int colour = int(k);
    val.push_back(styled(kind_series(drawn, &RunHistory::validations, validations(&ValPoint::loss), buckets), name,
                         colour, "points"));
    accuracy.push_back(styled(kind_series(drawn, &RunHistory::validations, validations(&ValPoint::accuracy), buckets),
                              name, colour, "points"));
    train.push_back(styled(kind_series(drawn, &RunHistory::steps, training, buckets), name, colour, "line"));
    any_band |= drawn.size() > 1;
    json dots = {{"x", json::array()}, {"y", json::array()}};
    for (size_t i = 0; i < runs.size(); i++) {
      if (size_t(arm_of_run[i]) != k) continue;
      const double kv = runs[i].number("kv_bytes_per_token", NAN);
      dots["x"].push_back(rounded(kv)), dots["y"].push_back(std::isfinite(kv) ? rounded(runs[i].final_loss()) : json());
      shortest = std::min(shortest, runs[i].last_step()), longest = std::max(longest, runs[i].last_step());
    }
    scatter.push_back(styled(dots, name, colour, "dots"));
  }
  json charts = json::array();
  const std::string of_seeds = any_band ? ": mean over seeds, from the lowest to the highest" : "";
  const auto add_losses = [&](const std::string& title, std::vector<json> all) {
    const size_t before = charts.size();
    add_chart(charts, title + of_seeds, "nats per token", std::move(all));
    if (charts.size() > before) charts.back()["lastHalf"] = 2 * shortest > longest;  // else a curve is not in it
  };
  add_losses("Validation loss", std::move(val));
  add_chart(charts, "Accuracy of validation" + of_seeds, "share of scored tokens", std::move(accuracy));
  add_losses("Training loss, smoothed", std::move(train));
  add_chart(charts, "Final validation loss against K/V", "validation loss", std::move(scatter),
            "bytes of K/V per token");
  std::vector<json> positions, differences;
  for (size_t k = 0; k < arms.size(); k++) {
    positions.push_back(styled(by_position(mean_by_position(arms[k], nullptr)), arms[k].label, int(k), "points"));
    if (k > 0 && arms[k].other_validation.empty())
      differences.push_back(styled(by_position(mean_by_position(arms[k], &arms[0])), arms[k].label, int(k), "points"));
  }
  add_position_chart(charts, "Loss by position, mean over seeds", std::move(positions));
  add_position_chart(charts, "The same, minus the first's", std::move(differences));
  return charts;
}

}  // namespace report

using namespace report;

// What all runs have in common, and of parameters how many they have.
static std::string shared_facts(const Comparison& c) {
  const auto shared = [&](const char* key) {  // "" if not all have it
    const std::string first = string_in(c.runs[0].description, key);
    const auto has_it = [&](const RunHistory& run) { return string_in(run.description, key) == first; };
    return std::all_of(c.runs.begin(), c.runs.end(), has_it) ? first : "";
  };
  const auto joined = [&](const std::vector<std::pair<const char*, std::string>>& parts) {  // "4 layers, 32 channels"
    std::string text;
    for (const auto& [key, name] : parts)
      if (const std::string value = shared(key); !value.empty())
        text += (text.empty() ? "" : ", ") + (begins_with(name, " ") ? value + name : name + value);
    return text;
  };
  double least = INFINITY, most = 0;
  for (const RunHistory& run : c.runs)
    if (const double n = run.number("num_parameters", NAN); std::isfinite(n))
      least = std::min(least, n), most = std::max(most, n);
  const std::string counts = count_text(least), most_text = count_text(most);
  return "<div class=\"facts shared\">\n" +
         fact("model", joined({{"num_layers", " layers"},
                               {"num_heads", " heads"},
                               {"channels", " channels"},
                               {"vocab_size", "a vocabulary of "}})) +
         fact("parameters", most == 0             ? ""
                            : counts == most_text ? counts
                                                  : counts + " to " + most_text) +
         fact("training data", shared("train_data")) +
         fact("validation data", joined({{"val_data", ""}, {"val_batches", "-m "}})) +
         fact("an update", joined({{"total_batch", " tokens"}, {"seq_len", "-t "}, {"micro_batch", "-b "}})) +
         fact("updates", shared("steps")) +
         fact("peak learning rate", joined({{"learning_rate", ""}, {"schedule", ""}, {"optimizer", ""}})) +
         fact("precision, device", joined({{"precision", ""}, {"device", ""}})) + "</div>\n";
}

std::string comparison_page(const std::vector<RunHistory>& runs, std::vector<std::string>* warnings) {
  CHECK(!runs.empty());
  const Comparison compared(runs);
  std::vector<std::string> lines = comparison_warnings(compared);
  if (warnings != nullptr) warnings->insert(warnings->end(), lines.begin(), lines.end());
  std::string all_notices, pictures;
  std::set<std::pair<int64_t, double>> lengths;  // in steps and tokens
  for (const RunHistory& run : runs)
    all_notices += notices(run), lengths.insert({run.last_step(), std::isfinite(run.tokens()) ? run.tokens() : 0});
  if (lengths.size() > 1)
    lines.push_back("The runs have different lengths; each one's final loss is that at its own end.");
  std::set<std::string> drawn;
  for (const RunHistory& run : runs) {
    const std::string id = format("wiring-%zu", drawn.size());
    if (!drawn.insert(string_in(run.description, "wiring")).second) continue;
    const std::string picture = picture_of(run, id);
    if (!picture.empty()) pictures += "<div>" + picture + "</div>\n";
  }
  return page(format("%zu runs", runs.size()),
              format("<h1>%zu runs side by side</h1>\n", runs.size()) + warning_lines(lines) + all_notices +
                  shared_facts(compared) + section("Over seeds", over_seeds(compared.arms)) + "<h2>Curves</h2>\n" +
                  axes + chart_places + section("Final losses", final_losses(compared)) +
                  section("Wirings", pictures.empty() ? "" : "<div class=\"wirings\">" + pictures + "</div>\n"),
              comparison_charts(compared, runs.size()));
}
