#include "parts.h"
#include <filesystem>
#include "llmc/base/embed.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/number.h"
#include "llmc/base/utf8.h"
#include "wiring_picture.h"

EMBED(sla_report_css, "llmc/report/report.css");
EMBED(sla_report_js, "llmc/report/report.js");
// The chart library and its licence are the package's, copied by the Makefile; they are empty where there is none.
EMBED(sla_chart_js, "chart.js");
EMBED(sla_chart_licence, "chart_licence.txt");

namespace report {

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
static std::string json_in_script(const json& value) {
  std::string text;
  for (char c : dump_json(value)) text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return text;
}

// A script that no "</script" inside of its texts ends.
static std::string script(const std::string& code) {
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

json rounded(double x) { return std::isfinite(x) ? json(parse_number<double>(format("%.6g", x))) : json(nullptr); }

json styled(json s, const std::string& name, int colour, const char* style) {
  s["name"] = printable(name, /*one_line=*/true), s["colour"] = colour, s["style"] = style;
  return s;
}

std::vector<double> smoothed(const RunHistory& run, double TrainPoint::*what) {
  const size_t window = smoothing_steps(run);
  std::vector<double> smooth;
  double sum = 0, lost = 0;  // by rounding (Neumaier): a norm of 1e20 leaves the window again
  size_t count = 0;
  auto add = [&](double value, int sign) {
    if (!std::isfinite(value)) return;
    const double x = sign * value, before = sum;
    sum += x, count += size_t(sign);
    lost += std::abs(before) >= std::abs(x) ? (before - sum) + x : (x - sum) + before;
  };
  for (size_t i = 0; i < run.steps.size(); i++) {
    add(run.steps[i].*what, 1);
    if (i >= window) add(run.steps[i - window].*what, -1);
    const bool has_mean = count > 0 && (std::isfinite(run.steps[i].*what) || !run.steps[i].is_scored);
    smooth.push_back(has_mean ? (sum + lost) / double(count) : NAN);
  }
  return smooth;
}

static bool any_finite(const json& s) {
  return std::any_of(s["y"].begin(), s["y"].end(), [](const json& y) { return !y.is_null(); });
}

void add_chart(json& charts, const std::string& title, const std::string& y, std::vector<json> all,
               const std::string& x) {
  json chart = {{"title", title}, {"y", y}, {"place", "charts"}, {"series", json::array()}};
  if (!x.empty()) chart["x"] = x;
  for (json& s : all)
    if (any_finite(s)) chart["series"].push_back(std::move(s));
  if (!chart["series"].empty()) charts.push_back(std::move(chart));
}

json by_position(const std::vector<PositionRange>& positions, double PositionRange::*what) {
  json s = {{"x", json::array()}, {"y", json::array()}};
  for (const PositionRange& range : positions) {
    s["x"].push_back(std::round(std::sqrt(double(range.first) * double(range.last))));
    s["y"].push_back(rounded(range.*what));
  }
  return s;
}

void add_position_chart(json& charts, const std::string& title, std::vector<json> all, const char* y) {
  const size_t before = charts.size();
  add_chart(charts, title, y, std::move(all), "tokens before, in the context");
  if (charts.size() > before) charts.back()["logX"] = true;
}

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

std::string row(const std::vector<std::string>& cells, const char* tag) {
  std::string text = "<tr>";
  for (const std::string& cell : cells) text += format("<%s>", tag) + cell + format("</%s>", tag);
  return text + "</tr>\n";
}

std::string fact(const std::string& name, const std::string& value) {
  return value.empty() ? "" : "<div><span class=\"quiet\">" + html(name) + "</span><b>" + html(value) + "</b></div>\n";
}

std::string folder_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

std::string section(const std::string& title, const std::string& content) {
  return content.empty() ? "" : "<h2>" + title + "</h2>\n" + content;
}

// What a process that resumed the run was told otherwise than the one before; "" if nothing.
static std::string changes(const json& before, const json& now) {
  std::string text;
  for (const auto& [key, value] : now.items()) {
    const auto it = before.find(key);
    if (derived_fields.count(key) == 0 && it != before.end() && *it != value)
      text += (text.empty() ? "" : "; ") + key + " " + string_in(now, key.c_str()) + ", before " +
              string_in(before, key.c_str());
  }
  return text;
}

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
  if (run.lacks_validation())
    lines.push_back("the validation after its last step is missing, and with it the final loss");
  if (!run.is_finished())
    lines.push_back(
        format("not finished: %lld of %lld steps", (long long)run.last_step(), (long long)run.planned_steps()));
  for (std::string& line : lines) line = folder_name(run.name) + ": " + line + ".";
  return warning_lines(lines);
}

std::string warning_lines(const std::vector<std::string>& lines) {
  constexpr size_t most = 20;
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), most); i++) text += "<p class=\"warn\">" + html(lines[i]) + "</p>\n";
  return text + (lines.size() > most ? format("<p class=\"warn\">%zu lines more</p>\n", lines.size() - most) : "");
}

std::optional<DescribedWiring> wiring_of(const RunHistory& run) {
  constexpr double most = 4096, most_drawn = 20000;  // layers, or heads of one; and attentions, a picture of some MB
  const double layers = run.number("num_layers", 0), heads = run.number("num_heads", 0);
  const auto is_count = [](double n) { return n >= 1 && n <= most && n == std::floor(n); };
  if (!is_count(layers) || !is_count(heads)) return {};
  try {
    const DescribedWiring w = {parse_wiring(string_in(run.description, "wiring")), int(layers), int(heads)};
    if (most_attentions(w.wiring, w.num_layers, w.num_heads) > most_drawn) return {};
    validate(w.wiring, w.num_layers, w.num_heads);
    return w;
  } catch (const UserError&) { return {}; }
}

std::string picture_of(const RunHistory& run, const std::string& id) {
  const std::optional<DescribedWiring> w = wiring_of(run);
  if (!w) return "";
  return "<p><code>" + html(with_short_names(w->wiring.text)) + "</code></p>\n" +
         wiring_picture(w->wiring, w->num_layers, w->num_heads, id);
}

}  // namespace report
