#include "sampling.h"
#include <CLI/CLI.hpp>
#include <poll.h>
#include <unistd.h>
#include <tuple>
#include "llmc/formats/checkpoint.h"
#include "llmc/base/command_line.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/text.h"
#include "stop_signal.h"

static void declare_options(CLI::App& app, SampleOptions& o) {
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("MODEL", o.model,
                 "a model's folder: a checkpoint, a run's folder for its newest one, or GPT-2 in Hugging Face's format")
      ->required();
  app.add_option("--wiring", o.wiring, other_wiring_help);
  const char* text = "Text to continue";
  app.add_option("--prompt", o.prompt, "this text; without any option of this group: nothing")->group(text);
  app.add_option("--prompt-file", o.prompt_file, "the text of a file; -: of stdin")->group(text);
  app.add_option("--batch", o.batch,
                 "each line of a file, or with - of stdin; the output is a JSON object a line, in the order of the "
                 "lines")
      ->group(text);
  app.add_flag("-i,--interactive", o.interactive, "each line that is typed")->group(text);
  app.add_flag("--no-end-of-text", o.no_end_of_text,
               "begin with the prompt itself, without the end of text that training documents begin with")
      ->group(text);
  const char* sampling = "Sampling";
  app.add_option("-n,--tokens", o.tokens, "tokens to draw, at most")->group(sampling);
  app.add_option("--temperature", o.sampling.temperature, "divide logits by this; 0: always the likeliest token")
      ->group(sampling);
  app.add_option("--top-k", o.sampling.top_k, "draw only from the k likeliest tokens; 0: from all")->group(sampling);
  app.add_option("--top-p", o.sampling.top_p,
                 "draw only from the likeliest tokens that have this probability together; 0: always the likeliest "
                 "token")
      ->group(sampling);
  app.add_option("--repetition-penalty", o.sampling.repetition_penalty,
                 "divide the positive logits of tokens that occur already by this, and multiply the negative ones")
      ->group(sampling);
  app.add_option("--seed", o.seed, "the same seed and prompt give the same text")->group(sampling);
  app.add_option("--stop", o.stop, "end before this text; may be given several times")
      ->group(sampling)
      ->take_all()
      ->allow_extra_args(false)
      ->default_str("");
  app.add_flag("--ignore-end-of-text", o.ignore_end_of_text, "do not end at an end of text")->group(sampling);
  app.add_option("--slots", o.slots, "with --batch: texts that are sampled at a time")->group(sampling);
  app.add_option("--tokenizer", o.tokenizer,
                 "the vocabulary, in any format that data/tokenize takes; default: the one in the model's folder");
  app.add_flag("-q,--quiet", o.quiet, "do not tell the speed at the end");
}

bool same_sampling(const SampleOptions& a, const SampleOptions& b) {
  auto drawn = [](const SamplingOptions& s) { return std::tie(s.repetition_penalty, s.temperature, s.top_k, s.top_p); };
  return a.tokens == b.tokens && drawn(a.sampling) == drawn(b.sampling) && a.stop == b.stop;
}

void check_sampling(const SampleOptions& o) {
  auto between = [](const char* option, double value, double low, double high) {
    if (!(value >= low && value <= high))
      user_error("%s %.10g: it must lie between %.10g and %.10g", option, value, low, high);
  };
  between("-n", double(o.tokens), 1, 1 << 30);
  between("--temperature", o.sampling.temperature, 0, 1e6);
  between("--top-k", o.sampling.top_k, 0, 1 << 30);
  between("--top-p", o.sampling.top_p, 0, 1);
  between("--repetition-penalty", o.sampling.repetition_penalty, 1e-3, 1e3);
  between("--seed", double(o.seed), 0, 9e18);
  between("--slots", o.slots, 1, 4096);
}

bool parse_sample_options(int argc, char** argv, SampleOptions& o) {
  CLI::App app("Continues text with a trained model.\n"
               "Example: ./sample_gpt2_sla_cpu runs/gcide --prompt 'Skip, n. ' --temperature 0.7");
  declare_options(app, o);
  if (!parse_command_line(app, argc, argv)) return false;
  check_sampling(o);
  o.model = model_folder(o.model);
  if (!o.prompt.empty() + !o.prompt_file.empty() + !o.batch.empty() + o.interactive > 1)
    user_error("--prompt, --prompt-file, --batch and -i each say what to continue; give one of them");
  return true;
}

Tokenizer model_tokenizer(const std::string& folder, const std::string& named, int vocab_size) {
  std::optional<Tokenizer> tokenizer = Tokenizer::of_model(named, {folder}, vocab_size);
  if (named == "none") user_error("--tokenizer none: prompts and samples are texts; name the model's vocabulary");
  if (!tokenizer)
    user_error("%s has no vocabulary (tokenizer.json, or encoder.json and vocab.bpe); name one with --tokenizer",
               folder);
  return *std::move(tokenizer);
}

SampleRequest sample_request(const SampleOptions& o, const Tokenizer& tokenizer, const std::string& prompt,
                             uint64_t seed, int context_length) {
  std::vector<int> tokens = encode_prompt(tokenizer, prompt, /*begins_with_end=*/!o.no_end_of_text || prompt.empty());
  if (int64_t(tokens.size()) >= context_length)
    user_error("the prompt makes %zu tokens, and the model's context length is %d; shorten it", tokens.size(),
               context_length);
  return {prompt, std::move(tokens), seed};
}

bool read_stdin(std::string& text) {
  pollfd input = {STDIN_FILENO, POLLIN, 0};
  while (poll(&input, 1, /*ms=*/100) <= 0)
    if (stop_signal() != 0) return false;
  char block[4096];
  const ssize_t n = read(STDIN_FILENO, block, sizeof block);
  if (n > 0) text.append(block, size_t(n));
  return n > 0;
}

// The bytes of a file, or for "-" all of standard input.
static std::string read_input(const std::string& path) {
  if (path != "-") return read_whole_file(path, most_text_bytes, FileKind::any);
  std::string text;
  while (read_stdin(text)) {}
  return text;
}

std::vector<SampleRequest> sample_requests(const SampleOptions& o, const Tokenizer& tokenizer, int context_length) {
  if (o.batch.empty()) {
    const std::string prompt = o.prompt_file.empty() ? o.prompt : read_input(o.prompt_file);
    return {sample_request(o, tokenizer, prompt, uint64_t(o.seed), context_length)};
  }
  std::vector<SampleRequest> requests;
  for (const std::string& line : lines_of(read_input(o.batch))) {
    try {
      requests.push_back(sample_request(o, tokenizer, line, uint64_t(o.seed) + requests.size(), context_length));
    } catch (const UserError& e) { user_error("%s: line %zu: %s", o.batch, requests.size() + 1, e.what()); }
  }
  if (requests.empty() && stop_signal() == 0) user_error("%s: has no line", o.batch);
  return requests;
}

std::string sample_json(const SampleRequest& request, const std::string& text, int64_t tokens,
                        const std::string& ended_by) {
  return dump_json(nlohmann::ordered_json{{"prompt", request.prompt},
                                          {"seed", request.seed},
                                          {"text", text},
                                          {"tokens", tokens},
                                          {"ended_by", ended_by}});
}
