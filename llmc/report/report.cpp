#include "report.h"
#include <algorithm>
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/config_json.h"
#include "llmc/train/print.h"
#include "llmc/base/error.h"
#include "learned_sources.h"
#include "parts.h"

using namespace report;

namespace {

// Each step's value, and, of a run long enough to have one, its mean over a hundredth of the run.
std::vector<json> noisy(const RunHistory& run, double TrainPoint::*what, const std::string& name, int colour) {
  const json all = series(run, run.steps, what);
  if (smoothing_steps(run) == 1) return {styled(all, name, colour, "line")};
  return {styled(all, name, colour, "faint"),
          styled(series(run, run.steps, smoothed(run, what)),
                 name + format(", mean of %zu steps", smoothing_steps(run)), colour, "line")};
}

json charts_of(const RunHistory& run) {
  json charts = json::array();
  std::vector<json> losses = noisy(run, &TrainPoint::loss, "training", 0);
  const json val = series(run, run.validations, &ValPoint::loss);
  losses.push_back(styled(val, "validation", 1, "points"));
  add_chart(charts, "Loss", "nats per token", std::move(losses));
  const json right = series(run, run.validations, &ValPoint::accuracy);
  add_chart(charts, "Accuracy of validation", "share of scored tokens", {styled(right, "validation", 1, "points")});
  add_chart(charts, "Cycles that tokens run: N + R", "mean over tokens", noisy(run, &TrainPoint::ponder, "N + R", 5));
  add_chart(charts, "Norm of the gradient", "norm", noisy(run, &TrainPoint::grad_norm, "norm", 3));
  const json rate = series(run, run.steps, &TrainPoint::learning_rate);
  add_chart(charts, "Learning rate", "learning rate", {styled(rate, "learning rate", 2, "line")});
  add_chart(charts, "Speed", "tokens/s", noisy(run, &TrainPoint::tokens_per_second, "tokens/s", 0));
  add_chart(charts, "Share of the limit: matmuls and copies at the rates measured at the start", "share",
            noisy(run, &TrainPoint::limit_share, "share", 4));
  add_position_chart(charts, "Loss by position", {styled(by_position(run.positions), "loss", 1, "points")});
  if (!run.positions.empty() && run.positions[0].ponder > 0)
    add_position_chart(charts, "Cycles that tokens run, by position",
                       {styled(by_position(run.positions, &PositionRange::ponder), "N + R", 5, "points")},
                       "mean of N + R");
  return charts;
}

std::string facts(const RunHistory& run) {
  const double last = run.steps.empty() ? NAN : smoothed(run, &TrainPoint::loss).back(),
               rate = run.tokens() / run.seconds();
  const double kv = run.number("kv_bytes_per_token", NAN), flops = run.number("flops_per_token", NAN),
               bits = run.final(&ValPoint::bits_per_byte);
  return "<div class=\"facts\">\n" +
         fact("steps", format("%lld of %lld", (long long)run.last_step(), (long long)run.planned_steps())) +
         fact("validation loss", loss_text(run.final_loss())) +
         fact("bits per byte", std::isfinite(bits) ? loss_text(bits) : "") +
         fact("training loss, mean", loss_text(last)) + fact("tokens", count_text(run.tokens())) +
         fact("training time", std::isfinite(run.seconds()) ? time_text(run.seconds()) : "") +
         fact("tokens/s", std::isfinite(rate) ? count_text(rate) : "") +
         fact("parameters", count_text(run.number("num_parameters", 0))) +
         fact("a token's FLOPs", std::isfinite(flops) ? count_text(flops) : "") +
         fact("a token's K/V", std::isfinite(kv) ? count_text(kv) + " bytes" : "") + "</div>\n";
}

std::string memory_table(const RunHistory& run) {
  const auto memory = run.description.find("memory");
  if (memory == run.description.end() || !memory->is_object()) return "";
  const auto is_beside = [](const std::string& name) { return ends_with(name, ", of host memory"); };  // a GPU's
  double most = 1, sum = 0;
  for (const auto& [name, bytes] : memory->items())
    if (bytes.is_number() && !is_beside(name)) most = std::max(most, bytes.get<double>()), sum += bytes.get<double>();
  std::string rows;
  for (const auto& [name, bytes] : memory->items()) {
    if (!bytes.is_number()) continue;
    const double b = bytes.get<double>();
    const std::string share = format("%.1f %%", 100 * b / std::max(sum, 1.0)),
                      bar = format("<span class=\"bar\" style=\"width:%.0fpx\"></span>", 300 * b / most);
    rows += row({html(name), bytes_text(b), is_beside(name) ? "" : share, is_beside(name) ? "" : bar});
  }
  return "<table class=\"left\">\n" + rows + row({"total", bytes_text(sum), "", ""}) + "</table>\n";
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

// Maps of what `router` and `dense` have learned by the run's newest checkpoint, and the wirings that come nearest to
// the router. A checkpoint that cannot be read is said in their place: a run that trains may have removed it meanwhile.
std::string learned_sources(const RunHistory& run) {
  const std::optional<DescribedWiring> w = wiring_of(run);
  if (!w) return "";
  const WiringTable table = wiring_table(w->wiring, w->num_layers, w->num_heads);
  if (!table.router && !table.dense) return "";
  try {
    const std::string checkpoint = newest_checkpoint(run.name);
    if (checkpoint.empty()) return "";
    const ModelConfig config = read_config_json(checkpoint);
    const LearnedSources sources = read_learned_sources(checkpoint, config);
    std::string rows;
    for (const NearWiring& near : nearest_wirings(sources, config.wiring, config.num_heads))
      rows += row({"<code>" + html(near.text) + "</code>", percent_text(near.share)});
    return learned_sources_picture(sources) +
           (rows.empty() ? ""
                         : "<table class=\"left\">\n" + row({"wiring without router", near_share_name}, "th") + rows +
                               "</table>\n");
  } catch (const UserError& e) { return warning_lines({e.what()}); }
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
                  section("Wiring", picture_of(run, "wiring")) + section("Learned sources", learned_sources(run)) +
                  section("Memory", memory_table(run)) + section("Last samples", samples(run)) +
                  section("Machine", machine(run)) +
                  section("Options", run.options.empty() ? "" : "<pre>" + html(run.options) + "</pre>\n"),
              charts_of(run));
}
