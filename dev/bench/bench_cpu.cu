// Speed on the CPU, as Markdown tables. `make bench-cpu` runs it: first `compare`, whole training steps (forward,
// backward, norm, AdamW) in both precisions beside PyTorch's; then for each precision steps of GPT-2 124M on short and
// long sequences and of a small model on very long ones, plain (baseline) and with skip-layer attention, beside the
// rate of oneDNN's matmul in that precision, measured in the same run before and after each model; and attention alone
// with each kind of wiring.
#define SLA_NO_MAIN
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <ctime>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <utility>
#include "operation_groups.h"
#include "profile.h"
#include "../../train_gpt2_sla.cu"
#include "llmc/model/flops.h"
#include "llmc/model/limit.h"
#include "llmc/train/print.h"
#include "llmc/report/statistics.h"
#include "llmc/base/program.h"
#include "llmc/base/text.h"
#include "random_tokens.h"

struct Setting {
  const char* name;
  ModelConfig config;
  int B, T;
  double seconds;  // to measure, each time
};

struct Measurement {
  double step_seconds = 1e30;  // the fastest step: what the machine does when nothing else runs
  double gemm = 0;             // FLOP/s
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

// `tokens`: B T of them, and one more.
void training_step(GPT2& model, const std::vector<int>& tokens, int B, int T, int64_t step) {
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  gpt2_micro_step(model, tokens.data(), tokens.data() + 1, B, T, 1);
  gpt2_update(model, step, {1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0});
}

void measure(const Setting& s, bool skips, Measurement& best) {
  GPT2 model;
  ModelConfig config = s.config;
  config.max_seq_len = std::max(config.max_seq_len, s.T);
  if (!skips) config.wiring = Wiring();
  best.gemm = std::max(best.gemm, gemm_rate(2048, 0.5));
  forget_peak_memory();
  gpt2_declare(model, config, {s.B, s.T});
  gpt2_allocate(model);
  init_weights(model, 1);
  const std::vector<int> tokens = random_tokens(int64_t(s.B) * s.T + 1, config.vocab_size);
  const double start = seconds_now();
  for (int step = 1; step <= 3 || seconds_now() - start < s.seconds; step++) {
    const double begin = seconds_now();
    training_step(model, tokens, s.B, s.T, step);
    if (step > 1) best.step_seconds = std::min(best.step_seconds, seconds_now() - begin);
  }
  best.peak_bytes = std::max(best.peak_bytes, peak_memory());
  best.planned_bytes = double(model.memory_plan.total());
  best.flops = flops_per_token(config, model.attention_plan, s.T) * s.B * s.T;
  best.gemm = std::max(best.gemm, gemm_rate(2048, 0.5));
}

// The wirings whose attention is measured if none are named; what others cost is compared with the first.
const std::vector<std::string> attention_wirings =
    {"plain",       "sla(1,3)", "gqa(1)",   "also(1,3)", "window(256)", "strided(64)", "strided(64,union)",
     "fixed(64,8)", "topk(64)", "reuse(2)", "relative"};

// Attention of one layer, forward and backward: 4 heads of 64, one sequence. FLOPs are counted for pairs of a query and
// a key that see each other.
struct AttentionLayer {
  std::string name;
  int T;
  std::unique_ptr<GPT2> model = std::make_unique<GPT2>();
  double forward_seconds = 1e30, backward_seconds = 1e30, flops = 0;  // the fastest
  double seconds() const { return forward_seconds + backward_seconds; }

