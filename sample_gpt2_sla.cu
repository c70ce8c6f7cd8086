// Continues text with a trained model: the graph of train_gpt2_sla.cu, planned for generation, and a K/V cache in which
// several texts are sampled at a time. Prompts are computed one by one, in chunks; then each pass through the model
// draws a token of every text.
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"
#include <poll.h>                   // poll
#include <unistd.h>                 // read
#include <deque>                    // std::deque
#include "llmc/run/sampling.h"      // SampleOptions, SampleRequest, sample_json
#include "llmc/text/text_stream.h"  // TextStream

// A text that is being sampled.
struct Sampled {
  SampleRequest request;
  std::vector<int> tokens;  // with the prompt
  TextStream stream;
  std::string ended_by;  // "" while it goes on
  int64_t drawn() const { return int64_t(tokens.size() - request.tokens.size()); }
};

// What the passes through the model took.
struct SamplingSpeed {
  int64_t prompt_tokens = 0, drawn_tokens = 0, passes = 0;
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
    const int token = sample_token(std::move(logits), uniform, options.sampling, text.tokens);
    text.tokens.push_back(token);
    if (token == tokenizer.end_of_text() && !options.ignore_end_of_text) {
      text.ended_by = "end of text";
    } else {
      const std::string part = text.stream.add(token < tokenizer.vocab_size() ? tokenizer.token(token) : "");
      if (show) print_part(part);
      if (text.stream.stopped()) text.ended_by = "stop text";
      else if (text.drawn() == options.tokens) text.ended_by = "number of tokens";
      else if (int64_t(text.tokens.size()) == model.cache.max_length) text.ended_by = "context length";
    }
    if (show && !text.ended_by.empty()) print_part(text.stream.finish() + "\n");
  }

  static void print_part(const std::string& part) {
    fputs(printable(part).c_str(), stdout);
    fflush(stdout);
  }

  void start(Sampled& text, int slot, bool show) {
    const double begin = seconds_now();
    std::vector<float> logits = gpt2_read_prompt(model, slot, text.tokens);
    speed.prompt_seconds += seconds_now() - begin;
    speed.prompt_tokens += int64_t(text.tokens.size());
    draw(text, std::move(logits), show);
  }

  // One pass: a token of each text. `active`: (slot, text).
  void step(const std::vector<std::pair<int, Sampled*>>& active, bool show) {
    const double begin = seconds_now();
    std::vector<int> tokens;
    std::vector<std::pair<int, int64_t>> counts;
    for (const auto& [slot, text] : active) tokens.push_back(text->tokens.back()), counts.push_back({slot, 1});
    gpt2_extend(model, tokens, counts);
    const std::vector<float> logits = gpt2_fetch_logits(model, 0, int64_t(active.size()));
    speed.drawing_seconds += seconds_now() - begin;
    speed.drawn_tokens += int64_t(active.size());
    speed.passes++;
    speed.bytes_read += weight_bytes_of_a_pass();
    const int V = model.config.vocab_size;
    for (size_t i = 0; i < active.size(); i++) {
      speed.bytes_read += kv_bytes_of(active[i].first);
      draw(*active[i].second, {logits.begin() + long(i) * V, logits.begin() + long(i + 1) * V}, show);
    }
  }

  // All weights are read but most of the position embedding's.
  double weight_bytes_of_a_pass() const {
    return (double(model.parameters.num_parameters) - double(model.config.max_seq_len) * model.config.channels) *
           sizeof(floatX);
  }
  double kv_bytes_of(int slot) const {
    double bytes = 0;
    for (int l = 0; l < model.config.num_layers; l++)
      bytes += double(model.cache.lengths[slot] - model.cache.first_position(slot, l)) *
               double(model.layers[l].store_kv.width) * sizeof(floatX);
    return bytes;
  }

  // Samples every request, several at a time, and calls finished(text) in the order of the requests. Ends early if a
  // signal asks for it.
  template <class Finished>
  void run(const std::vector<SampleRequest>& requests, bool show, Finished finished) {
    std::deque<Sampled> texts;
    std::vector<std::pair<int, Sampled*>> active;
    std::vector<int> free_slots;
    for (int slot = model.cache.slots - 1; slot >= 0; slot--) free_slots.push_back(slot);
    size_t next = 0;
    while ((next < requests.size() || !active.empty()) && stop_signal() == 0) {
      while (next < requests.size() && !free_slots.empty() && stop_signal() == 0) {
        texts.push_back({requests[next], requests[next].tokens, TextStream(options.stop), ""});
        next++;
        active.push_back({free_slots.back(), &texts.back()});
        free_slots.pop_back();
        start(texts.back(), active.back().first, show);
        remove_ended(active, free_slots);
      }
      for (size_t first = 0, count; first < active.size(); first += count) {
        count = std::min(most_texts_of_a_pass, active.size() - first);
        step({active.begin() + long(first), active.begin() + long(first + count)}, show);
      }
      remove_ended(active, free_slots);
      for (; !texts.empty() && !texts.front().ended_by.empty(); texts.pop_front()) finished(texts.front());
    }
    for (Sampled& text : texts) {  // those that a signal has stopped
      if (text.ended_by.empty()) text.ended_by = "signal";
      if (show) print_part(text.stream.finish() + "\n");
      finished(text);
    }
  }

  static void remove_ended(std::vector<std::pair<int, Sampled*>>& active, std::vector<int>& free_slots) {
    for (size_t i = 0; i < active.size();) {
      if (active[i].second->ended_by.empty()) {
        i++;
      } else {
        free_slots.push_back(active[i].first);
        active.erase(active.begin() + long(i));
      }
    }
  }
};

