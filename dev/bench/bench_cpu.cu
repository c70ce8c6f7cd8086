// Speed of whole training steps (forward, backward, norm, AdamW) on the CPU: GPT-2 124M on short and long sequences and a small
// model on very long ones, plain (baseline) and with skip-layer attention, beside the rate of oneDNN's sgemm measured in the same
// run, before and after each model; then attention alone with each kind of wiring. Prints Markdown tables. Run by `make bench-cpu`.
#define SLA_NO_MAIN
#include "../../train_gpt2_sla.cu"

struct Setting {
  const char* name;
  ModelConfig config;
  int B, T;
  double seconds;  // to measure, each time
};

struct Measurement {
  double step_seconds = 1e30;  // the fastest step: what the machine does when nothing else runs
  double sgemm = 0;            // FLOP/s
  double flops = 0;            // of a step
  double peak_bytes = 0;       // resident memory at its highest
  double planned_bytes = 0;
};

// The kernel's record of the process's highest resident memory, in bytes; forget starts it anew.
void forget_peak_memory() {
  if (FILE* file = fopen("/proc/self/clear_refs", "w")) {
    fputs("5", file);
    fclose(file);
  }
}
double peak_memory() {
  double kib = 0;
  if (FILE* file = fopen("/proc/self/status", "r")) {
    char line[256];
    while (fgets(line, sizeof line, file))
      if (sscanf(line, "VmHWM: %lf", &kib) == 1) break;
    fclose(file);
  }
  return kib * 1024;
}

void measure(const Setting& s, bool skips, Measurement& best) {
  GPT2 model;
  ModelConfig config = s.config;
  config.max_seq_len = std::max(config.max_seq_len, s.T);
  if (!skips) config.wiring = Wiring();
  best.sgemm = std::max(best.sgemm, gemm_rate(2048, 0.5));
  forget_peak_memory();
  gpt2_plan(model, config, {s.B, s.T});
  gpt2_allocate(model);
  gpt2_init_weights(model, 1);
  std::vector<int> tokens(size_t(s.B) * size_t(s.T) + 1);
  for (size_t i = 0; i < tokens.size(); i++)
    tokens[i] = int(random_words(1, RandomStream::test, 0, i).word[0] % uint32_t(config.vocab_size));
  const double start = seconds_now();
  for (int step = 1; step <= 3 || seconds_now() - start < s.seconds; step++) {
    const double begin = seconds_now();
    gpt2_zero_grad(model);
    gpt2_zero_loss(model);
    gpt2_micro_step(model, tokens.data(), tokens.data() + 1, s.B, s.T, 1);
    gpt2_update(model, step, {1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0});
    if (step > 1) best.step_seconds = std::min(best.step_seconds, seconds_now() - begin);
  }
  best.peak_bytes = std::max(best.peak_bytes, peak_memory());
  best.planned_bytes = double(model.memory.total());
  best.flops = flops_per_token(config, model.attention_plan, s.T) * s.B * s.T;
  best.sgemm = std::max(best.sgemm, gemm_rate(2048, 0.5));
}

// Attention of one layer, forward and backward: 4 heads of 64, one sequence of T = 4,096. The wirings take turns, and each one's fastest round
// counts. FLOPs are those of pairs of a query and a key that see each other.
void bench_attention(int rounds) {
  const int T = 4096;
  struct Layer {
    std::string wiring;
    std::unique_ptr<GPT2> model;
    double seconds = 1e30, flops = 0;
  };
  std::vector<Layer> layers;
  for (const char* wiring : {"plain", "sla(1,3)", "gqa(1)", "also(1,3)", "window(256)", "strided(64)", "strided(64,union)", "fixed(64,8)",
                             "topk(64)", "reuse(2)"}) {
    Layer layer = {wiring, std::make_unique<GPT2>()};
    ModelConfig config;
    config.num_layers = 2, config.num_heads = 4, config.channels = 256, config.vocab_size = 257, config.max_seq_len = T;
    config.wiring = parse_wiring(wiring);
    GPT2& model = *layer.model;
    gpt2_plan(model, config, {1, T});
    gpt2_allocate(model);
    gpt2_init_weights(model, 1);
    std::vector<int> tokens(size_t(T), 0);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(random_words(1, RandomStream::test, 0, i).word[0] % 257u);
    gpt2_forward(model, tokens.data(), {1, T});
    layer.flops = 7 * 2.0 * config.head_size() * attention_pairs(model.attention_plan, 1, T).scored;
    layers.push_back(std::move(layer));
  }
  double sgemm = 0;
  for (int round = 0; round < rounds; round++) {
    sgemm = std::max(sgemm, gemm_rate(2048, 0.3));
    for (Layer& layer : layers) {
      AttentionArgs<floatX> args = attention_args(layer.model->layers[1], 0, {1, T});
      args.dout = layer.model->acts.lnf;  // some gradient
      const double begin = seconds_now();
      attention_forward(args);
      attention_backward(args);
      layer.seconds = std::min(layer.seconds, seconds_now() - begin);
    }
  }
  printf("\n| attention alone, 4 heads of 64, B 1, T %d | forward + backward, ms | plain / this | GFLOP/s | share of sgemm (%.0f GFLOP/s) |\n"
         "| --- | --: | --: | --: | --: |\n", T, sgemm * 1e-9);
  for (const Layer& layer : layers)
    printf("| %s | %.1f | %.2f | %.0f | %.1f %% |\n", layer.wiring.c_str(), layer.seconds * 1e3, layers[0].seconds / layer.seconds,
           layer.flops / layer.seconds * 1e-9, 100 * layer.flops / layer.seconds / sgemm);
}

