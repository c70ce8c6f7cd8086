// Draws the tokens of several texts at a time with a model that is planned for generation. Prompts are computed one by
// one, in chunks; then each pass through the model draws a token of every text.
#pragma once
#include <algorithm>
#include <cstdio>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "llmc/wiring/config.h"
#include "llmc/model/flops.h"
#include "llmc/model/gpt2.h"
#include "llmc/operations.h"
#include "llmc/train/print.h"
#include "llmc/train/sampling.h"
#include "llmc/train/stop_signal.h"
#include "llmc/text/sampler.h"
#include "llmc/text/text_stream.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/program.h"
#include "llmc/base/random.h"

// The config.json of a model's folder, with another wiring if one is given (--wiring). Throws UserError.
inline ModelConfig config_of(const std::string& folder, const std::optional<std::string>& wiring) {
  ModelConfig config = read_config_json(folder);
  if (!wiring) return config;
  config.wiring = parse_wiring(*wiring);
  validate(config);
  if (config.whole_model().documents && config.end_of_text < 0) {  // which a model without them does not say
    if (config.special.eos.empty())
      user_error("--wiring '%s': documents begin at the end of text, and %s/config.json names none (eos_token_id)",
                 config.wiring.text, folder);
    config.end_of_text = config.special.eos[0];
  }
  return config;
}

// The model of a folder, planned for generation. Its weights may be those of another wiring; what changes is told.
// Throws UserError if that does not fit into memory, or if this wiring needs weights that the model has not.
inline void load_model(GPT2& model, const std::string& folder, const ModelConfig& config,
                       const GenerationOptions& plan) {
  const size_t available = device_memory_available() + device_workspace_bytes();
  check_parameters_fit(config, sizeof(floatX), "weights", available, device_name());
  gpt2_declare_generation(model, config, plan);
  const ModelConfig in_folder = read_config_json(folder);
  if (!same_model(in_folder, config)) {
    const WiringChange change = plan_wiring_change(in_folder, model.attention_plan);
    if (const std::string missing = weights_without_values(change); !missing.empty())
      user_error("--wiring '%s': %s, which was trained with %s, has not all weights for it; without trained values: %s",
                 config.wiring.text, folder, in_folder.wiring.text, missing);
    fprintf(stderr, "%s was trained with the wiring %s and is read as %s; what changes:\n%s", folder.c_str(),
            in_folder.wiring.text.c_str(), config.wiring.text.c_str(), describe(change).c_str());
  }
  const size_t needed = model.memory_plan.total();
  if (needed > available)
    user_error("the model and its K/V cache take %s, but %s are free on the %s; take fewer --slots or shorter texts",
               bytes_text(double(needed)), bytes_text(double(available)), device_name());
  gpt2_allocate(model);
  read_weights_of(model, model, folder, in_folder, /*seed=*/0);
}

// A text that is being sampled.
struct Sampled {
  SampleRequest request;
  int slot;                 // in the K/V cache
  std::vector<int> tokens;  // with the prompt
  TextStream stream;
  std::string ended_by = {};  // "" while it continues
  int64_t drawn() const { return int64_t(tokens.size() - request.tokens.size()); }
};

// What the passes through the model took.
struct SamplingSpeed {
  int64_t prompt_tokens = 0, drawn_tokens = 0;  // a text's first token is drawn after its prompt, without a pass,
  int64_t pass_tokens = 0;                      //   the others in passes
  double prompt_seconds = 0, drawing_seconds = 0;
  double bytes_read = 0;  // by the passes that drew: weights, and the K/V of each text
};

struct SamplingEngine {
  const SampleOptions& options;
  const Tokenizer& tokenizer;
  GPT2& model;  // planned for generation
  SamplingSpeed speed;

  // Draws the text's next token; `show`: print it as it comes.
  void draw(Sampled& text, std::vector<float> logits, bool show) {
    const double uniform = random_uniform(text.request.seed, RandomStream::sample, 0, text.tokens.size());
    SamplingOptions sampling = options.sampling;
    sampling.vocabulary = tokenizer.vocab_size();
    const int token = sample_token(std::move(logits), uniform, sampling, text.tokens);
    text.tokens.push_back(token);
    speed.drawn_tokens++;
    const bool is_end = token == tokenizer.end_of_text() || model.config.ends_text(token);
    if (is_end && !options.ignore_end_of_text) {
      text.ended_by = "end of text";
    } else {
      const std::string part = text.stream.add(tokenizer.token(token));
      if (show) print_part(part);
      if (text.stream.stopped()) text.ended_by = "stop text";
      else if (text.drawn() == options.tokens) text.ended_by = "number of tokens";
      else if (int64_t(text.tokens.size()) == model.cache.plan.max_length) text.ended_by = "context length";
    }
    if (show && !text.ended_by.empty()) print_part(text.stream.finish() + "\n");
  }