  // `documents`: tokens in one, with that term.
  AttentionLayer(const std::string& name, const std::string& wiring, int T, double dropout = 0, int documents = 0)
      : name(name), T(T) {
    ModelConfig config;
    config.num_layers = 2, config.num_heads = 4, config.channels = 256, config.vocab_size = 257, config.max_seq_len = T;
    config.wiring = parse_wiring(wiring), config.end_of_text = 256;
    PlanOptions plan = {1, T};
    plan.dropout = dropout;
    gpt2_declare(*model, config, plan);
    gpt2_allocate(*model);
    init_weights(*model, 1);
    std::vector<int> tokens = random_tokens(T, config.end_of_text);
    for (int t = 0; documents > 0 && t < T; t += documents) tokens[size_t(t)] = config.end_of_text;
    gpt2_forward(*model, tokens.data(), {1, T});
    const std::vector<double> places(size_t(std::max(1, documents)), 1.0 / documents);
    Segments segments;
    if (documents > 0 && documents < T) segments.places = &places;
    const double products = model->attention_plan.table.relative ? 11 : 7;
    flops = products * 2.0 * config.head_size() * attention_pairs(model->attention_plan, 1, T, segments).scored;
  }
  void measure(double (*clock)()) {
    Batch batch = {1, T};
    batch.drops = model->training->dropout > 0;
    AttentionArgs args = attention_args(attention_of_layer(model->sublayers, 1), 0, batch);
    args.dout = model->hidden_states();  // some gradient
    const double begin = clock();
    attention_forward(args);
    const double middle = clock();
    attention_backward(args);
    forward_seconds = std::min(forward_seconds, middle - begin);
    backward_seconds = std::min(backward_seconds, clock() - middle);
  }
};

// Times attention by wiring, at T = 4,096, and the first wiring with dropout at last. The wirings take turns.
void bench_attention(int rounds, const std::vector<std::string>& wirings) {
  const int T = 4096;
  std::vector<AttentionLayer> layers;
  for (const std::string& wiring : wirings) layers.emplace_back(wiring, wiring, T);
  layers.emplace_back(wirings[0] + ", dropout 0.1", wirings[0], T, 0.1);
  double gemm = 0;
  for (int round = 0; round < rounds; round++) {
    gemm = std::max(gemm, gemm_rate(2048, 0.3));
    for (AttentionLayer& layer : layers) layer.measure(seconds_now);
  }
  printf("\n| attention alone, 4 heads of 64, B 1, T %d | forward, ms | backward, ms | %s / this | GFLOP/s | share of "
         "%s GEMM (%.0f GFLOP/s) |\n"
         "| --- | --: | --: | --: | --: | --: |\n",
         T, wirings[0].c_str(), precision_name, gemm * 1e-9);
  for (const AttentionLayer& layer : layers)
    printf("| %s | %.1f | %.1f | %.2f | %.0f | %.1f %% |\n", layer.name.c_str(), layer.forward_seconds * 1e3,
           layer.backward_seconds * 1e3, layers[0].seconds() / layer.seconds(), layer.flops / layer.seconds() * 1e-9,
           100 * layer.flops / layer.seconds() / gemm);
}

// Processor time of all threads of this process, in seconds, which other programs change less.
double processor_seconds() {
  timespec time;
  CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Attention within documents of some lengths beside plain attention, in processor time. They take turns.
void bench_documents(int rounds) {
  printf("| attention alone, 4 heads of 64, B 1, %s, T | documents of | forward, ms of processor time | backward | "
         "/ plain | pairs / plain's |\n| --: | --: | --: | --: | --: | --: |\n",
         precision_name);
  for (const int T : {4096, 16384}) {
    std::vector<AttentionLayer> layers;
    layers.emplace_back("plain", "plain", T);
    for (const int length : {256, 1024, 16384})
      layers.emplace_back(std::to_string(length), "documents", T, /*dropout=*/0, length);
    for (int round = 0; round < rounds; round++)
      for (AttentionLayer& layer : layers) layer.measure(processor_seconds);
    for (const AttentionLayer& layer : layers)
      printf("| %d | %s | %.1f | %.1f | %.3f | %.3f |\n", T, layer.name.c_str(), layer.forward_seconds * 1e3,
             layer.backward_seconds * 1e3, layer.seconds() / layers[0].seconds(), layer.flops / layers[0].flops);
  }
}

// ----------------------------------------------------------------------------
// What length costs

// The wirings whose cost grows with T as T * T, T, or between: what reads all keys, some by a mask, and some by what
// they say. `lsh` has buckets of 64 positions on average.
std::vector<std::string> wirings_by_length(int T) {
  const std::string hashes = format("lsh(%d,2)", T / 64);
  std::vector<std::string> wirings;
  for (const std::string& wiring : {std::string(), std::string("window(256)"), std::string("strided(256)"), hashes})
    for (const char* streams : {"", "reversible"}) {
      const std::string both = streams + std::string(wiring.empty() || *streams == 0 ? "" : " ") + wiring;
      wirings.push_back(both.empty() ? "plain" : both);
    }
  wirings.push_back("topk(64)");
  return wirings;
}

// The fastest forward and backward pass of one sequence in `seconds` or more. The first pass counts only if it takes
// more than 10 s; then no other follows.
void measure_passes(const ModelConfig& config, int T, double seconds, Measurement& m) {
  GPT2 model;
  forget_peak_memory();
  gpt2_declare(model, config, {1, T});
  gpt2_allocate(model);
  init_weights(model, 1);
  const std::vector<int> tokens = random_tokens(T + 1, config.vocab_size);
  const double start = seconds_now();
  for (int pass = 0; pass < 2 || seconds_now() - start < seconds; pass++) {
    const double begin = seconds_now();
    gpt2_zero_grad(model);
    gpt2_micro_step(model, tokens.data(), tokens.data() + 1, 1, T, 1);
    const double taken = seconds_now() - begin;
    if (pass > 0 || taken > 10) m.step_seconds = std::min(m.step_seconds, taken);
    if (taken > 10) break;
  }
  m.peak_bytes = peak_memory(), m.planned_bytes = double(model.memory_plan.total());
}

// Forward and backward passes of a model of 4 layers of 4 heads of 64 on one sequence of T bytes, up to `longest`.
void bench_lengths(int longest, double seconds) {
  printf("| T | wiring | forward + backward, ms | plain / this | us a token | peak memory | planned |\n"
         "| --: | --- | --: | --: | --: | --: | --: |\n");
  for (int T = 1024; T <= longest; T *= 4) {
    double plain = 0;
    for (const std::string& wiring : wirings_by_length(T)) {
      ModelConfig config;
      config.num_layers = 4, config.num_heads = 4, config.channels = 256, config.vocab_size = 257;
      config.max_seq_len = T, config.wiring = parse_wiring(wiring);
      Measurement m;
      measure_passes(config, T, seconds, m);
      if (config.wiring.is_plain()) plain = m.step_seconds;
      printf("| %d | %s | %.1f | %.2f | %.1f | %s | %s |\n", T, wiring.c_str(), m.step_seconds * 1e3,
             plain / m.step_seconds, m.step_seconds / T * 1e6, bytes_text(m.peak_bytes).c_str(),
             bytes_text(m.planned_bytes).c_str());
      fflush(stdout);
    }
  }
}

// ----------------------------------------------------------------------------
// Beside PyTorch: a process for each way to train, which take turns

// A model and its batch as the arguments of `bench_cpu steps` and `torch_sla.py steps`.
struct Shape {
  const char* name;
  const char* arguments;  // layers heads channels vocabulary T B wiring
  int tokens;             // of a step
};
constexpr Shape compared[] = {{"124M, B 4, T 64", "12 12 768 50257 64 4 plain", 256},
                              {"124M, B 1, T 1,024", "12 12 768 50257 1024 1 plain", 1024},
                              {"8 layers, 256 channels, bytes, B 2, T 256", "8 8 256 257 256 2 sla(6,6)", 512}};

ModelConfig config_of(const std::vector<std::string>& a) {
  ModelConfig config;
  config.num_layers = std::stoi(a[0]), config.num_heads = std::stoi(a[1]), config.channels = std::stoi(a[2]);
  config.vocab_size = std::stoi(a[3]), config.max_seq_len = std::stoi(a[4]), config.wiring = parse_wiring(a[6]);
  return config;
}

// The model of such arguments, in training: two steps have been made.
struct Training {
  const ModelConfig config;
  const int B, T;
  const std::vector<int> tokens;
  GPT2 model;
  int64_t steps = 0;

  explicit Training(const std::vector<std::string>& a, bool muon = false)
      : config(config_of(a)), B(std::stoi(a[5])), T(config.max_seq_len),
        tokens(random_tokens(int64_t(B) * T + 1, config.vocab_size)) {
    PlanOptions plan = {B, T};
    plan.muon = muon;
    gpt2_declare(model, config, plan);
    gpt2_allocate(model);
    init_weights(model, 1);
    step(), step();
  }
  void step() { training_step(model, tokens, B, T, ++steps); }
  UpdateCost cost() const {
    UpdateCost cost = cost_beside_model(model, 1);
    cost.flops += flops_per_token(config, model.attention_plan, T) * B * T;
    return cost;
  }
};

// For each line on stdin, a number of seconds: trains for so long, and prints the median time of a step and the least
// that it could take.
void serve_steps(const std::vector<std::string>& a) {
  Training training(a);
  for (double seconds; scanf("%lf", &seconds) == 1;) {
    std::vector<double> times;
    for (const double start = seconds_now(); times.size() < 3 || seconds_now() - start < seconds;) {
      const double begin = seconds_now();
      training.step();
      times.push_back(seconds_now() - begin);
    }
    printf("%.6f %.4g\n", median(times), training.cost().seconds(measure_ceilings(training.model, 0.2)));
    fflush(stdout);
  }
}

// A process that answers as serve_steps does.
struct Worker {
  std::string name;
  FILE *to = nullptr, *from = nullptr;
  pid_t child = -1;
  double ready = 0;             // seconds from its start to its first steps' end, in which PyTorch may compile
  std::vector<double> seconds;  // of a step, in each round
  double limit = 1e30;          // the least that a step could take, of all rounds; 1e30 if it says none

  Worker(const std::string& name, const std::string& command) : name(name) {
    int in[2], out[2];
    CHECK(pipe(in) == 0 && pipe(out) == 0);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      dup2(in[0], 0), dup2(out[1], 1);
      for (int end : {in[0], in[1], out[0], out[1]}) close(end);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    close(in[0]), close(out[1]);
    // Workers that are started later must not inherit these pipes, which would keep this worker's stdin open.
    fcntl(in[1], F_SETFD, FD_CLOEXEC), fcntl(out[0], F_SETFD, FD_CLOEXEC);
    to = fdopen(in[1], "w"), from = fdopen(out[0], "r");
  }
  Worker(Worker&& o) noexcept
      : name(o.name), to(std::exchange(o.to, nullptr)), from(std::exchange(o.from, nullptr)), child(o.child) {}
  ~Worker() {
    if (to == nullptr) return;
    fclose(to), fclose(from);  // it ends where its stdin does
    waitpid(child, nullptr, 0);
  }
  // False if it has ended.
  bool measure(double for_seconds, bool counts) {
    fprintf(to, "%g\n", for_seconds), fflush(to);
    char line[256];
    double time = 0, least = 1e30;
    if (fgets(line, sizeof line, from) == nullptr || sscanf(line, "%lf %lf", &time, &least) < 1) return false;
    if (counts) seconds.push_back(time);
    limit = std::min(limit, least);
    return true;
  }
  double step_seconds() const { return median(seconds); }
};

// Says what is being measured, for whoever waits.
void print_progress(const std::string& line) { fprintf(stderr, "%s\n", line.c_str()); }

// `folders`: of builds, such as one of this commit and one of an earlier commit. `quick`: without PyTorch's compiled
// models, which take minutes each to compile.
void compare(const std::vector<std::string>& folders, const std::string& python, int rounds, double seconds,
             bool quick) {
  const bool has_torch = system((python + " -c 'import torch' >/dev/null 2>&1").c_str()) == 0;
  if (!has_torch) fprintf(stderr, "%s has no PyTorch to compare with\n", python.c_str());
  std::vector<std::string> torch_precisions, torch_options = {""};
  if (has_torch) torch_precisions = {"bf16", "fp32"};
  if (has_torch && !has_bf16_matmuls()) {
    torch_precisions = {"fp32"};
    print_progress("PyTorch in bf16 is left out: without AVX512-BF16 or AMX it takes twenty times as long as in fp32");
  }
  if (!quick) torch_options.push_back(" --compile");
  printf("| model | trained by | ms/step | tokens/s | of the best of PyTorch | of the limit | ready after, s "
         "|\n"
         "| --- | --- | --: | --: | --: | --: | --: |\n");
  fflush(stdout);
  for (const Shape& shape : compared) {
    const std::string of_shape = std::string(" steps ") + shape.arguments;
    const std::string quoted =
        of_shape.substr(0, of_shape.rfind(' ')) + " '" + of_shape.substr(of_shape.rfind(' ') + 1) + "'";
    std::vector<Worker> workers;
    for (const std::string& folder : folders)
      for (const std::string precision : {"bf16", "fp32"})
        if (const std::string program = folder + "/" + precision + "/bench_cpu"; access(program.c_str(), X_OK) == 0)
          workers.emplace_back(folders.size() > 1 ? precision + ", " + folder : precision, program + quoted);
    const size_t ours = workers.size();
    if (ours == 0) user_error("%s: no bf16/bench_cpu and no fp32/bench_cpu there", folders[0].c_str());
    for (const std::string& precision : torch_precisions)
      for (const std::string& option : torch_options)
        workers.emplace_back("PyTorch, " + precision + (option.empty() ? "" : ", compiled"),
                             python + " dev/bench/torch_sla.py" + quoted + " --precision " + precision + option);
    print_progress(shape.name);
    for (Worker& worker : workers) {  // one after the other, so that they do not compile at the same time
      const double begin = seconds_now();
      if (!worker.measure(0.1, false)) user_error("%s: no answer", worker.name.c_str());
      worker.ready = seconds_now() - begin;
      print_progress(format("  %s: ready after %.0f s", worker.name.c_str(), worker.ready));
    }
    for (int round = 1; round <= rounds; round++)
      for (Worker& worker : workers) {
        if (!worker.measure(seconds, true)) user_error("%s: no answer", worker.name.c_str());
        print_progress(
            format("  %d of %d, %s: %.1f ms", round, rounds, worker.name.c_str(), worker.seconds.back() * 1e3));
      }
    double best = 1e30;
    for (size_t i = ours; i < workers.size(); i++) best = std::min(best, workers[i].step_seconds());
    for (const Worker& worker : workers)
      printf("| %s | %s | %.1f | %.0f | %s | %s | %.0f |\n", shape.name, worker.name.c_str(),
             worker.step_seconds() * 1e3, shape.tokens / worker.step_seconds(),
             has_torch ? format("%.2f", best / worker.step_seconds()).c_str() : "",
             worker.limit < 1e30 ? format("%.0f %%", 100 * worker.limit / worker.step_seconds()).c_str() : "",
             worker.ready);
    fflush(stdout);
  }
}

// ----------------------------------------------------------------------------
// A step's time by operation

void bench_profile(const Shape& shape, double seconds, bool muon) {
  std::istringstream words(shape.arguments);
  Training training({std::istream_iterator<std::string>(words), {}}, muon);
  profile = Profile();
  const Ceilings most = measure_ceilings(training.model, 0.5);
  const UpdateCost cost = training.cost();
  const double start = seconds_now();
  int steps = 0;
  for (; steps < 3 || seconds_now() - start < seconds; steps++) training.step();
  const double step = (seconds_now() - start) / steps;
  printf("\n| %s, %s%s | calls | ms/step | of the step |\n| --- | --: | --: | --: |\n", shape.name, precision_name,
         muon ? ", Muon" : "");
  double others = step;
  for (const Profile::Operation& o : profile.sorted()) {
    printf("| %s | %lld | %.2f | %.1f %% |\n", o.name.c_str(), (long long)(o.calls / steps), o.seconds / steps * 1e3,
           100 * o.seconds / steps / step);
    others -= o.seconds / steps;
  }
  printf("| all else | | %.2f | %.1f %% |\n| **whole step** | | **%.1f** | |\n", others * 1e3, 100 * others / step,
         step * 1e3);
  printf("| its FLOPs at the GEMM rate of this run, %.0f GFLOP/s | | %.1f | %.1f %% |\n", most.gemm * 1e-9,
         cost.flops / most.gemm * 1e3, 100 * cost.flops / most.gemm / step);
  printf("| %s of weights, gradients and moments at the copy bandwidth, %.1f GB/s | | %.1f | %.1f %% |\n",
         bytes_text(cost.bytes).c_str(), most.copy * 1e-9, cost.bytes / most.copy * 1e3,
         100 * cost.bytes / most.copy / step);
  printf("| **the limit: their sum** | | **%.1f** | **%.1f %%** |\n", cost.seconds(most) * 1e3,
         100 * cost.seconds(most) / step);
  fflush(stdout);
}

// ----------------------------------------------------------------------------
// What a wiring costs

struct WiringCost {
  double update = 1e30, attention = 1e30, sums = 1e30;  // processor seconds, each the least of all updates
  double flops = 0, kv_bytes = 0;                       // of a token
};

// Some updates of one sequence of T tokens, after one that does not count.
void measure_wiring(ModelConfig config, const std::string& wiring, int T, WiringCost& cost) {
  config.wiring = parse_wiring(wiring), config.max_seq_len = T;
  GPT2 model;
  gpt2_declare(model, config, {1, T});
  gpt2_allocate(model);
  init_weights(model, 1);
  const std::vector<int> tokens = random_tokens(T + 1, config.vocab_size);
  for (int step = 1; step <= 3; step++) {
    profile.operations.clear();
    const double begin = processor_seconds();
    training_step(model, tokens, 1, T, step);
    if (step == 1) continue;
    cost.update = std::min(cost.update, processor_seconds() - begin);
    cost.attention = std::min(cost.attention, profile.seconds_of(attention_operations));
    cost.sums = std::min(cost.sums, profile.seconds_of(layer_sums));
  }
  cost.flops = flops_per_token(config, model.attention_plan, T);
  cost.kv_bytes = double(kv_bytes_per_token(config, model.attention_plan, sizeof(floatX)));
}

// Updates of GPT-2 124M; the wirings take turns, and each one's fastest counts, in processor time.
void bench_wirings(int rounds, const std::vector<std::string>& wirings) {
  const int T = 1024;
  ModelConfig d12;
  CHECK(config_from_preset("d12", d12));
  profile.clock = processor_seconds;
  std::vector<WiringCost> costs(wirings.size());
  for (int round = 0; round < rounds; round++)
    for (size_t i = 0; i < wirings.size(); i++) {
      measure_wiring(d12, wirings[i], T, costs[i]);
      print_progress(format("%d of %d, %s: %.0f ms", round + 1, rounds, wirings[i].c_str(), costs[i].update * 1e3));
    }
  printf("| 124M, B 1, T %d, %s | update, ms of processor time | / %s | of it attention | / %s | sums over layers | "
         "K/V bytes per token | FLOPs / %s |\n| --- | --: | --: | --: | --: | --: | --: | --: |\n",
         T, precision_name, wirings[0].c_str(), wirings[0].c_str(), wirings[0].c_str());
  for (size_t i = 0; i < wirings.size(); i++) {
    const WiringCost &c = costs[i], &first = costs[0];
    printf("| %s | %.0f | %.3f | %.1f | %.2f | %.1f | %.0f | %.3f |\n", wirings[i].c_str(), c.update * 1e3,
           c.update / first.update, c.attention * 1e3, c.attention / first.attention, c.sums * 1e3, c.kv_bytes,
           c.flops / first.flops);
  }
}

// The processor time of a training step by Muon of 8 layers of 256 channels, and of each operation in it, for several
// wirings, which take turns of one step; the medians of the rounds count. FLOPs are the model's and Muon's.
void bench_operations(int rounds, const std::vector<std::string>& wirings) {
  struct Steps {
    std::unique_ptr<Training> training;
    std::vector<double> seconds;
    std::map<std::string, std::vector<double>> operations;
    std::map<std::string, int64_t> calls;  // in a step
  };
  std::vector<Steps> all;
  for (const std::string& wiring : wirings) {
    const std::vector<std::string> shape = {"8", "8", "256", "257", "256", "4", wiring};
    all.push_back({std::make_unique<Training>(shape, /*muon=*/true), {}, {}, {}});
  }
  profile.clock = processor_seconds;
  std::map<std::string, double> longest;  // of each operation
  for (int round = 0; round < rounds; round++)
    for (Steps& steps : all) {
      profile.operations.clear();
      const double begin = processor_seconds();
      steps.training->step();
      double others = processor_seconds() - begin;
      steps.seconds.push_back(others);
      for (const Profile::Operation& o : profile.operations) {
        steps.operations[o.name].push_back(o.seconds), steps.calls[o.name] = o.calls;
        others -= o.seconds;
      }
      steps.operations["all else"].push_back(others);
      for (const auto& [name, seconds] : steps.operations) longest[name] = std::max(longest[name], median(seconds));
    }
  std::vector<std::string> names;
  for (const auto& [name, seconds] : longest) names.push_back(name);
  std::sort(names.begin(), names.end(),
            [&](const std::string& a, const std::string& b) { return longest[a] > longest[b]; });

  printf("| processor time of a step, ms, %s, Muon, B 4, T 256 |", precision_name);
  for (const std::string& wiring : wirings) printf(" calls | %s |", wiring.c_str());
  printf("\n| --- |");
  for (size_t i = 0; i < wirings.size(); i++) printf(" --: | --: |");
  for (const std::string& name : names) {
    printf("\n| %s |", name.c_str());
    for (Steps& steps : all) {
      const bool is_called = steps.operations.count(name) > 0;
      printf(is_called && steps.calls.count(name) > 0 ? " %lld |" : " |", (long long)steps.calls[name]);
      printf(is_called ? " %.2f |" : " |", is_called ? median(steps.operations[name]) * 1e3 : 0);
    }
  }
  const auto row = [&](const char* name, const auto& value) {
    printf("\n| %s |", name);
    for (const Steps& steps : all) printf(" | %s |", value(steps).c_str());
  };
  const double first = median(all[0].seconds);
  row("**whole step**", [](const Steps& s) { return format("**%.1f**", median(s.seconds) * 1e3); });
  row("of the first", [&](const Steps& s) { return format("%.3f", median(s.seconds) / first); });
  row("GFLOP", [](const Steps& s) { return format("%.3f", s.training->cost().flops * 1e-9); });
  printf("\n");
}

// bench_cpu: tables of this precision. bench_cpu compare FOLDER[,FOLDER...] PYTHON ROUNDS SECONDS [--quick]:
// FOLDER/{bf16,fp32}/bench_cpu, those that there are, beside PyTorch; quick: not compiled. bench_cpu steps SHAPE: a
// worker of that. bench_cpu profile SECONDS: the time of each operation in steps of the shapes that are compared, and
// of the last one with Muon. bench_cpu attention ROUNDS [WIRING...]: attention alone, by wiring. bench_cpu wirings
// ROUNDS WIRING...: updates of GPT-2 124M beside the first wiring's, in processor time. bench_cpu operations ROUNDS
// WIRING...: the processor time of each operation in steps of the wirings, which take turns; for one thread,
// OMP_NUM_THREADS=1. bench_cpu documents ROUNDS: attention within documents beside plain, in processor time. bench_cpu
// lengths LONGEST SECONDS: passes over sequences of 1,024 to LONGEST tokens. bench_cpu ceilings: the rate of matmuls in
// FLOP/s, and of copies in bytes/s.
int run_bench(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (argc == 9 && arguments[0] == "steps") return serve_steps({arguments.begin() + 1, arguments.end()}), 0;
  const bool quick = argc == 7 && arguments[5] == "--quick";
  if ((argc == 6 || quick) && arguments[0] == "compare")
    return compare(split(arguments[1], ','), arguments[2], std::stoi(arguments[3]), std::stod(arguments[4]), quick), 0;
  if (argc == 2 && arguments[0] == "ceilings")
    return printf("%.6g %.6g\n", gemm_peak(0.5), copy_bandwidth(256 << 20, 1)), 0;
  if (argc == 4 && arguments[0] == "lengths") return bench_lengths(std::stoi(arguments[1]), std::stod(arguments[2])), 0;
  if (argc >= 3 && arguments[0] == "attention") {
    const std::vector<std::string> wirings(arguments.begin() + 2, arguments.end());
    return bench_attention(std::stoi(arguments[1]), wirings.empty() ? attention_wirings : wirings), 0;
  }
  if (argc == 3 && arguments[0] == "documents") return bench_documents(std::stoi(arguments[1])), 0;
  if (argc >= 4 && arguments[0] == "wirings")
    return bench_wirings(std::stoi(arguments[1]), {arguments.begin() + 2, arguments.end()}), 0;
  if (argc >= 4 && arguments[0] == "operations")
    return bench_operations(std::stoi(arguments[1]), {arguments.begin() + 2, arguments.end()}), 0;
  if (argc == 3 && arguments[0] == "profile") {
    for (const Shape& shape : compared) bench_profile(shape, std::stod(arguments[1]), /*muon=*/false);
    bench_profile(compared[2], std::stod(arguments[1]), /*muon=*/true);
    return 0;
  }
  ModelConfig d12, small;
  CHECK(config_from_preset("d12", d12));
  small.num_layers = 8, small.num_heads = 8, small.channels = 256, small.vocab_size = 257;
  small.wiring = default_wiring(small.num_layers, small.num_heads);
  const Setting settings[] = {{"124M", d12, 4, 64, 6},
                              {"124M", d12, 1, 1024, 12},
                              {"8 layers, 256 channels, bytes", small, 1, 4096, 6},
                              {"8 layers, 256 channels, bytes", small, 1, 8192, 12}};
  printf("| model | B | T | attention | ms/step | tokens/s | GFLOP/s | %s GEMM GFLOP/s | share | SLA / baseline | peak "
         "memory | planned |\n",
         precision_name);
  printf("| --- | --: | --: | --- | --: | --: | --: | --: | --: | --: | --: | --: |\n");
  for (const Setting& s : settings) {
    Measurement m[2];
    for (int round = 0; round < 2; round++)  // alternating, so that a slow minute of the machine hits both
      for (int skips : {0, 1}) measure(s, skips != 0, m[skips]);
    for (int skips : {0, 1}) {
      const Measurement& x = m[skips];
      const double rate = x.flops / x.step_seconds, gemm = std::max(m[0].gemm, m[1].gemm);
      const std::string name = skips ? s.config.wiring.text : "plain";
      printf("| %s | %d | %d | %s | %.0f | %.0f | %.0f | %.0f | %.1f %% | %s | %s | %s |\n", s.name, s.B, s.T,
             name.c_str(), x.step_seconds * 1e3, s.B * s.T / x.step_seconds, rate * 1e-9, gemm * 1e-9,
             100 * rate / gemm, skips ? format("%.3f", m[0].step_seconds / x.step_seconds).c_str() : "",
             bytes_text(x.peak_bytes).c_str(), bytes_text(x.planned_bytes).c_str());
      fflush(stdout);
    }
  }
  bench_attention(10, attention_wirings);
  return 0;
}

int main(int argc, char** argv) {
  configure_threads(argv);
  return run_program([&] { return run_bench(argc, argv); });
}