// A worker: for each line on stdin, a number of seconds, trains for so long and prints the median and the least time of a step in ms.
// `args`: layers, heads, channels, vocabulary, T, B, wiring.
void serve_steps(const std::vector<std::string>& args) {
  ModelConfig config;
  config.num_layers = std::stoi(args[0]), config.num_heads = std::stoi(args[1]), config.channels = std::stoi(args[2]);
  config.vocab_size = std::stoi(args[3]);
  const int T = std::stoi(args[4]), B = std::stoi(args[5]);
  config.max_seq_len = T, config.wiring = parse_wiring(args[6]);
  GPT2 model;
  gpt2_plan(model, config, {B, T});
  gpt2_allocate(model);
  gpt2_init_weights(model, 1);
  std::vector<int> tokens(size_t(B) * size_t(T) + 1);
  for (size_t i = 0; i < tokens.size(); i++)
    tokens[i] = int(random_words(1, RandomStream::test, 0, i).word[0] % uint32_t(config.vocab_size));
  int64_t steps = 0;
  auto step = [&] {
    gpt2_zero_grad(model);
    gpt2_zero_loss(model);
    gpt2_micro_step(model, tokens.data(), tokens.data() + 1, B, T, 1);
    gpt2_update(model, ++steps, {1e-5, 0.9, 0.95, 1e-8, 0.1, 1.0});
  };
  step(), step();
  double seconds;
  while (scanf("%lf", &seconds) == 1) {
    std::vector<double> times;
    double cpu = 1e30;
    for (const double start = seconds_now(); times.size() < 3 || seconds_now() - start < seconds;) {
      const double begin = seconds_now(), cpu_begin = double(clock()) / CLOCKS_PER_SEC;
      step();
      cpu = std::min(cpu, double(clock()) / CLOCKS_PER_SEC - cpu_begin);
      times.push_back((seconds_now() - begin) * 1e3);
    }
    std::sort(times.begin(), times.end());
    printf("%.2f %.2f cpu %.2f\n", times[times.size() / 2], times[0], cpu * 1e3);
    fflush(stdout);
  }
}

int main(int argc, char** argv) {
  sleep_while_idle(argv);
  if (argc == 9) return serve_steps({argv + 2, argv + argc}), 0;
  ModelConfig d12, small;
  CHECK(config_from_preset("d12", d12));
  small.num_layers = 8, small.num_heads = 8, small.channels = 256, small.vocab_size = 257;
  small.wiring = default_wiring(small.num_layers, small.num_heads);
  const Setting settings[] = {{"124M", d12, 4, 64, 6},
                              {"124M", d12, 1, 1024, 12},
                              {"8 layers, 256 channels, bytes", small, 1, 4096, 6},
                              {"8 layers, 256 channels, bytes", small, 1, 8192, 12}};
  printf("| model | B | T | attention | ms/step | tokens/s | GFLOP/s | sgemm GFLOP/s | share | SLA / baseline | peak memory | planned |\n");
  printf("| --- | --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |\n");
  for (const Setting& s : settings) {
    Measurement m[2];
    for (int round = 0; round < 2; round++)  // alternating, so that a slow minute of the machine hits both
      for (int skips : {0, 1}) measure(s, skips != 0, m[skips]);
    for (int skips : {0, 1}) {
      const Measurement& x = m[skips];
      const double rate = x.flops / x.step_seconds, sgemm = std::max(m[0].sgemm, m[1].sgemm);
      const std::string name = skips ? s.config.wiring.text : "plain";
      printf("| %s | %d | %d | %s | %.0f | %.0f | %.0f | %.0f | %.1f %% | %s | %s | %s |\n", s.name, s.B, s.T, name.c_str(),
             x.step_seconds * 1e3, s.B * s.T / x.step_seconds, rate * 1e-9, sgemm * 1e-9, 100 * rate / sgemm,
             skips ? format("%.3f", m[0].step_seconds / x.step_seconds).c_str() : "", bytes_text(x.peak_bytes).c_str(),
             bytes_text(x.planned_bytes).c_str());
      fflush(stdout);
    }
  }
  bench_attention(10);
}