// The longest that a sequence can become.
int64_t longest_sequence(const std::vector<SampleRequest>& requests, const SampleOptions& o, int context_length) {
  size_t longest = 0;
  for (const SampleRequest& request : requests) longest = std::max(longest, request.tokens.size());
  return o.interactive ? context_length : std::min<int64_t>(context_length, int64_t(longest) + o.tokens);
}

// The model of a folder, planned for generation. Throws UserError if that does not fit into memory.
void load_model(GPT2& model, const std::string& folder, const ModelConfig& config, const PlanOptions& plan) {
  gpt2_plan(model, config, plan);
  const size_t needed = model.memory.total(), available = device_memory_available() + device_workspace_bytes();
  if (needed > available)
    user_error("the model and its K/V cache take %s, but %s are free on the %s; take fewer --slots or shorter texts",
               bytes_text(double(needed)).c_str(), bytes_text(double(available)).c_str(), device_name());
  gpt2_allocate(model);
  read_weights(folder, model.parameters, store_weights(model));
}

void print_speed(const SamplingEngine& engine) {
  const SamplingSpeed& s = engine.speed;
  const GPT2& model = engine.model;
  fprintf(stderr,
          "prompt: %lld tokens, %.0f tokens/s; drawn: %lld tokens, %.1f tokens/s, %s/s of weights and K/V read; %s, "
          "%s; K/V cache %s, "
          "%.0f bytes a token\n",
          (long long)s.prompt_tokens, double(s.prompt_tokens) / std::max(s.prompt_seconds, 1e-9),
          (long long)s.drawn_tokens, double(s.drawn_tokens) / std::max(s.drawing_seconds, 1e-9),
          bytes_text(s.bytes_read / std::max(s.drawing_seconds, 1e-9)).c_str(), precision_name, device_name(),
          bytes_text(double(model.memory[MemoryGroup::kv_cache])).c_str(),
          double(kv_elements_per_token(model.config, model.attention_plan)) * sizeof(floatX));
}

// A line that is typed, after "> ". Returns false at the end of the input, or when a signal asks to stop, which ends no
// system call.
bool read_line(std::string& line) {
  static std::string typed;
  fputs("> ", stdout);
  fflush(stdout);
  for (;;) {
    const size_t end = typed.find('\n');
    if (end != std::string::npos) {
      line = typed.substr(0, end);
      typed.erase(0, end + 1);
      return true;
    }
    pollfd input = {STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, /*ms=*/100) <= 0) {
      if (stop_signal() != 0) return false;
      continue;
    }
    char block[4096];
    const ssize_t n = read(STDIN_FILENO, block, sizeof block);
    if (n <= 0) return line = std::exchange(typed, ""), !line.empty();
    typed.append(block, size_t(n));
  }
}

int run_sampler(int argc, char** argv) {
  SampleOptions o;
  if (!parse_sample_options(argc, argv, o)) return 0;
  handle_stop_signals();
  Ranks ranks;
  RankChannel channel;
  const ModelConfig config = read_config_json(o.model);
  const Tokenizer tokenizer = model_tokenizer(o.model, o.tokenizer, config.vocab_size);
  std::vector<SampleRequest> requests;
  if (!o.interactive) requests = sample_requests(o, tokenizer, config.max_seq_len);
  GPT2 model;
  SamplingEngine engine = {o, tokenizer, model, {}};
  model.collectives.init(ranks, channel);  // selects the GPU
  const int slots = int(std::min<size_t>(size_t(o.slots), std::max<size_t>(1, requests.size())));
  load_model(model, o.model, config, generation_plan(slots, longest_sequence(requests, o, config.max_seq_len)));

  if (!o.batch.empty()) {
    engine.run(requests, /*show=*/false, [](const Sampled& text) {
      printf("%s\n", sample_json(text.request, text.stream.text(), text.drawn(), text.ended_by).c_str());
      fflush(stdout);
    });
  } else if (!o.interactive) {
    printf("%s", printable(o.prompt_file.empty() ? o.prompt : requests[0].prompt).c_str());
    engine.run(requests, /*show=*/true, [](const Sampled&) {});
  } else {
    for (std::string line; read_line(line);) {
      try {
        engine.run({sample_request(o, tokenizer, line, uint64_t(o.seed), config.max_seq_len)}, /*show=*/true,
                   [](const Sampled&) {});
      } catch (const UserError& e) { fprintf(stderr, "error: %s\n", e.what()); }
    }
  }
  if (!o.quiet) print_speed(engine);
  return stop_signal() != 0 ? 128 + stop_signal() : 0;
}

#ifndef SLA_NO_SAMPLER_MAIN
int main(int argc, char** argv) {
  configure_threads(argv, "20000");
  try {
    return run_sampler(argc, argv);
  } catch (const UserError& e) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
#endif
