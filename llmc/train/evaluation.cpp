#include "evaluation.h"
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include "llmc/formats/checkpoint.h"
#include "llmc/text/scored_text.h"
#include "llmc/base/command_line.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/text.h"

using nlohmann::ordered_json;

// ----------------------------------------------------------------------------
// Options

static void declare_options(CLI::App& app, EvaluateOptions& o) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("MODEL", o.model,
                 "a model's folder: a checkpoint, a run's folder for its newest one, or GPT-2 in Hugging Face's format")
      ->required();
  app.add_option("--wiring", o.wiring, other_wiring_help);
  app.add_option("FILE", o.files,
                 "files to evaluate, or quoted globs: text, llm.c's token shards, llm.c's multiple-choice questions, "
                 "or headerless uint16 tokens if the name ends in .bin")
      ->take_all()
      ->default_str("");
  app.add_option("--lambada", o.lambada,
                 "a file of JSON lines with the field \"text\", whose last word is to be predicted; may be "
                 "given several times")
      ->take_all()
      ->allow_extra_args(false)
      ->default_str("");
  app.add_flag("--serve", o.serve,
               "answer requests, a JSON object a line, from stdin to stdout (llmc/train/evaluation.h)");
  app.add_option("--context", o.context, "tokens that the model reads at most; 0: its context length");
  app.add_option("--stride", o.stride,
                 "texts are scored in windows of --context tokens that begin so many tokens apart; each token "
                 "is scored once, after at least context - stride tokens, or all there are; 0: the context, so that "
                 "windows do not overlap");
  app.add_option("--windows", o.windows, "score at most so many windows of each text, at even distances; 0: all");
  app.add_option("--slots", o.slots, "sequences that are computed at a time");
  app.add_option("--tokenizer", o.tokenizer,
                 "the vocabulary, in any format that data/tokenize takes; default: the one in the model's folder, or "
                 "beside the tokens; none: unknown, so that vocabularies are not compared");
  app.add_option("--json", o.json, "write the results to this file");
  app.add_option("--positions", o.positions,
                 "write the losses by position in the window to this file, as CSV; with `act` also the mean of N + R, "
                 "ponder");
  app.add_flag("-q,--quiet", o.quiet, "do not tell the progress and the speed");
}

bool parse_evaluate_options(int argc, char** argv, EvaluateOptions& o) {
  CLI::App app("Evaluates a trained model: perplexity and bits per byte of texts, multiple choice by likelihood, the "
               "last word of texts.\n"
               "Example: ./evaluate_gpt2_sla_cpu runs/gcide 'data/gcide/val_000000.bin' --stride "
               "128");
  declare_options(app, o);
  if (!parse_command_line(app, argc, argv)) return false;
  for (auto [option, value] : {std::pair("--context", o.context), {"--stride", o.stride}, {"--windows", o.windows}})
    if (value < 0) user_error("%s %lld: it cannot be negative", option, (long long)value);
  if (o.slots < 1 || o.slots > 4096) user_error("--slots %d: it must lie between 1 and 4096", o.slots);
  o.model = model_folder(o.model);
  const bool has_files = !o.files.empty() || !o.lambada.empty();
  if (has_files && o.serve) user_error("--serve takes no files");
  if (!has_files && !o.serve) user_error("name a file to evaluate, --lambada FILE or --serve");
  return true;
}

// ----------------------------------------------------------------------------
// Results

static constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

double TextResult::bits_per_byte() const { return bytes > 0 ? ::bits_per_byte(nats_of_bytes, double(bytes)) : unknown; }

static const char* name_of(ChoiceScore score) {
  static const char* names[] = {"acc", "acc_per_token", "acc_per_character", "acc_per_byte"};
  return names[int(score)];
}

// Accuracy, or `unknown`.
static double accuracy(const ChoiceResult& r, ChoiceScore score) {
  const bool needs_bytes = score == ChoiceScore::per_character || score == ChoiceScore::per_byte;
  return needs_bytes && !r.knows_bytes ? unknown : double(r.right[size_t(score)]) / double(r.questions);
}

// The sums over several texts. If one text's bytes are unknown, their bytes together are, too.
static TextResult total_of(const std::vector<TextResult>& texts) {
  TextResult total = {"all", 0, 0, true};
  for (const TextResult& t : texts) {
    total.tokens += t.tokens, total.nats += t.nats, total.pondered += t.pondered;
    total.correct += t.correct, total.has_mask = total.has_mask || t.has_mask;
    total.bytes += t.bytes, total.nats_of_bytes += t.nats_of_bytes;
    total.knows_bytes = total.knows_bytes && t.knows_bytes;
  }
  if (!total.knows_bytes) total.bytes = 0;
  return total;
}

