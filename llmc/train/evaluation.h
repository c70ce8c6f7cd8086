// What the program that evaluates is asked for, what it finds out, and how that is written.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include "position_losses.h"
#include "sampling.h"

struct EvaluateOptions {
  std::string model;                  // a folder
  std::optional<std::string> wiring;  // to read it as another one of the same weights
  std::vector<std::string> files;     // texts, token files, multiple-choice questions
  std::vector<std::string> lambada;
  bool serve = false;
  int64_t context = 0;  // tokens that the model reads at most; 0: its context length
  int64_t stride = 0;   // between the windows of a text; 0: the context
  int64_t windows = 0;  // how many windows of each text are scored, at most; 0: all
  int slots = 8;        // sequences at a time
  std::string tokenizer, json, positions;
  bool quiet = false;
};

// Fills `options`. Returns false if the program has nothing else to do (--help was printed). Throws UserError.
bool parse_evaluate_options(int argc, char** argv, EvaluateOptions& options);

// The result for a text or a token file. Bits per byte leave out tokens that stand for no text, which are ends of
// texts.
struct TextResult {
  std::string file;
  int64_t tokens = 0;        // scored
  double nats = 0;           // the sum of their losses
  bool knows_bytes = false;  // a vocabulary is known
  int64_t bytes = 0;         // of the tokens that stand for text
  double nats_of_bytes = 0;  // the sum of those tokens' losses
  int64_t correct = 0;       // scored tokens whose logit is the largest
  bool has_mask = false;     // some tokens may not be scored
  double pondered = 0;       // with `act` the sum of the cycles of the tokens before those that are scored

  double loss() const { return nats / double(tokens); }
  double accuracy() const { return double(correct) / double(tokens); }
  double ponder() const { return pondered / double(tokens); }
  double bits_per_byte() const;  // NaN if bytes are not known, or 0
};

// The score by which an answer is chosen: the sum of its tokens' log-likelihoods, or the sum divided by its number of
// tokens, characters or bytes. A space at the answer's beginning is no character and no byte of it.
enum class ChoiceScore { sum, per_token, per_character, per_byte, count };

struct ChoiceResult {
  std::string file;
  int64_t questions = 0, shortened = 0;  // of `shortened` answers the context's beginning was left out
  bool knows_bytes = false;              // a vocabulary is known: without one the last two are not computed
  std::array<int64_t, size_t(ChoiceScore::count)> right = {};
};

// The last word of each text: whether each of its tokens is the likeliest, and exp(the mean of its losses) over texts.
struct LastWordResult {
  std::string file;
  int64_t texts = 0, shortened = 0, right = 0;
  double nats = 0;
};

struct EvaluationResults {
  std::string model, wiring;
  int64_t context, stride;
  std::vector<TextResult> texts;
  std::vector<ChoiceResult> choices;
  std::vector<LastWordResult> last_words;
  PositionLosses positions;  // over all texts
};

// Prints tables for people.
void print_results(const EvaluationResults& results);

// The results as JSON. Numbers have all their digits; what is not known is null.
std::string results_json(const EvaluationResults& results);

// The length of the rows that the texts of a folder of tokens lie in, as its manifest says where data/tokenize --pack
// or data/probe made it; 0: in none.
int64_t row_length_of(const std::string& folder);

// The texts of a file of JSON lines with a field "text", split before the last word: (context, " " and the word).
// Throws UserError.
std::vector<std::pair<std::string, std::string>> read_last_words(const std::string& path);

// What --serve is asked for, a JSON object a line with one of these names, and answers in the same order:
//
//   {"loglikelihood": [[context, continuation], ...]}
//     -> {"loglikelihood": [[sum of log-likelihoods, all are the likeliest tokens], ...]}
//   {"loglikelihood_rolling": [text, ...]}
//     -> {"loglikelihood_rolling": [sum of log-likelihoods, ...]}
//   {"generate_until": [{"context": text, "until": [text, ...], "max_tokens": n, "temperature": x, "top_k": n,
//                        "top_p": x}, ...]}
//     -> {"generate_until": [text, ...]}
//
// A request that cannot be answered gets {"error": text}.
struct GenerateRequest {
  std::string context;
  SampleOptions options;  // tokens, sampling, stop
};
struct ServeRequest {
  std::string name;
  std::vector<std::pair<std::string, std::string>> pairs;
  std::vector<std::string> texts;
  std::vector<GenerateRequest> generate;
};
ServeRequest parse_serve_request(const std::string& line);  // throws UserError

// Does `what` with an item of a request. If that throws, UserError has the item's number, from 1 on, and how `text`,
// the item or its context, begins.
void of_item(size_t number, const std::string& text, const std::function<void()>& what);

using ServeResults = std::variant<std::vector<std::pair<double, bool>>, std::vector<double>, std::vector<std::string>>;
std::string serve_answer(const std::string& name, const ServeResults& results);
std::string serve_error(const std::string& what);