  static void print_part(const std::string& part) {
    fputs(printable(part).c_str(), stdout);
    flush_output();
  }

  void start(Sampled& text, bool show) {
    const double begin = seconds_now();
    std::vector<float> logits = gpt2_read_prompt(model, text.slot, text.tokens);
    speed.prompt_seconds += seconds_now() - begin;
    speed.prompt_tokens += int64_t(text.tokens.size());
    draw(text, std::move(logits), show);
  }

  // One pass through the model: draws a token of each text.
  void draw_of_each(const std::vector<Sampled*>& active, bool show) {
    const double begin = seconds_now();
    std::vector<int> tokens;
    std::vector<std::pair<int, int64_t>> counts;
    for (const Sampled* text : active) tokens.push_back(text->tokens.back()), counts.push_back({text->slot, 1});
    gpt2_extend(model, tokens, counts);
    const std::vector<float> logits = gpt2_fetch_logits(model, 0, int64_t(active.size()));
    speed.drawing_seconds += seconds_now() - begin;
    speed.pass_tokens += int64_t(active.size());
    speed.bytes_read += weight_bytes_of_a_pass();
    const int V = model.config.vocab_size;
    for (size_t i = 0; i < active.size(); i++) {
      speed.bytes_read += kv_bytes_of(active[i]->slot);
      draw(*active[i], {logits.begin() + long(i) * V, logits.begin() + long(i + 1) * V}, show);
    }
  }

  // A pass reads all weights but most rows of the position embeddings and, with lm_head, of the token embeddings.
  double weight_bytes_of_a_pass() const {
    const double positions = model.params.wpe != nullptr ? model.config.max_seq_len : 0,
                 tokens = model.params.lm_head != nullptr ? model.config.vocab_size : 0;
    return (double(model.parameters.num_parameters) - (positions + tokens) * model.config.channels) * sizeof(floatX);
  }
  double kv_bytes_of(int slot) const {
    double bytes = 0;
    for (int l = 0; l < model.config.num_layers; l++)
      bytes += double(model.cache.lengths[slot] - model.cache.first_position(slot, l)) *
               double(kv_bytes_of_layer(model.config, model.attention_plan, l, sizeof(floatX)));
    return bytes;
  }

  // Samples every request, several at a time, and calls finished(text) in the order of the requests. Ends early if a
  // signal asks for it. If an error ends it, what has been drawn until then is handed over before the error is thrown.
  template <class Finished>
  void run(const std::vector<SampleRequest>& requests, bool show, Finished finished) {
    std::deque<Sampled> texts;
    auto hand_over_all = [&](const char* ended_by) {
      for (Sampled& text : texts) {
        if (show && text.ended_by.empty()) print_part(text.stream.finish() + "\n");
        if (text.ended_by.empty()) text.ended_by = ended_by;
        finished(text);
      }
    };
    try {
      sample_all(requests, show, finished, texts);
    } catch (...) {
      hand_over_all("error");
      throw;
    }
    hand_over_all("signal");
  }

  // `texts` = those that have begun and have not been handed over: some are left if a signal ends it.
  template <class Finished>
  void sample_all(const std::vector<SampleRequest>& requests, bool show, Finished& finished,
                  std::deque<Sampled>& texts) {
    std::vector<Sampled*> active;
    std::vector<int> free_slots;
    for (int slot = model.cache.plan.slots - 1; slot >= 0; slot--) free_slots.push_back(slot);
    size_t next = 0;
    while ((next < requests.size() || !active.empty()) && stop_signal() == 0) {
      while (next < requests.size() && !free_slots.empty() && stop_signal() == 0) {
        texts.push_back({requests[next], free_slots.back(), requests[next].tokens, TextStream(options.stop)});
        next++;
        active.push_back(&texts.back());
        free_slots.pop_back();
        start(texts.back(), show);
        remove_ended(active, free_slots);
      }
      for (size_t first = 0, count; first < active.size(); first += count) {
        count = std::min(most_texts_of_a_pass, active.size() - first);
        draw_of_each({active.begin() + long(first), active.begin() + long(first + count)}, show);
      }
      remove_ended(active, free_slots);
      for (; !texts.empty() && !texts.front().ended_by.empty(); texts.pop_front()) finished(texts.front());
    }
  }

  static void remove_ended(std::vector<Sampled*>& active, std::vector<int>& free_slots) {
    const auto ended =
        std::stable_partition(active.begin(), active.end(), [](const Sampled* text) { return text->ended_by.empty(); });
    for (auto text = ended; text != active.end(); ++text) free_slots.push_back((*text)->slot);
    active.erase(ended, active.end());
  }
};