static std::string number_or_dash(const char* fmt, double x) {
  char text[64];
  snprintf(text, sizeof text, fmt, x);
  return std::isfinite(x) ? text : "-";
}

static void print_texts(const EvaluationResults& r) {
  size_t width = 4;
  for (const TextResult& t : r.texts) width = std::max(width, t.file.size());
  const bool has_ponder = r.positions.has_ponder();
  auto ponder_cell = [&](double ponder) { return has_ponder ? format(" %9.5f", ponder) : ""; };
  const bool has_mask = total_of(r.texts).has_mask;
  auto print = [&](const TextResult& t) {
    const std::string accuracy = has_mask ? format(" %9.5f", t.accuracy()) : "";
    printf("%-*s %12lld %9.5f %11.3f %10s%s%s\n", int(width), t.file.c_str(), (long long)t.tokens, t.loss(),
           std::exp(t.loss()), number_or_dash("%.5f", t.bits_per_byte()).c_str(), accuracy.c_str(),
           ponder_cell(t.ponder()).c_str());
  };
  const char* ponder_head = has_ponder ? "    ponder" : "";
  printf("%-*s %12s %9s %11s %10s%s%s\n", int(width), "text", "tokens", "loss", "perplexity", "bits/byte",
         has_mask ? "  accuracy" : "", ponder_head);
  for (const TextResult& t : r.texts) print(t);
  if (r.texts.size() > 1) print(total_of(r.texts));
  printf("\n%-13s %12s %9s%s\n", "tokens before", "tokens", "loss", ponder_head);
  for (const PositionRange& range : ranges_of(r.positions)) {
    std::string name = std::to_string(range.first);
    if (range.last > range.first) name += "-" + std::to_string(range.last);
    printf("%-13s %12lld %9.5f%s\n", name.c_str(), (long long)range.tokens, range.loss,
           ponder_cell(range.ponder).c_str());
  }
}

void print_results(const EvaluationResults& r) {
  if (!r.texts.empty()) print_texts(r);
  if (!r.texts.empty() && !(r.choices.empty() && r.last_words.empty())) printf("\n");
  for (const ChoiceResult& c : r.choices) {
    printf("%s: %lld questions;", c.file.c_str(), (long long)c.questions);
    for (int s = 0; s < int(ChoiceScore::count); s++)
      printf("%s %s %s", s > 0 ? "," : "", name_of(ChoiceScore(s)),
             number_or_dash("%.4f", accuracy(c, ChoiceScore(s))).c_str());
    printf("%s\n", c.shortened > 0
                       ? format("; %lld answers after a context without its beginning", (long long)c.shortened).c_str()
                       : "");
  }
  for (const LastWordResult& w : r.last_words)
    printf("%s: %lld last words; acc %.4f, perplexity %.3f%s\n", w.file.c_str(), (long long)w.texts,
           double(w.right) / double(w.texts), std::exp(w.nats / double(w.texts)),
           w.shortened > 0 ? format("; %lld after a text without its beginning", (long long)w.shortened).c_str() : "");
}

static ordered_json number_or_null(double x) { return std::isfinite(x) ? ordered_json(x) : ordered_json(nullptr); }

static ordered_json json_of(const TextResult& t) {
  ordered_json json = {{"file", name_as_text(t.file)},
                       {"tokens", t.tokens},
                       {"bytes", t.knows_bytes ? ordered_json(t.bytes) : ordered_json(nullptr)},
                       {"loss", t.loss()},
                       {"perplexity", std::exp(t.loss())},
                       {"bits_per_byte", number_or_null(t.bits_per_byte())},
                       {"accuracy", t.accuracy()}};
  if (t.pondered > 0) json["ponder"] = t.ponder();
  return json;
}

static ordered_json json_of(const ChoiceResult& c) {
  ordered_json json = {{"file", name_as_text(c.file)}, {"questions", c.questions}, {"shortened", c.shortened}};
  for (int s = 0; s < int(ChoiceScore::count); s++)
    json[name_of(ChoiceScore(s))] = number_or_null(accuracy(c, ChoiceScore(s)));
  return json;
}

static ordered_json json_of(const LastWordResult& w) {
  return {{"file", name_as_text(w.file)},
          {"texts", w.texts},
          {"shortened", w.shortened},
          {"acc", double(w.right) / double(w.texts)},
          {"perplexity", std::exp(w.nats / double(w.texts))}};
}

