#include "report.h"
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include "llmc/model/wiring_picture.h"
#include "llmc/utils/embed.h"
#include "llmc/utils/error.h"
#include "llmc/utils/number.h"
#include "llmc/utils/files.h"
#include "llmc/utils/text.h"
#include "llmc/utils/utf8.h"
#include "print.h"
#include "statistics.h"
#include "thin.h"

using json = nlohmann::ordered_json;

EMBED(sla_report_css, "llmc/run/report.css");
EMBED(sla_report_js, "llmc/run/report.js");
// The chart library and its licence are the package's, copied by the Makefile; they are empty where there is none.
EMBED(sla_chart_js, "chart.js");
EMBED(sla_chart_licence, "chart_licence.txt");

namespace {

// ----------------------------------------------------------------------------
// Text in a page

// Any text, as the content of an element or of an attribute in double quotes.
std::string html(const std::string& text) {
  std::string escaped;
  for (char c : printable(text)) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

// JSON in a <script>, which ends at the first "</script", wherever that stands.
std::string json_in_script(const json& value) {
  std::string text;
  for (char c : value.dump(-1, ' ', false, json::error_handler_t::replace))
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return text;
}

// A script that no "</script" inside of its texts ends.
std::string script(const std::string& code) {
  std::string safe;
  for (size_t begin = 0;;) {
    const size_t at = code.find("</script", begin);
    safe += code.substr(begin, at - begin);
    if (at == std::string::npos) return "<script>" + safe + "</script>\n";
    safe += "<\\/";
    begin = at + 2;
  }
}

std::string loss_text(double loss) { return std::isfinite(loss) ? format("%.5f", loss) : "-"; }
std::string percent_text(double share) { return std::isfinite(share) ? format("%.1f %%", 100 * share) : "-"; }
std::string signed_text(double x) { return std::isfinite(x) ? format("%+.5f", x) : "-"; }

std::string string_in(const json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() ? "" : it->is_string() ? it->get<std::string>() : it->dump();
}

// ----------------------------------------------------------------------------
// Charts, as the JSON that report.js draws: {"charts": [{"title", "y", "x"?, "place", "series": [{"name", "colour",
// "style", ...}]}]}. A chart is drawn in the element with the id `place`; one with the title of its x axis is of x and
// y, the others are curves over steps. A series has either x and y, or for each y its step s, seconds t and tokens k,
// and the FLOPs of a token, f. Style: line, faint, points (a line with points) or dots. logX: the x axis is logarithmic
// at first.

// Six digits are more than a screen shows.
json rounded(double x) { return std::isfinite(x) ? json(parse_number<double>(format("%.6g", x))) : json(nullptr); }

constexpr size_t buckets_of_a_run = 1000;  // a chart is about half as many pixels wide

// What of a run's points a series shows.
template <class Point>
json series(const RunHistory& run, const std::vector<Point>& points, size_t buckets,
            const std::function<double(size_t)>& value) {
  std::vector<double> values;
  for (size_t i = 0; i < points.size(); i++) values.push_back(value(i));
  json s = {{"f", run.number("flops_per_token", 0)},
            {"s", json::array()},
            {"t", json::array()},
            {"k", json::array()},
            {"y", json::array()}};
  for (size_t i : thin(values, buckets)) {
    s["s"].push_back(points[i].step);
    s["t"].push_back(rounded(points[i].seconds));
    s["k"].push_back(rounded(points[i].tokens));
    s["y"].push_back(rounded(values[i]));
  }
  return s;
}

json styled(json s, const std::string& name, int colour, const char* style, bool dashed = false) {
  s["name"] = printable(name, /*one_line=*/true), s["colour"] = colour, s["style"] = style;
  if (dashed) s["dash"] = {6, 4};
  return s;
}

size_t smoothing_steps(const RunHistory& run) { return std::max<size_t>(1, run.steps.size() / 100); }

// Means of each step's value and those before it, a hundredth of the run; without what is not finite, and NaN where the
// step's own is not, unless it had no token to score.
std::vector<double> smoothed(const RunHistory& run, double TrainPoint::*what) {
  const size_t window = smoothing_steps(run);
  std::vector<double> smooth;
  double sum = 0;
  size_t count = 0;
  auto add = [&](double value, int sign) {
    if (std::isfinite(value)) sum += sign * value, count += size_t(sign);
  };
  for (size_t i = 0; i < run.steps.size(); i++) {
    add(run.steps[i].*what, 1);
    if (i >= window) add(run.steps[i - window].*what, -1);
    const bool has_mean = count > 0 && (std::isfinite(run.steps[i].*what) || !run.steps[i].is_scored);
    smooth.push_back(has_mean ? sum / double(count) : NAN);
  }
  return smooth;
}

bool any_finite(const json& s) {
  return std::any_of(s["y"].begin(), s["y"].end(), [](const json& y) { return !y.is_null(); });
}

// Adds a chart of those series that have a value; none if no one has.
void add_chart(json& charts, const std::string& title, const std::string& y, std::vector<json> all,
               const std::string& x = "") {
  json chart = {{"title", title}, {"y", y}, {"place", "charts"}, {"series", json::array()}};
  if (!x.empty()) chart["x"] = x;
  for (json& s : all)
    if (any_finite(s)) chart["series"].push_back(std::move(s));
  if (!chart["series"].empty()) charts.push_back(std::move(chart));
}

// Each step's value, and, of a run long enough to have one, its mean over a hundredth of the run.
std::vector<json> noisy(const RunHistory& run, double TrainPoint::*what, const std::string& name, int colour) {
  const json all = series(run, run.steps, buckets_of_a_run, [&run, what](size_t i) { return run.steps[i].*what; });
  if (smoothing_steps(run) == 1) return {styled(all, name, colour, "line")};
  const std::vector<double> smooth = smoothed(run, what);
  return {styled(all, name, colour, "faint"),
          styled(series(run, run.steps, buckets_of_a_run, [&](size_t i) { return smooth[i]; }),
                 name + format(", mean of %zu steps", smoothing_steps(run)), colour, "line")};
}

// Losses, or N + R, by position, a point for each range, at its (geometric) middle.
json by_position(const std::vector<PositionRange>& positions, double PositionRange::*what = &PositionRange::loss) {
  json s = {{"x", json::array()}, {"y", json::array()}};
  for (const PositionRange& range : positions) {
    s["x"].push_back(std::round(std::sqrt(double(range.first) * double(range.last))));
    s["y"].push_back(rounded(range.*what));
  }
  return s;
}

void add_position_chart(json& charts, const std::string& title, std::vector<json> all, const char* y = "nats a token") {
  const size_t before = charts.size();
  add_chart(charts, title, y, std::move(all), "tokens before, in the context");
  if (charts.size() > before) charts.back()["logX"] = true;
}

json charts_of(const RunHistory& run) {
  json charts = json::array();
  std::vector<json> losses = noisy(run, &TrainPoint::loss, "training", 0);
  const json val = series(run, run.validations, buckets_of_a_run, [&](size_t i) { return run.validations[i].loss; });
  losses.push_back(styled(val, "validation", 1, "points"));
  add_chart(charts, "Loss", "nats a token", std::move(losses));
  const json right =
      series(run, run.validations, buckets_of_a_run, [&](size_t i) { return run.validations[i].accuracy; });
  add_chart(charts, "Accuracy of validation", "share of scored tokens", {styled(right, "validation", 1, "points")});
  add_chart(charts, "Cycles that tokens run: N + R", "mean over tokens", noisy(run, &TrainPoint::ponder, "N + R", 5));
  add_chart(charts, "Norm of the gradient", "norm", noisy(run, &TrainPoint::grad_norm, "norm", 3));
  const json rate = series(run, run.steps, buckets_of_a_run, [&](size_t i) { return run.steps[i].learning_rate; });
  add_chart(charts, "Learning rate", "learning rate", {styled(rate, "learning rate", 2, "line")});
  add_chart(charts, "Speed", "tokens/s", noisy(run, &TrainPoint::tokens_per_second, "tokens/s", 0));
  add_chart(charts, "Share of the GEMM rate measured at the start", "share",
            noisy(run, &TrainPoint::gemm_share, "share", 4));
  add_position_chart(charts, "Loss by position", {styled(by_position(run.positions), "loss", 1, "points")});
  if (!run.positions.empty() && run.positions[0].ponder > 0)
    add_position_chart(charts, "Cycles that tokens run, by position",
                       {styled(by_position(run.positions, &PositionRange::ponder), "N + R", 5, "points")},
                       "mean of N + R");
  return charts;
}

// ----------------------------------------------------------------------------
// Parts of a page

std::string page(const std::string& title, const std::string& body, const json& charts) {
  const std::string licence(sla_chart_licence, sla_chart_licence_end), chart_js(sla_chart_js, sla_chart_js_end);
  std::string text = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                     "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
                     html(title) + "</title>\n<style>\n";
  text.append(sla_report_css, sla_report_css_end).append("</style>\n</head>\n<body>\n").append(body);
  if (!licence.empty())
    text += "<details class=\"quiet\"><summary>Charts are drawn by Chart.js, which this page contains; its "
            "licence</summary><pre>" +
            html(licence) + "</pre></details>\n";
  text += "<script type=\"application/json\" id=\"data\">" + json_in_script({{"charts", charts}}) + "</script>\n";
  return text + script(chart_js) + script({sla_report_js, sla_report_js_end}) + "</body>\n</html>\n";
}

const char* const axes = "<p id=\"axes\" class=\"quiet\">Curves over </p>\n";
const char* const chart_places = "<div class=\"charts\" id=\"charts\"></div>\n";

std::string fact(const std::string& name, const std::string& value) {
  return value.empty() ? "" : "<div><span class=\"quiet\">" + html(name) + "</span><b>" + html(value) + "</b></div>\n";
}

std::string row(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string text = "<tr>";
  for (const std::string& cell : cells) text += format("<%s>", tag) + cell + format("</%s>", tag);
  return text + "</tr>\n";
}

std::string folder_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

std::string section(const std::string& title, const std::string& content) {
  return content.empty() ? "" : "<h2>" + title + "</h2>\n" + content;
}

// What a process that resumed the run was told otherwise than the one before; "" if nothing.
std::string changes(const json& before, const json& now) {
  std::string text;
  for (const auto& [key, value] : now.items()) {
    const auto it = before.find(key);
    if (derived_fields.count(key) == 0 && it != before.end() && *it != value)
      text += (text.empty() ? "" : "; ") + key + " " + string_in(now, key.c_str()) + ", before " +
              string_in(before, key.c_str());
  }
  return text;
}

// What a reader must know to read the curves right.
std::string notices(const RunHistory& run) {
  std::vector<std::string> lines;
  const std::vector<int64_t> bad = run.steps_not_finite();
  if (!bad.empty()) {
    std::string steps;
    for (size_t i = 0; i < bad.size() && i < 10; i++) steps += format("%s%lld", i > 0 ? ", " : "", (long long)bad[i]);
    lines.push_back(format("%zu of %zu steps had a loss or a norm that was not finite and were skipped; curves have "
                           "gaps there: %s%s",
                           bad.size(), run.steps.size(), steps.c_str(), bad.size() > 10 ? ", ..." : ""));
  }
  const auto unscored = std::count_if(run.steps.begin(), run.steps.end(), [](const auto& p) { return !p.is_scored; });
  if (unscored > 0)
    lines.push_back(
        format("%lld of %zu steps had no token to score, and have no loss", (long long)unscored, run.steps.size()));
  for (const ValPoint& p : run.validations)
    if (!std::isfinite(p.loss))
      lines.push_back(format(p.is_scored ? "the validation loss after step %lld is not finite"
                                         : "the validation after step %lld had no token to score, and has no loss",
                             (long long)p.step));
  for (size_t i = 1; i < run.parts.size(); i++)
    if (const std::string what = changes(run.parts[i - 1].description, run.parts[i].description); !what.empty())
      lines.push_back(
          format("resumed after step %lld with other options: %s", (long long)run.parts[i].step, what.c_str()));
  if (run.num_repeated > 0)
    lines.push_back(
        format("%lld steps are in the log twice; what was trained later counts", (long long)run.num_repeated));
  if (run.num_unreadable > 0)
    lines.push_back(format("%lld lines of the log cannot be read", (long long)run.num_unreadable));
  if (run.ends_in_mid_line) lines.push_back("the log ends in the middle of a line, which is left out");
  if (!run.is_finished())
    lines.push_back(
        format("not finished: %lld of %lld steps", (long long)run.last_step(), (long long)run.planned_steps()));
  std::string text;
  for (const std::string& line : lines)
    text += "<p class=\"warn\">" + html(folder_name(run.name) + ": " + line) + ".</p>\n";
  return text;
}

std::string facts(const RunHistory& run) {
  const double last = run.steps.empty() ? NAN : smoothed(run, &TrainPoint::loss).back(),
               rate = run.tokens() / run.seconds();
  const double kv = run.number("kv_bytes_per_token", NAN), flops = run.number("flops_per_token", NAN);
  return "<div class=\"facts\">\n" +
         fact("steps", format("%lld of %lld", (long long)run.last_step(), (long long)run.planned_steps())) +
         fact("validation loss", loss_text(run.final_loss())) + fact("training loss, mean", loss_text(last)) +
         fact("tokens", count_text(run.tokens())) +
         fact("training time", std::isfinite(run.seconds()) ? time_text(run.seconds()) : "") +
         fact("tokens/s", std::isfinite(rate) ? count_text(rate) : "") +
         fact("parameters", count_text(run.number("num_parameters", 0))) +
         fact("a token's FLOPs", std::isfinite(flops) ? count_text(flops) : "") +
         fact("a token's K/V", std::isfinite(kv) ? count_text(kv) + " bytes" : "") + "</div>\n";
}

std::string memory_table(const RunHistory& run) {
  const auto memory = run.description.find("memory");
  if (memory == run.description.end() || !memory->is_object()) return "";
  double most = 1, sum = 0;
  for (const auto& [name, bytes] : memory->items())
    if (bytes.is_number()) most = std::max(most, bytes.get<double>()), sum += bytes.get<double>();
  std::string rows;
  for (const auto& [name, bytes] : memory->items()) {
    if (!bytes.is_number()) continue;
    const double b = bytes.get<double>();
    rows += row({html(name), bytes_text(b), format("%.1f %%", 100 * b / std::max(sum, 1.0)),
                 format("<span class=\"bar\" style=\"width:%.0fpx\"></span>", 300 * b / most)});
  }
  return "<table class=\"left\">\n" + rows + row({"total", bytes_text(sum), "", ""}) + "</table>\n";
}

constexpr double most_heads_drawn = 20000;  // of all layers: a picture of some MB

// "" for a description without a wiring that fits its numbers: a log from elsewhere.
std::string picture_of(const RunHistory& run, const std::string& id) {
  const double layers_there = run.number("num_layers", 0), heads_there = run.number("num_heads", 0);
  if (!(layers_there >= 1 && heads_there >= 1 && layers_there * heads_there <= most_heads_drawn)) return "";
  const int layers = int(layers_there), heads = int(heads_there);
  try {
    const Wiring wiring = parse_wiring(string_in(run.description, "wiring"));
    validate(wiring, layers, heads);
    return "<p><code>" + html(wiring.text) + "</code></p>\n" + wiring_picture(wiring, layers, heads, id);
  } catch (const UserError&) { return ""; }
}

// Shaded by `share`, 0 to 1. report.css has the colour.
std::string shaded(double share, const std::string& title, const std::string& text) {
  return format("<span style=\"--share:%.3f\" title=\"", share) + html(title) + "\">" + html(text) + "</span>";
}

// A sample's tokens, shaded by their N + R, and a line that says what the shades mean.
std::string shaded_sample(const Sample& sample) {
  const auto [least, most] = std::minmax_element(sample.ponder.begin(), sample.ponder.end());
  const double range = std::max(*most - *least, 1e-9);
  std::string text = "<p class=\"quiet shaded\">Tokens are shaded by how many cycles they run, N + R: from " +
                     shaded(0, "the fewest", format("%.3f", *least)) + " to " +
                     shaded(1, "the most", format("%.3f", *most)) + "; the last one has not run.</p>\n" +
                     "<pre class=\"shaded\">";
  for (size_t i = 0; i < sample.ponder.size(); i++)
    text += shaded((sample.ponder[i] - *least) / range, format("N + R %.3f", sample.ponder[i]), sample.tokens[i]);
  return text + html(sample.tokens.back()) + "</pre>\n";
}

std::string samples(const RunHistory& run) {
  std::string text;
  for (size_t i = run.samples.size(), n = 0; i-- > 0 && n < 3; n++) {
    const Sample& sample = run.samples[i];
    text += format("<p class=\"quiet\">after step %lld</p>\n", (long long)sample.step) +
            (n == 0 && !sample.ponder.empty() ? shaded_sample(sample) : "<pre>" + html(sample.text) + "</pre>\n");
  }
  return text;
}

std::string machine(const RunHistory& run) {
  std::string rows;
  auto add = [&](const char* what, const std::string& value) {
    if (!value.empty()) rows += row({what, html(value)});
  };
  add("device", string_in(run.description, "device"));
  add("weights and activations", string_in(run.description, "precision"));
  for (const auto& [key, what] :
       {std::pair("host", "host"), {"cpu", "CPU"}, {"processors", "processors"}, {"ranks", "ranks"}})
    add(what, string_in(run.process, key));
  if (run.process.contains("gemm_peak") && run.process["gemm_peak"].is_number())
    add("GEMM rate measured at the start",
        format("%.0f GFLOP/s a rank", run.process["gemm_peak"].get<double>() * 1e-9));
  return rows.empty() ? "" : "<table class=\"left\">\n" + rows + "</table>\n";
}

}  // namespace

std::string report_page(const RunHistory& run) {
  return page(folder_name(run.name),
              "<h1>" + html(folder_name(run.name)) + "</h1>\n<p class=\"quiet\">" +
                  html(format("%g layers, %g heads, %g channels, T = %g", run.number("num_layers", 0),
                              run.number("num_heads", 0), run.number("channels", 0), run.number("seq_len", 0))) +
                  "</p>\n" + notices(run) + facts(run) + axes + chart_places +
                  section("Wiring", picture_of(run, "wiring")) + section("Memory", memory_table(run)) +
                  section("Last samples", samples(run)) + section("Machine", machine(run)) +
                  section("Options", run.options.empty() ? "" : "<pre>" + html(run.options) + "</pre>\n"),
              charts_of(run));
}

// ----------------------------------------------------------------------------
// Several runs

namespace {

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

// Of what all of the runs say: an older version of this program wrote less down.
nlohmann::json key_of(const RunHistory& run, const std::vector<RunHistory>& runs) {
  nlohmann::json key;
  for (const auto& [name, value] : run.description.items()) {
    const auto says_it = [&, n = name](const RunHistory& other) { return other.description.contains(n); };
    if (name != "seed" && derived_fields.count(name) == 0 && std::all_of(runs.begin(), runs.end(), says_it))
      key[name] = value;
  }
  return key;
}

// The wiring, and what else is not the same for all kinds.
std::string label_of(const Kind& kind, const std::vector<Kind>& kinds) {
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

// The kinds in the order of the runs, and of which kind each run is.
std::vector<Kind> kinds_of(const std::vector<RunHistory>& runs, std::vector<int>& kind_of_run) {
  std::vector<Kind> kinds;
  for (const RunHistory& run : runs) {
    const nlohmann::json key = key_of(run, runs);
    auto it = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) { return kind.key == key; });
    if (it == kinds.end())
      it = kinds.insert(kinds.end(), {key,
                                      "",
                                      {},
                                      {},
                                      run.number("kv_bytes_per_token", NAN),
                                      {},
                                      {},
                                      run.number("flops_per_token", NAN)});
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
  return kinds;
}

// The last part of each path, or the paths where those are not different.
std::vector<std::string> names_of(const std::vector<RunHistory>& runs) {
  std::vector<std::string> names;
  for (const RunHistory& run : runs) names.push_back(folder_name(run.name));
  if (std::set<std::string>(names.begin(), names.end()).size() == names.size()) return names;
  for (size_t i = 0; i < runs.size(); i++) names[i] = runs[i].name;
  return names;
}

std::string final_losses(const std::vector<RunHistory>& runs, const std::vector<std::string>& names,
                         const std::vector<int>& kind_of_run) {
  const bool has_ponder =
      std::any_of(runs.begin(), runs.end(), [](const RunHistory& run) { return std::isfinite(run.final_ponder()); });
  std::vector<std::string> head = {"run",           "wiring",          "seed",
                                   "steps",         "tokens",          "training",
                                   "tokens/s",      "parameters",      "K/V a token",
                                   "FLOPs a token", "validation loss", "difference to the first"};
  const bool has_accuracy =
      std::any_of(runs.begin(), runs.end(), [](const RunHistory& run) { return std::isfinite(run.final_accuracy()); });
  if (has_ponder) head.push_back("cycles of a token, N + R");
  if (has_accuracy) head.push_back("accuracy");
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
    if (has_ponder) cells.push_back(loss_text(run.final_ponder()));
    if (has_accuracy) cells.push_back(percent_text(run.final_accuracy()));
    rows += row(cells);
  }
  return "<div class=\"wide\"><table class=\"runs\">\n" + rows + "</table></div>\n";
}

// In words, what a difference to the first kind shows.
std::string verdict(const Estimate& difference, size_t pairs) {
  if (!std::isfinite(difference.interval)) return "one pair shows nothing about other seeds";
  if (std::fabs(difference.mean) > difference.interval) return difference.mean < 0 ? "lower" : "higher";
  const int needed = pairs_needed(difference.mean, difference.deviation);
  return "no difference is shown: 0 lies in the interval" +
         (needed > int(pairs) ? format("; if it is as large as it looks, it takes %d seeds", needed) : std::string());
}

// What it would take to see differences of some sizes, up to the largest that the paper found, if all vary from seed to
// seed as these do.
std::string seeds_for(double squares, int freedom) {
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

// Means over seeds; nothing if no kind has two. `published`: of some kinds, by their number, the difference that a
// publication found.
std::string over_seeds(const std::vector<Kind>& kinds, const std::map<int, std::string>& published = {}) {
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
         "that of the paired t-test. "
         "Speeds are medians, over steps and then over runs. Only runs that are finished count.</p>\n<div "
         "class=\"wide\"><table class=\"seeds\">\n" +
         rows + "</table></div>\n" + seeds_for(squares, freedom);
}

// The loss at the positions of `range` in the run of a kind with this seed; NaN where it has not been measured.
double loss_at(const Kind& kind, int64_t seed, const PositionRange& range) {
  const auto run = kind.positions.find(seed);
  if (run == kind.positions.end()) return NAN;
  for (const PositionRange& r : run->second)
    if (r.first == range.first && r.last == range.last) return r.loss;
  return NAN;
}

// Means over seeds of the losses by position; with `first`, of the differences to those of its runs with the same seed.
std::vector<PositionRange> mean_by_position(const Kind& kind, const Kind* first) {
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

// runs_of_page: how many runs the page has curves of, that all together are below 2 MB.
json comparison_charts(const std::vector<RunHistory>& runs, const std::vector<std::string>& names,
                       const std::vector<Kind>& kinds, const std::vector<int>& kind_of_run, size_t runs_of_page) {
  const size_t buckets = std::clamp<size_t>(6000 / runs_of_page, 50, buckets_of_a_run);
  std::vector<json> val, accuracy, train, scatter(kinds.size());
  for (size_t i = 0; i < runs.size(); i++) {
    const RunHistory& run = runs[i];
    const std::vector<double> smooth = smoothed(run, &TrainPoint::loss);
    const int colour = kind_of_run[i];
    val.push_back(styled(series(run, run.validations, buckets, [&](size_t j) { return run.validations[j].loss; }),
                         names[i], colour, "points"));
    accuracy.push_back(
        styled(series(run, run.validations, buckets, [&](size_t j) { return run.validations[j].accuracy; }), names[i],
               colour, "points"));
    train.push_back(
        styled(series(run, run.steps, buckets, [&](size_t j) { return smooth[j]; }), names[i], colour, "line"));
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

}  // namespace

std::string comparison_page(const std::vector<RunHistory>& runs) {
  CHECK(!runs.empty());
  std::vector<int> kind_of_run;
  const std::vector<std::string> names = names_of(runs);
  const std::vector<Kind> kinds = kinds_of(runs, kind_of_run);
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
                  section("Over seeds", over_seeds(kinds)) + "<h2>Curves</h2>\n" + axes + chart_places +
                  section("Final losses", final_losses(runs, names, kind_of_run)) +
                  section("Wirings", pictures.empty() ? "" : "<div class=\"wirings\">" + pictures + "</div>\n"),
              comparison_charts(runs, names, kinds, kind_of_run, runs.size()));
}

// ----------------------------------------------------------------------------
// Sections

std::vector<ReportSection> read_outline(const std::string& path) {
  std::vector<ReportSection> sections;
  int number = 0;
  for (const std::string& line : lines_of(read_whole_file(path))) {
    number++;
    if (line.empty()) continue;
    if (line.compare(0, 2, "# ") == 0) {
      sections.push_back({line.substr(2), {}, {}});
      continue;
    }
    if (sections.empty()) user_error("%s:%d: a title, `# TITLE`, must come first", path.c_str(), number);
    ReportSection& section = sections.back();
    if (line.compare(0, 4, "run ") == 0) {
      section.folders.push_back(line.substr(4));
    } else if (line.compare(0, 10, "published ") == 0) {
      if (section.folders.empty())
        user_error("%s:%d: `published` says something of the run before it, and there is "
                   "none in this section",
                   path.c_str(), number);
      section.published[section.folders.back()] = line.substr(10);
    } else if (line.compare(0, 6, "level ") == 0) {
      int end = 0;
      if (sscanf(line.c_str(), "level %" SCNd64 " of %n", &section.level, &end) != 1 || end == 0)
        user_error("%s:%d: `%s`: it is `level NUMBER of TASK`", path.c_str(), number, line.c_str());
      section.task = line.substr(size_t(end));
    } else if (line.compare(0, 7, "chance ") == 0) {
      char rest;
      if (sscanf(line.c_str(), "chance %lf%c", &section.chance, &rest) != 1 || !(section.chance >= 0) ||
          section.chance > 1)
        user_error("%s:%d: `%s`: it is `chance SHARE`, a number from 0 to 1", path.c_str(), number, line.c_str());
    } else {
      section.paragraphs.push_back(line);
    }
  }
  return sections;
}

// ----------------------------------------------------------------------------
// Accuracies, a wiring a row and a section a column

namespace {

struct Column {
  std::string title;
  std::vector<Kind> kinds;
  std::string task;  // of which it is a level; empty: of none
  int64_t level;
  double chance;  // NaN: not known

  // Null if the wiring has no run.
  const Kind* kind(const std::string& wiring) const {
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& k) { return k.label == wiring; });
    return found == kinds.end() ? nullptr : &*found;
  }
};

double flops_at(const Kind& kind, const ValPoint& point) { return kind.flops_per_token * point.tokens; }

// The least FLOPs that a finished run of the column's took; NaN if there is none.
double least_flops(const Column& column) {
  double least = NAN;
  for (const Kind& kind : column.kinds)
    for (const auto& [seed, points] : kind.validations)
      if (!points.empty()) least = std::fmin(least, flops_at(kind, points.back()));
  return least;
}

// The accuracy of the last validation that took no more than `flops`, of each seed.
std::vector<double> accuracies_at(const Kind& kind, double flops) {
  std::vector<double> found;
  for (const auto& [seed, points] : kind.validations) {
    double accuracy = NAN;
    for (const ValPoint& point : points)
      if (flops_at(kind, point) <= flops) accuracy = point.accuracy;
    if (std::isfinite(accuracy)) found.push_back(accuracy);
  }
  return found;
}

std::string share_cell(const std::vector<double>& accuracies) {
  if (accuracies.empty()) return "<td>-</td>";
  const Estimate e = estimate(accuracies);
  return format("<td style=\"--share:%.3f\">%.1f", e.mean, 100 * e.mean) +
         (std::isfinite(e.interval) ? format(" &#177; %.1f", 100 * e.interval) : "") + "</td>";
}

constexpr double solved = 0.99;

// The mean of the steps of each seed's first validation above 0.99, its 95 % interval, and how many seeds have one if
// not all.
std::string solved_cell(const Kind& kind) {
  std::vector<double> steps;
  for (const auto& [seed, points] : kind.validations)
    for (const ValPoint& point : points)
      if (point.accuracy > solved) {
        steps.push_back(double(point.step));
        break;
      }
  if (steps.empty()) return "<td>-</td>";
  const Estimate e = estimate(steps);
  return "<td>" + format("%.0f", e.mean) + (std::isfinite(e.interval) ? format(" &#177; %.0f", e.interval) : "") +
         (steps.size() < kind.validations.size() ? format(" (%zu of %zu)", steps.size(), kind.validations.size())
                                                 : "") +
         "</td>";
}

// The hardest level of `task` that all seeds solve, and the hardest of all if some seeds only solve it.
std::string hardest_cell(const std::vector<Column>& columns, const std::string& task, const std::string& wiring) {
  int64_t by_all = -1, by_some = -1;
  std::string seeds;  // that solve `by_some`
  for (const Column& column : columns) {
    const Kind* kind = column.task == task ? column.kind(wiring) : nullptr;
    if (kind == nullptr) continue;
    const std::vector<double> accuracies = accuracies_at(*kind, INFINITY);
    const auto count = size_t(std::count_if(accuracies.begin(), accuracies.end(), [](double a) { return a > solved; }));
    if (count == 0) continue;
    if (count == accuracies.size()) by_all = std::max(by_all, column.level);
    if (column.level > by_some) {
      by_some = column.level;
      seeds = format("%zu of %zu", count, accuracies.size());
    }
  }
  if (by_some < 0) return "<td>none</td>";
  const std::string partly = format("%" PRId64 " (%s)", by_some, seeds.c_str());
  if (by_all < 0) return "<td>" + partly + "</td>";
  return "<td>" + format("%" PRId64, by_all) + (by_some > by_all ? ", " + partly : "") + "</td>";
}

// All wirings of the columns, each once.
std::vector<std::string> wirings_of(const std::vector<Column>& columns) {
  std::vector<std::string> wirings;
  for (const Column& column : columns)
    for (const Kind& kind : column.kinds)
      if (std::find(wirings.begin(), wirings.end(), kind.label) == wirings.end()) wirings.push_back(kind.label);
  return wirings;
}

// A table of wirings x `titles`, with `last_row` below them.
std::string map_of(const std::vector<std::string>& wirings, const std::vector<std::string>& titles,
                   const std::function<std::string(size_t column, const std::string& wiring)>& cell,
                   const std::string& last_row = "") {
  std::vector<std::string> head = {"wiring"};
  for (const std::string& title : titles) head.push_back(html(title));
  std::string rows = row(head, "th");
  for (const std::string& wiring : wirings) {
    rows += "<tr><td>" + html(wiring) + "</td>";
    for (size_t column = 0; column < titles.size(); column++) rows += cell(column, wiring);
    rows += "</tr>\n";
  }
  return "<div class=\"wide\"><table class=\"heat\">\n" + rows + last_row + "</table></div>\n";
}

std::string map_of(const std::vector<Column>& columns,
                   const std::function<std::string(const Column&, const Kind&)>& cell,
                   const std::string& last_row = "") {
  std::vector<std::string> titles;
  for (const Column& column : columns) titles.push_back(column.title);
  const auto cell_of = [&](size_t column, const std::string& wiring) {
    const Kind* kind = columns[column].kind(wiring);
    return kind == nullptr ? "<td>-</td>" : cell(columns[column], *kind);
  };
  return map_of(wirings_of(columns), titles, cell_of, last_row);
}

// The row of what a guess gets right in each column; empty if no column says it.
std::string chance_row(const std::vector<Column>& columns) {
  std::string cells;
  bool is_known = false;
  for (const Column& column : columns) {
    is_known |= std::isfinite(column.chance);
    cells += std::isfinite(column.chance) ? share_cell({column.chance}) : "<td>-</td>";
  }
  return is_known ? "<tr><td>chance</td>" + cells + "</tr>\n" : "";
}

// Empty if no section is a level of a task.
std::string hardest_map(const std::vector<Column>& columns) {
  std::vector<std::string> tasks, titles;
  for (const Column& column : columns) {
    if (column.task.empty()) continue;
    const auto found = std::find(tasks.begin(), tasks.end(), column.task);
    const std::string level = format(" %" PRId64, column.level);
    if (found == tasks.end()) {
      tasks.push_back(column.task), titles.push_back(column.task + level);
    } else {
      titles[size_t(found - tasks.begin())] += "," + level;
    }
  }
  if (tasks.empty()) return "";
  return "<h2>Hardest level solved</h2>\n<p>Of the levels that a column's title names, the hardest with an accuracy "
         "above 99 % after the last update, with all seeds; in parentheses how many of the seeds, if not all.</p>\n" +
         map_of(wirings_of(columns), titles,
                [&](size_t column, const std::string& wiring) { return hardest_cell(columns, tasks[column], wiring); });
}

std::string accuracy_maps(const std::vector<Column>& columns) {
  const auto has_accuracy = [](const Column& column) {
    return std::any_of(column.kinds.begin(), column.kinds.end(),
                       [](const Kind& kind) { return !accuracies_at(kind, INFINITY).empty(); });
  };
  if (std::none_of(columns.begin(), columns.end(), has_accuracy)) return "";
  const std::string chance = chance_row(columns);
  return "<h2>Accuracy after the last update</h2>\n<p>Percent of the scored tokens of validation; means over seeds "
         "with 95 % intervals. Only runs that are finished count.</p>\n" +
         map_of(
             columns, [](const Column&, const Kind& kind) { return share_cell(accuracies_at(kind, INFINITY)); },
             chance) +
         "<h2>Accuracy at equal FLOPs</h2>\n<p>Of each run's last validation that took no more FLOPs than the "
         "column's cheapest run takes in all.</p>\n" +
         map_of(
             columns,
             [](const Column& column, const Kind& kind) {
               return share_cell(accuracies_at(kind, least_flops(column)));
             },
             chance) +
         "<h2>Updates until solved</h2>\n<p>The step of the first validation with an accuracy above 99 %, the mean of "
         "the seeds that have one, with 95 % intervals.</p>\n" +
         map_of(columns, [](const Column&, const Kind& kind) { return solved_cell(kind); }) + hardest_map(columns);
}

}  // namespace

std::string sections_page(const std::string& title, const std::vector<ReportSection>& sections) {
  std::string body;
  std::vector<Column> columns;
  json charts = json::array();
  std::map<std::string, RunHistory> all;  // by folder: sections share runs
  size_t runs_of_page = 0;
  for (const ReportSection& s : sections) runs_of_page += s.folders.size();
  for (size_t i = 0; i < sections.size(); i++) {
    std::vector<RunHistory> runs;
    std::vector<std::string> folders;  // of `runs`
    for (const std::string& folder : sections[i].folders) {
      if (!path_exists(folder + "/log.jsonl")) continue;
      if (all.count(folder) == 0) all[folder] = read_run(folder);
      runs.push_back(all[folder]), folders.push_back(folder);
    }
    body += "<h2>" + html(sections[i].title) + "</h2>\n";
    for (const std::string& paragraph : sections[i].paragraphs) body += "<p>" + html(paragraph) + "</p>\n";
    if (runs.empty()) {
      body += sections[i].folders.empty() ? "" : "<p class=\"warn\">None of these runs has begun.</p>\n";
      continue;
    }
    std::vector<int> kind_of_run;
    const std::vector<std::string> names = names_of(runs);
    const std::vector<Kind> kinds = kinds_of(runs, kind_of_run);
    columns.push_back({sections[i].title, kinds, sections[i].task, sections[i].level, sections[i].chance});
    for (const RunHistory& run : runs) body += notices(run);
    std::map<int, std::string> published;  // by kind
    for (size_t run = 0; run < runs.size(); run++) {
      const auto found = sections[i].published.find(folders[run]);
      if (found != sections[i].published.end()) published[kind_of_run[run]] = found->second;
    }
    const std::string over = over_seeds(kinds, published);
    body += (over.empty() ? final_losses(runs, names, kind_of_run) : over) +
            format("<div class=\"charts\" id=\"charts-%zu\"></div>\n", i);
    for (json& chart : comparison_charts(runs, names, kinds, kind_of_run, runs_of_page)) {
      chart["place"] = format("charts-%zu", i);
      charts.push_back(std::move(chart));
    }
  }
  return page(title, "<h1>" + html(title) + "</h1>\n" + accuracy_maps(columns) + axes + body, charts);
}
