// Continues text with a trained model: the model of train_gpt2_sla.cu, planned for generation, and a K/V cache in which
// several texts are sampled at a time. Prompts are computed one by one, in chunks; then each pass through the model
// draws a token of every text.
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"
#include "llmc/sampling_engine.h"
#include "llmc/train/sampling.h"
#include "llmc/train/stop_signal.h"
#include "llmc/base/message.h"
#include "llmc/base/text.h"

// The longest that a sequence can become.
int64_t longest_sequence(const std::vector<SampleRequest>& requests, const SampleOptions& o, int context_length) {
  size_t longest = 0;
  for (const SampleRequest& request : requests) longest = std::max(longest, request.tokens.size());
  return o.interactive ? context_length : std::min<int64_t>(context_length, int64_t(longest) + o.tokens);
}

void print_speed(const SamplingEngine& engine) {
  const SamplingSpeed& s = engine.speed;
  const GPT2& model = engine.model;
  fprintf(stderr,
          "prompt: %lld tokens, %.0f tokens/s; drawn: %lld tokens, %.1f tokens/s, %s/s of weights and K/V read; %s, "
          "%s; K/V cache %s, %.0f bytes per token\n",
          (long long)s.prompt_tokens, double(s.prompt_tokens) / std::max(s.prompt_seconds, 1e-9),
          (long long)s.drawn_tokens, double(s.pass_tokens) / std::max(s.drawing_seconds, 1e-9),
          bytes_text(s.bytes_read / std::max(s.drawing_seconds, 1e-9)).c_str(), precision_name, device_name(),
          bytes_text(double(model.memory_plan[MemoryGroup::kv_cache])).c_str(),
          double(kv_bytes_per_token(model.config, model.attention_plan, sizeof(floatX))));
}

// A line that is typed, after "> ". Returns false at the end of the input, or when a signal asks to stop.
bool read_line(std::string& line) {
  static std::string typed;
  fputs("> ", stdout);
  flush_output();
  for (;;) {
    const size_t end = typed.find('\n');
    if (end != std::string::npos) {
      line = lines_of(typed)[0];
      typed.erase(0, end + 1);
      return true;
    }
    if (read_stdin(typed)) continue;
    line = std::exchange(typed, "");
    return !line.empty() && stop_signal() == 0;
  }
}

int run_sampler(int argc, char** argv) {
  SampleOptions o;
  if (!parse_sample_options(argc, argv, o)) return 0;
  handle_stop_signals();
  const ModelConfig config = config_of(o.model, o.wiring);
  const Tokenizer tokenizer = model_tokenizer(o.model, o.tokenizer, config.vocab_size);
  const int longest_text = config.longest_text();
  std::vector<SampleRequest> requests;
  if (!o.interactive) requests = sample_requests(o, tokenizer, longest_text);
  GPT2 model;
  SamplingEngine engine = {o, tokenizer, model, {}};
  const int slots = int(std::min<size_t>(size_t(o.slots), std::max<size_t>(1, requests.size())));
  load_model(model, o.model, config, generation_options(slots, longest_sequence(requests, o, longest_text)));
  stop_after_steps();

  if (!o.batch.empty()) {
    engine.run(requests, /*show=*/false, [](const Sampled& text) {
      printf("%s\n", sample_json(text.request, text.stream.text(), text.drawn(), text.ended_by).c_str());
      flush_output();
    });
  } else if (!o.interactive) {
    printf("%s", printable(o.prompt_file.empty() ? o.prompt : requests[0].prompt).c_str());
    engine.run(requests, /*show=*/true, [](const Sampled&) {});
  } else {
    for (std::string line; read_line(line);) {
      try {
        engine.run({sample_request(o, tokenizer, line, uint64_t(o.seed), longest_text)}, /*show=*/true,
                   [](const Sampled&) {});
      } catch (const UserError& e) { print_error(e.what()); }
    }
  }
  if (!o.quiet) print_speed(engine);
  return stop_signal() != 0 ? 128 + stop_signal() : 0;
}

int main(int argc, char** argv) {
  return run_program([&] {
    configure_threads(argv, "20000");
    return run_sampler(argc, argv);
  });
}
