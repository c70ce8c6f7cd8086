#include "run_history.h"
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/text.h"
#include "settings.h"

using json = nlohmann::ordered_json;

static double number_in(const json& object, const char* key, double otherwise = NAN) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<double>() : otherwise;
}

const json& RunHistory::description_of(int64_t step) const {
  const json* found = parts.empty() ? &description : &parts[0].description;
  for (const RunPart& part : parts)
    if (part.step < step) found = &part.description;
  return *found;
}

double RunHistory::number(const char* key, double otherwise) const { return number_in(description, key, otherwise); }

std::vector<int64_t> RunHistory::steps_not_finite() const {
  std::vector<int64_t> found;
  for (const TrainPoint& p : steps)
    if ((p.is_scored && !std::isfinite(p.loss)) || !std::isfinite(p.grad_norm)) found.push_back(p.step);
  return found;
}

// Drops what a process before a resume did from `step` on.
template <class Point>
static int64_t drop_from(std::vector<Point>& points, int64_t step) {
  int64_t dropped = 0;
  while (!points.empty() && points.back().step >= step) points.pop_back(), dropped++;
  return dropped;
}

static void take_process(RunHistory& run, const json& process) {
  if (process.is_object()) run.process = process;
}

static void add_step(RunHistory& run, const json& line, int64_t step) {
  run.num_repeated += drop_from(run.steps, step);
  drop_from(run.validations, step);
  drop_from(run.samples, step);
  const double rate = number_in(line, "tokens_per_second");
  const double share = number_in(line, "limit_ms") / number_in(line, "ms");
  const bool is_scored = number_in(line, "scored_tokens", 1) > 0;
  run.steps.push_back({step, is_scored ? number_in(line, "loss") : NAN, number_in(line, "grad_norm"),
                       number_in(line, "lr"), number_in(line, "ms") * 1e-3, rate, share, 0, 0,
                       number_in(line, "ponder"), is_scored});
}

// Takes over what a sample's tokens ponder, unless it is incomplete.
static void add_ponder(Sample& sample, const json& line) {
  const auto tokens = line.find("tokens"), ponder = line.find("ponder");
  if (tokens == line.end() || ponder == line.end()) return;
  try {
    const auto texts = tokens->get<std::vector<std::string>>();
    const auto numbers = ponder->get<std::vector<double>>();
    if (numbers.empty() || texts.size() != numbers.size() + 1) return;
    sample.tokens = texts, sample.ponder = numbers;
  } catch (const json::exception&) {}
}

// Adds what an older version of this program did not write down. If somebody has shortened a description, so that it
// has no learning rate, nothing more is known.
static void complete(json& description) {
  if (!description.contains("learning_rate")) return;
  double tokens = 1;
  for (const char* factor : {"micro_batch", "seq_len", "grad_accum_steps", "ranks"})
    tokens *= number_in(description, factor);
  if (tokens >= 1 && tokens < 1e15) description.emplace("total_batch", int64_t(tokens));
  for (const auto& [key, value] : default_settings())
    std::visit([&, k = key](const auto& scalar) { description.emplace(k, scalar); }, value);
}

// Takes over a line of the log; returns false if it is none.
static bool add_line(RunHistory& run, const json& line) {
  if (!line.is_object()) return false;
  if (line.contains("run")) {
    if (!line["run"].is_object()) return false;
    run.description = line["run"];
    take_process(run, run.description.value("process", json()));
    run.description.erase("process");
    complete(run.description);
    run.parts.push_back({int64_t(number_in(line, "step", 0)), run.description});
    return true;
  }
  if (!line.contains("step") || !line["step"].is_number_integer()) return false;
  const int64_t step = line["step"].get<int64_t>();
  if (line.contains("loss")) {
    add_step(run, line, step);
  } else if (line.contains("val_loss")) {
    drop_from(run.validations, step);
    run.validations.push_back({step, number_in(line, "val_loss"), 0, 0, number_in(line, "val_ponder"),
                               number_in(line, "val_accuracy"), number_in(line, "val_scored_tokens", 1) > 0,
                               number_in(line, "val_bits_per_byte")});
  } else if (line.contains("sample") && line["sample"].is_string()) {
    drop_from(run.samples, step);
    run.samples.push_back({step, line["sample"].get<std::string>()});
    add_ponder(run.samples.back(), line);
  } else if (line.contains("checkpoint")) {
    run.has_saved = true;
  } else if (line.contains("process")) {
    take_process(run, line["process"]);
  }
  return true;
}

// Time and tokens up to each point. A step's tokens are its rate times its time, or, where the log has no times, the
// tokens per step that the description says.
static void add_up(RunHistory& run) {
  double tokens_per_step = 1;
  for (const char* factor : {"micro_batch", "seq_len", "grad_accum_steps", "ranks"})
    tokens_per_step *= run.number(factor, 1);
  double seconds = 0, tokens = 0;
  size_t next = 0;
  auto add_until = [&](int64_t step) {
    for (; next < run.steps.size() && run.steps[next].step <= step; next++) {
      TrainPoint& p = run.steps[next];
      const double timed = p.tokens_per_second * p.step_seconds;
      // Without times, steps that the log leaves out count as well, as in the logs of dev/figures.
      tokens = std::isfinite(timed) ? tokens + double(std::llround(timed)) : double(p.step) * tokens_per_step;
      seconds += p.step_seconds;
      p.seconds = seconds, p.tokens = tokens;
    }
  };
  for (ValPoint& p : run.validations) {
    add_until(p.step);
    p.seconds = seconds, p.tokens = tokens;
  }
  add_until(run.last_step());
}

std::vector<std::string> files_of_run(const std::string& out) {
  return {out + "/log.jsonl", out + "/config.toml", out + "/positions.csv"};
}

RunHistory read_run(const std::string& out, bool with_positions) {
  const std::vector<std::string> files = files_of_run(out);
  const std::optional<std::string> log = try_read_file(files[0], most_text_bytes);
  if (!log) user_error("%s: cannot be read: %s; name the folder of a run (-o)", files[0], strerror(errno));
  RunHistory run;
  run.name = without_end_slashes(out);
  run.description = run.process = json::object();
  run.options = try_read_file(files[1]).value_or("");
  if (const auto csv = with_positions ? try_read_file(files[2]) : std::nullopt)
    run.positions = ranges_of(parse_positions(files[2], *csv));
  size_t begin = 0;
  for (size_t end; (end = log->find('\n', begin)) != std::string::npos; begin = end + 1) {
    run.num_unreadable += !add_line(run, parse_json(std::string_view(*log).substr(begin, end - begin)));
  }
  run.ends_in_mid_line = begin < log->size();
  add_up(run);
  return run;
}