std::string results_json(const EvaluationResults& r) {
  ordered_json json = {{"model", name_as_text(r.model)},
                       {"wiring", r.wiring},
                       {"context", r.context},
                       {"stride", r.stride}};
  for (const TextResult& t : r.texts) json["texts"].push_back(json_of(t));
  if (!r.texts.empty()) json["all_texts"] = json_of(total_of(r.texts));
  for (const ChoiceResult& c : r.choices) json["choices"].push_back(json_of(c));
  for (const LastWordResult& w : r.last_words) json["last_words"].push_back(json_of(w));
  for (const PositionRange& range : ranges_of(r.positions)) {
    json["positions"].push_back(
        {{"first", range.first}, {"last", range.last}, {"tokens", range.tokens}, {"loss", range.loss}});
    if (range.ponder > 0) json["positions"].back()["ponder"] = range.ponder;
  }
  return dump_json(json, 1) + "\n";
}

// ----------------------------------------------------------------------------
// JSON that is read

int64_t row_length_of(const std::string& folder) {
  const ordered_json manifest = parse_json(try_read_file(folder + "/MANIFEST.json").value_or(""));
  for (const char* key : {"/options/pack", "/seq_len"})
    if (const ordered_json::json_pointer place(key);
        manifest.is_object() && manifest.contains(place) && manifest[place].is_number_integer())
      return manifest[place];
  return 0;
}

std::vector<std::pair<std::string, std::string>> read_last_words(const std::string& path) {
  std::vector<std::pair<std::string, std::string>> texts;
  size_t number = 0;
  for (const std::string& line : lines_of(read_whole_file(path, most_text_bytes))) {
    number++;
    if (is_blank(line)) continue;
    const ordered_json json = parse_json_or_throw(line, format("%s: line %zu", path.c_str(), number));
    if (!json.is_object() || !json.contains("text") || !json["text"].is_string())
      user_error("%s: line %zu is no JSON object with a text in the field \"text\"", path, number);
    const std::string text = json["text"];
    const size_t space = text.rfind(' ');
    if (space == std::string::npos || space + 1 == text.size())
      user_error("%s: line %zu: \"%s\" has no last word after a space", path, number, printable(text));
    texts.push_back({text.substr(0, space), text.substr(space)});
  }
  if (texts.empty()) user_error("%s: has no line", path);
  return texts;
}

void of_item(size_t number, const std::string& text, const std::function<void()>& what) {
  try {
    what();
  } catch (const std::exception& e) {
    const std::string beginning = text.size() > 60 ? text.substr(0, 60) + "..." : text;
    user_error("item %zu (\"%s\"): %s", number + 1, printable(beginning, /*one_line=*/true), words_of(e));
  }
}

static GenerateRequest generate_request(const ordered_json& json) {
  GenerateRequest request;
  request.context = json.at("context");
  SampleOptions& o = request.options;
  o.stop = json.value("until", std::vector<std::string>());
  auto whole = [&](const char* name, int64_t otherwise, int64_t least = 0) {
    return json.contains(name) ? whole_number(json[name], name, least, 1 << 30) : otherwise;
  };
  o.tokens = whole("max_tokens", o.tokens, /*least=*/1);
  o.sampling.temperature = json.value("temperature", 0.0);
  o.sampling.top_k = int(whole("top_k", o.sampling.top_k));
  o.sampling.top_p = json.value("top_p", o.sampling.top_p);
  check_sampling(o);
  return request;
}

ServeRequest parse_serve_request(const std::string& line) {
  try {
    const ordered_json json = parse_json_or_throw(line);
    if (!json.is_object() || json.size() != 1) user_error("a request is a JSON object with one name");
    ServeRequest request;
    request.name = json.begin().key();
    const ordered_json& items = json.begin().value();
    if (!items.is_array()) user_error("%s: its value is no list", request.name);
    const bool of_pairs = request.name == "loglikelihood", of_texts = request.name == "loglikelihood_rolling";
    if (!of_pairs && !of_texts && request.name != "generate_until")
      user_error("%s: no such request; there are loglikelihood, loglikelihood_rolling and generate_until",
                 request.name);
    for (size_t i = 0; i < items.size(); i++)
      of_item(i, items[i].dump(), [&] {
        if (of_pairs) request.pairs.push_back(items[i]);
        else if (of_texts) request.texts.push_back(items[i]);
        else request.generate.push_back(generate_request(items[i]));
      });
    return request;
  } catch (const ordered_json::exception& e) { user_error("%s", words_of(e)); }
}

std::string serve_answer(const std::string& name, const ServeResults& results) {
  return std::visit([&](const auto& values) { return dump_json(ordered_json{{name, values}}); }, results);
}
std::string serve_error(const std::string& what) { return dump_json(ordered_json{{"error", what}}); }
