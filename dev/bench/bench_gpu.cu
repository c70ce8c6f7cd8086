// How fast the trainer is on this GPU, against ceilings that are measured in the same run: operations one by one as
// shares of the copy bandwidth or of the GEMM rate, the matmuls' algorithms, attention alone, whole training steps as
// shares of the GEMM rate; and operations and steps beside what they should take by arithmetic (gpu_model.h). `make
// gpu-check` runs it.
//
//   bench_gpu [--tune] [--tiny] [--json FILE]
//
// With --tune it leaves out whole steps and all wirings but plain, takes each kind of attention's kernels, and says
// what is fastest. With --tiny it takes a model of a few thousand parameters, to see that the benchmark itself runs.
// Markdown goes to stdout, the same figures as JSON to FILE. The exit status is 1 if a matmul does not give the same
// bits each time.
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include "dev/bench/gpu_model.h"
#include "dev/bench/gpu_time.h"
#include "llmc/model/flops.h"
#include "llmc/train/print.h"
#include "random_tokens.h"

using nlohmann::json;

struct Scale {
  ModelConfig config;
  int tokens;                    // B * T of a micro-batch
  std::vector<int> lengths;      // of sequences
  size_t copy_bytes;             // moved to measure the bandwidth
  int repeats;                   // of a matmul whose bits are compared
  double seconds_per_operation;  // timed for about so long
  double seconds_per_training;
  size_t least_runs;  // that are timed
  bool tunes = false;
};

Scale scale_124m() {
  Scale s = {ModelConfig(), 32768, {1024, 4096, 8192, 16384}, size_t(1) << 30, 100, 0.05, 1, 3};
  CHECK(config_from_preset("d12", s.config));
  return s;
}

Scale scale_tiny() {
  Scale s = {ModelConfig(), 128, {64, 128}, size_t(1) << 20, 3, 0, 0, 1};
  s.config.num_layers = 4, s.config.num_heads = 4, s.config.channels = 32, s.config.vocab_size = 257;
  return s;
}

struct Ceilings {
  double copy;  // bytes/s
  double gemm;  // FLOP/s
};

// FLOPs of q k^T and p v of layer l, for pairs of a query and a key that see each other. The backward pass has five
// such products to their two.
double attention_flops_of(const GPT2& model, int l, int64_t B, int64_t T) {
  return 4.0 * double(B) * attention_pairs(model.attention_plan, l, T).scored * model.config.head_size();
}

// Wirings to compare: plain, the default, about a third as many K/V heads, and masks.
std::vector<std::string> wirings_of(const ModelConfig& c) {
  int kv_heads = std::max(1, c.num_heads / 3);
  while (c.num_heads % kv_heads != 0) kv_heads--;
  return {"plain", default_wiring(c.num_layers, c.num_heads).text, format("gqa(%d)", kv_heads), "window(256)",
          "strided(64)"};
}

// Each operation of a training step with the shapes of the last layer, whose last heads use the K/V of another one.
json bench_operations(const Scale& scale, const Ceilings& ceilings) {
  const int T = scale.lengths[0], B = scale.tokens / T;
  ModelConfig config = scale.config;
  config.max_seq_len = T;
  config.wiring = default_wiring(config.num_layers, config.num_heads);
  GPT2 model;
  gpt2_declare(model, config, {B, T});
  gpt2_allocate(model);
  init_weights(model, 1);
  const std::vector<int> tokens = random_tokens(scale.tokens, config.vocab_size);
  gpt2_zero_loss(model);
  gpt2_micro_step(model, tokens.data(), tokens.data(), B, T, 1);  // every tensor holds what it does in training

  // The last layer's sublayers, and the operations that their passes call.
  const int l = config.num_layers - 1;
  const Sublayers& sublayers = model.sublayers;
  const Sublayer &attention_sublayer = sublayers.list[sublayers.list.size() - 2], &mlp_sublayer = sublayers.list.back();
  const AttentionBranch& att = *attention_of(attention_sublayer);
  const MlpBranch& mlp = std::get<MlpBranch>(mlp_sublayer.branch);
  const AddResidual& add = std::get<AddResidual>(attention_sublayer.residual);
  const Norm &ln1 = attention_sublayer.norm, &ln2 = mlp_sublayer.norm;
  const Activations& a = model.acts;
  const Batch batch = {B, T};
  const int64_t N = scale.tokens, C = config.channels, H = config.hidden_size(), QKV = att.projection.QKV,
                Vp = model.logit_stride;
  const int64_t rows = std::min<int64_t>(model.logit_rows, N), x = sizeof(floatX), P = model.parameters.num_parameters;
  const AttentionArgs attention = attention_args(att, 0, batch);
  const double attention_flops = attention_flops_of(model, l, B, T);
  const AdamWStep step = {1e-9f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.05f, 1.0, 0.1f};

  json results = json::array();
  printf("| operation | time, us | GB/s | TFLOP/s | share of its ceiling |\n| --- | --: | --: | --: | --: |\n");
  auto bench = [&](const char* name, int64_t bytes, double flops, const std::function<void()>& run) {
    const double seconds = time_of(GpuTimer(), run, scale.seconds_per_operation, scale.least_runs);
    const double bandwidth = double(bytes) / seconds, rate = flops / seconds;
    const double share = flops > 0 ? rate / ceilings.gemm : bandwidth / ceilings.copy;
    printf("| %s | %.1f | %s | %s | %.1f %% of %s |\n", name, seconds * 1e6,
           flops > 0 ? "" : format("%.0f", bandwidth * 1e-9).c_str(),
           flops > 0 ? format("%.1f", rate * 1e-12).c_str() : "", 100 * share, flops > 0 ? "GEMM" : "copy");
    fflush(stdout);
    results.push_back(
        {{"operation", name}, {"seconds", seconds}, {"bytes", bytes}, {"flops", flops}, {"share", share}});
  };
  auto matmul = [&](int64_t in, int64_t out) { return 2.0 * double(N) * double(in) * double(out); };

  bench("embedding_forward", N * (3 * C * x + 4), 0,
        [&] { embedding_forward(a.embedded, a.tokens, {T}, model.params.wte, model.params.wpe, N, C); });
  bench("layernorm_forward", N * (2 * C * x + 8), 0, [&] { norm_forward(ln1, N); });
  bench("residual_layernorm_forward", N * (4 * C * x + 8), 0, [&] { residual_forward(add, ln2, batch); });
  bench("matmul_forward, qkv", 0, matmul(C, QKV), [&] { projection_forward(att.projection, batch, /*again=*/false); });
  bench("attention_forward", 0, attention_flops, [&] { attend(att, 0, batch); });
  bench("matmul_forward, attproj", 0, matmul(C, C), [&] { project_out(att, batch); });
  std::vector<bool> gelu_ways = {false};
  if (has_master_weights) gelu_ways.push_back(true);  // cuBLASLt fuses it in bf16
  for (bool fused : gelu_ways)
    bench(fused ? "matmul_activation_forward, fc, fused" : "matmul_activation_forward, fc", 0, matmul(C, H), [&] {
      matmul_activation_forward(mlp.activation, mlp.fch_act, mlp.fch, mlp.in, mlp.w.fcw, mlp.w.fcb, N, C, H, fused);
    });
  bench("matmul_forward, fcproj", 0, matmul(H, C),
        [&] { matmul_forward(mlp.out, mlp.fch_act, mlp.w.projw, mlp.w.projb, N, H, C); });
  bench("activation_forward", N * H * 2 * x, 0, [&] { activation_again(mlp, batch); });
  const double head_flops = 2.0 * double(rows) * double(Vp) * double(C);
  bench("head logits, one chunk", 0, head_flops, [&] { head_forward(model.head(), 0, rows); });
  bench("head gradients, one chunk", 0, 2 * head_flops, [&] { head_backward(model.head(), 0, rows); });
  bench("activation_backward", N * H * 3 * x, 0, [&] { activation_backward(mlp.activation, mlp.dfch, mlp.fch, N, H); });
  for (bool fused : gelu_ways)
    bench(fused ? "matmul_activation_backward, fcproj, fused" : "matmul_activation_backward, fcproj", 0,
          2 * matmul(H, C), [&] {
            matmul_activation_backward(mlp.activation, mlp.dfch, mlp.g.projw, mlp.g.projb, a.dresidual, mlp.fch_act,
                                       mlp.fch, mlp.w.projw, N, H, C, fused);
          });
  // What has a candidate beside it.
  const Candidates asked_for = gpu().candidates;
  for (bool candidate : {false, true}) {
    if (candidate && !scale.tunes) break;
    if (scale.tunes) gpu().candidates = {candidate, candidate, candidate};
    auto bench_both = [&](const std::string& name, int64_t bytes, double flops, const std::function<void()>& run) {
      const std::string full = name + (candidate ? ", candidate" : "");
      try {
        bench(full.c_str(), bytes, flops, run);
      } catch (const UserError& e) {  // a cuBLASLt that has no such epilogue for a shape
        printf("| %s | %s ||||\n", full.c_str(), e.what());
      }
    };
    bench_both("classifier, one chunk", rows * Vp * 2 * x, 0, [&] {
      classifier({a.losses, a.logits, a.tokens, rows, config.vocab_size, Vp, 1e-6f, true});
    });
    bench_both("matmul_backward, qkv", 0, 2 * matmul(C, QKV), [&] { projection_backward(att.projection, batch); });
    bench_both("matmul_backward, attproj", 0, 2 * matmul(C, C), [&] {
      matmul_backward(att.datt, att.g.projw, att.g.projb, a.dresidual, att.att, att.w.projw, N, C, C);
    });
    bench_both("matmul_backward, fc", 0, 2 * matmul(C, H),
               [&] { matmul_backward(mlp.din, mlp.g.fcw, mlp.g.fcb, mlp.dfch, mlp.in, mlp.w.fcw, N, C, H); });
    bench_both("layernorm_backward", N * (4 * C * x + 8), 0, [&] { norm_backward(ln2, N); });
  }
  gpu().candidates = asked_for;
  bench("attention_backward", 0, 2.5 * attention_flops, [&] { attention_backward(attention); });
  bench("embedding_backward", N * (C * x + 4), 0,
        [&] { embedding_backward(model.grads.wte, model.grads.wpe, a.dresidual, a.tokens, B, T, C); });
  bench("sum_of_squares", P * 4, 0, [&] { gpt2_square_grads(model); });
  bench("adamw_update", P * (4 * 4 + 3 * 4 + (has_master_weights ? x : 0)), 0, [&] {
    adamw_update(model.weight_memory, has_master_weights ? model.master_memory : nullptr, model.m_memory,
                 model.v_memory, model.grad_memory, model.chunks.data, int64_t(model.chunks.size), step, a.stats);
  });
  return results;
}

// ----------------------------------------------------------------------------
// The matmuls' algorithms

// Device memory, freed with its owner.
struct DeviceBytes {
  char* data;
  size_t size;

  explicit DeviceBytes(size_t size) : data(static_cast<char*>(device_malloc(size))), size(size) {}
  template <class T>
  explicit DeviceBytes(const std::vector<T>& host) : DeviceBytes(host.size() * sizeof(T)) {
    copy_to_device(data, host.data(), size);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { device_free(data, size); }

  // Queues copies of `source`, one after the other until this is full.
  void fill(const DeviceBytes& source) const {
    for (size_t at = 0; at < size; at += source.size)
      CUDA_CHECK(cudaMemcpyAsync(data + at, source.data, std::min(source.size, size - at), cudaMemcpyDeviceToDevice,
                                 gpu().stream));
  }
};

// Random values in [-1, 1), which have many different bits: zeros would take less power and run at a higher clock.
template <class T>
std::vector<T> random_pattern() {
  std::vector<T> values(1 << 19);
  for (size_t i = 0; i < values.size(); i++)
    from_float(values[i], float(2 * random_uniform(1, RandomStream::test, 1, i) - 1));
  return values;
}

constexpr int compare_threads = 256;

// *differ = 1 if a (n) and b (n) have different bits. A thread owns every (gridDim.x * 256)th element.
__global__ void __launch_bounds__(compare_threads)
    compare_bits_kernel(int* differ, const uint4* a, const uint4* b, int64_t n) {
  for (int64_t i = int64_t(blockIdx.x) * compare_threads + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * compare_threads) {
    const uint4 x = a[i], y = b[i];
    if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) *differ = 1;
  }
}

void compare_bits(int* differ, const DeviceBytes& a, const DeviceBytes& b) {
  CHECK(a.size == b.size && a.size % sizeof(uint4) == 0);
  const int64_t n = int64_t(a.size / sizeof(uint4));
  const dim3 grid(unsigned(std::min<int64_t>(ceil_div(n, compare_threads), 8 * gpu().multiprocessors)));
  launch(compare_bits_kernel, grid, compare_threads, 0, differ, reinterpret_cast<const uint4*>(a.data),
         reinterpret_cast<const uint4*>(b.data), n);
}

// A shape of matmuls with operands of its own.
struct GemmBench {
  const GemmShape& shape;
  const GemmPlan& plan;
  DeviceBytes in_values, out_values;  // what operands and outputs are filled with
  DeviceBytes a, b, c, bias, aux;

  static size_t bytes(cudaDataType type, int64_t elements) { return size_t(elements) * (type == CUDA_R_32F ? 4 : 2); }
  GemmBench(const GemmShape& s, const GemmPlan& plan)
      : shape(s), plan(plan), in_values(random_pattern<floatX>()),
        out_values(s.out_type == CUDA_R_32F ? DeviceBytes(random_pattern<float>())
                                            : DeviceBytes(random_pattern<floatX>())),
        a(bytes(s.type, s.lda * (s.op_a == 'T' ? s.m : s.k))), b(bytes(s.type, s.ldb * (s.op_b == 'T' ? s.k : s.n))),
        c(bytes(s.out_type, s.ldc * s.n)), bias(bytes(s.bias_type(), s.align_bias == 0 ? 0
                                                                     : s.sums_bias()   ? s.n
                                                                                       : s.m)),
        aux(s.align_aux > 0 ? c.size : 0) {
    a.fill(in_values), b.fill(in_values), bias.fill(in_values);
    set_outputs();
    set_epilogue_pointers(plan, {cublasLtEpilogue_t(s.epilogue), bias.data, aux.data});
  }
  void set_outputs() const { c.fill(out_values), aux.fill(out_values); }
  void run(const cublasLtMatmulAlgo_t& algo) const { run_gemm(shape, plan, algo, a.data, b.data, c.data); }

  // Whether an algorithm gives the same bits each time.
  bool has_the_same_bits(const cublasLtMatmulAlgo_t& algo, int repeats) const {
    const DeviceBytes first_c(c.size), first_aux(aux.size), first_bias(bias.size);
    const DeviceArray<int> differ(std::vector<int>{0});
    for (int i = 0; i < repeats; i++) {
      set_outputs();
      run(algo);
      if (i == 0) first_c.fill(c), first_aux.fill(aux), first_bias.fill(bias);
      compare_bits(differ.data, c, first_c);
      if (aux.size > 0) compare_bits(differ.data, aux, first_aux);
      if (shape.sums_bias()) compare_bits(differ.data, bias, first_bias);
    }
    return differ.to_host()[0] == 0;
  }
};

// Every shape of matmuls that bench_operations has called: whether its bits are the same each time, and what choosing
// the fastest of the heuristic's first eight algorithms would win over its first. Training uses that, or the one that
// gemm_choices.h has; its lines for this GPU follow. Shapes are column-major, as cuBLASLt gets them.
json bench_algorithms(const Scale& scale) {
  json results = json::array();
  double sum_of_first = 0, sum_of_fastest = 0;
  std::string choices;
  printf("\n| matmul: m, n, k | operations | epilogue | bits of %d runs | first algorithm, us | TFLOP/s | fastest, us "
         "| which |\n"
         "| --- | --- | --: | --- | --: | --: | --: | --: |\n",
         scale.repeats);
  for (const auto& [shape, plan] : gemm_plans()) {
    const GemmBench bench(shape, plan);
    const bool same = bench.has_the_same_bits(plan.algo, scale.repeats);
    const auto algorithms = gemm_algorithms(shape, plan, 8);
    std::vector<double> seconds;
    for (const cublasLtMatmulHeuristicResult_t& result : algorithms)
      seconds.push_back(time_of(
          GpuTimer(), [&] { bench.run(result.algo); }, scale.seconds_per_operation, scale.least_runs));
    const size_t fastest = size_t(std::min_element(seconds.begin(), seconds.end()) - seconds.begin());
    sum_of_first += seconds[0], sum_of_fastest += seconds[fastest];
    const double flops = 2.0 * double(shape.m) * double(shape.n) * double(shape.k);
    printf("| %lld, %lld, %lld | %c %c%s | %d | %s | %.1f | %.1f | %.1f | %zu of %zu |\n", (long long)shape.m,
           (long long)shape.n, (long long)shape.k, shape.op_a, shape.op_b, shape.accumulate ? ", +=" : "",
           shape.epilogue, same ? "the same" : "NOT THE SAME", seconds[0] * 1e6, flops / seconds[0] * 1e-12,
           seconds[fastest] * 1e6, fastest + 1, seconds.size());
    fflush(stdout);
    constexpr double least_gain = 0.02;
    if (is_whole(shape) && seconds[fastest] < (1 - least_gain) * seconds[0] &&
        bench.has_the_same_bits(algorithms[fastest].algo, scale.repeats)) {
      const GemmChoice c = gemm_choice(shape, int(fastest));
      choices += format("{\"%s\", %zu, '%c', '%c', %lld, %lld, %lld, %d, %d, %d, %s, %d},\n", c.gpu.c_str(), c.cublaslt,
                        c.op_a, c.op_b, (long long)c.m, (long long)c.n, (long long)c.k, c.type, c.out_type, c.epilogue,
                        c.accumulate ? "true" : "false", c.algorithm);
    }
    results.push_back({{"m", shape.m},
                       {"n", shape.n},
                       {"k", shape.k},
                       {"operations", std::string{shape.op_a, shape.op_b}},
                       {"accumulate", shape.accumulate},
                       {"epilogue", shape.epilogue},
                       {"same_bits", same},
                       {"seconds", seconds}});
  }
  printf("\nEach once: %.1f us by the first algorithms, %.1f us by the fastest of the first eight, %.1f %% less.\n",
         sum_of_first * 1e6, sum_of_fastest * 1e6, 100 * (1 - sum_of_fastest / sum_of_first));
  if (!choices.empty()) printf("\nFor llmc/cuda/gemm_choices.h:\n\n```\n%s```\n", choices.c_str());
  return results;
}

// ----------------------------------------------------------------------------
// Attention and training

// Attention alone, forward and forward with backward: layers with their own K/V for all heads, with shared K/V for the
// last three quarters, with fewer K/V heads and with masks; with the model's heads and with half as many of twice the
// size; and by mma and wgmma, where the GPU has both. dev/bench/torch_sla.py times PyTorch's with the same
// shapes.
json bench_attention(const Scale& scale) {
  json results = json::array();
  const AttentionBy asked_for = gpu().attention_by;
  std::vector<std::pair<std::string, AttentionBy>> ways(std::begin(attention_ways), std::end(attention_ways));
  ways.resize(!gpu().has_wgmma ? 1 : scale.tunes ? ways.size() : 2);  // mma; wgmma; the candidates
  std::string fastest;                                                // rows: by shape and pass, the way
  printf("\n| B | T | attention alone | forward, us | TFLOP/s | forward + backward, us | TFLOP/s |\n"
         "| --: | --: | --- | --: | --: | --: | --: |\n");
  for (int heads : {scale.config.num_heads, scale.config.num_heads / 2}) {
    for (int T : scale.lengths) {
      ModelConfig config = scale.config;
      config.num_heads = heads, config.num_layers = 2, config.max_seq_len = T;
      for (const std::string& wiring : scale.tunes ? std::vector<std::string>{"plain"} : wirings_of(config)) {
        config.wiring = parse_wiring(wiring);
        const int B = scale.tokens / T;
        double least_forward = INFINITY, least_backward = INFINITY;
        std::string forward_by, backward_by;
        GPT2 model;
        gpu().attention_by = ways.back().second;  // of which dS goes through memory that is planned
        gpt2_declare(model, config, {B, T});
        gpu().attention_by = asked_for;
        gpt2_allocate(model);
        init_weights(model, 1);
        // This gives q, k and v the values that they have in training.
        gpt2_forward(model, random_tokens(B * T, config.vocab_size).data(), {B, T});
        CUDA_CHECK(cudaStreamSynchronize(gpu().stream));

        AttentionArgs attention = attention_args(attention_of_layer(model.sublayers, 1), 0, {B, T});
        attention.dout = model.hidden_states();  // some gradient
        for (const auto& [way, by] : ways) {
          gpu().attention_by = by;
          const auto forward = [&] { attention_forward(attention); };
          const auto forward_backward = [&] {
            forward();
            attention_backward(attention);
          };
          const double seconds = time_of(GpuTimer(), forward, scale.seconds_per_operation, scale.least_runs);
          const double both_seconds =
              time_of(GpuTimer(), forward_backward, scale.seconds_per_operation, scale.least_runs);
          const double flops = attention_flops_of(model, 1, B, T);
          const double rate = flops / seconds, both_rate = 3.5 * flops / both_seconds;
          const std::string name = config.wiring.text + (by == AttentionBy::mma ? "" : ", " + way);
          printf("| %d | %d | %d heads of %d, %s | %.1f | %.1f | %.1f | %.1f |\n", B, T, heads, config.head_size(),
                 name.c_str(), seconds * 1e6, rate * 1e-12, both_seconds * 1e6, both_rate * 1e-12);
          fflush(stdout);
          results.push_back({{"B", B},
                             {"T", T},
                             {"heads", heads},
                             {"head_size", config.head_size()},
                             {"attention", name},
                             {"forward_seconds", seconds},
                             {"forward_flops", rate},
                             {"forward_backward_seconds", both_seconds},
                             {"forward_backward_flops", both_rate}});
          if (seconds < least_forward) least_forward = seconds, forward_by = way;
          if (both_seconds - seconds < least_backward) least_backward = both_seconds - seconds, backward_by = way;
        }
        fastest += format("| %d | %d | %s | %.1f | %s | %.1f |\n", config.head_size(), T, forward_by.c_str(),
                          least_forward * 1e6, backward_by.c_str(), least_backward * 1e6);
      }
    }
  }
  gpu().attention_by = asked_for;
  if (scale.tunes)
    printf("\n| channels of a head | T | fastest forward | us | fastest backward | us |\n"
           "| --: | --: | --- | --: | --- | --: |\n%s",
           fastest.c_str());
  return results;
}

// Whole steps: forward, backward, norm and update of one micro-batch.
json bench_training(const Scale& scale, const Ceilings& ceilings) {
  json results = json::array();
  printf("\n| B | T | attention | ms/step | tokens/s | TFLOP/s | share of GEMM | / plain | planned | used |\n"
         "| --: | --: | --- | --: | --: | --: | --: | --: | --: | --: |\n");
  for (int T : scale.lengths) {
    double baseline = 0;
    ModelConfig config = scale.config;
    config.max_seq_len = T;
    for (const std::string& wiring : wirings_of(config)) {
      config.wiring = parse_wiring(wiring);
      const int B = scale.tokens / T;
      const size_t free_before = device_memory_available();
      GPT2 model;
      gpt2_declare(model, config, {B, T});
      gpt2_allocate(model);
      init_weights(model, 1);
      const std::vector<int> tokens = random_tokens(B * T, config.vocab_size);
      int64_t step = 0;
      const double seconds = time_of(
          GpuTimer(),
          [&] {
            gpt2_zero_grad(model);
            gpt2_zero_loss(model);
            gpt2_micro_step(model, tokens.data(), tokens.data(), B, T, 1);
            gpt2_update(model, ++step, {1e-5, 0.9, 0.95, 1e-8, 0.1, 1.0});
            gpt2_read_stats(model);
          },
          scale.seconds_per_training, scale.least_runs);
      const double used = double(free_before) - double(device_memory_available());
      const double planned = double(model.memory_plan.total() - device_workspace_bytes());
      const double rate = double(scale.tokens) / seconds,
                   flops = rate * flops_per_token(config, model.attention_plan, T);
      if (config.wiring.is_plain()) baseline = rate;
      const std::string name = config.wiring.text;
      printf("| %d | %d | %s | %.1f | %.0f | %.1f | %.1f %% | %s | %s | %s |\n", B, T, name.c_str(), seconds * 1e3,
             rate, flops * 1e-12, 100 * flops / ceilings.gemm,
             config.wiring.is_plain() ? "" : format("%.3f", rate / baseline).c_str(), bytes_text(planned).c_str(),
             bytes_text(used).c_str());
      fflush(stdout);
      results.push_back({{"B", B},
                         {"T", T},
                         {"attention", name},
                         {"seconds_per_step", seconds},
                         {"tokens_per_second", rate},
                         {"flops", flops},
                         {"share_of_gemm", flops / ceilings.gemm},
                         {"planned_bytes", planned},
                         {"used_bytes", used}});
    }
  }
  return results;
}

// ----------------------------------------------------------------------------
// Measured beside modelled

// This GPU as the model knows it, or by this run's ceilings.
GpuSpec modelled_gpu(const Ceilings& ceilings) {
  for (const GpuSpec& known : {h100_sxm(), h200_sxm(), a100_sxm()})
    if (known.device_name == device_name()) return known;
  int index = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&index));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return other_gpu(device_name(), properties.multiProcessorCount, ceilings.gemm, ceilings.copy);
}

// A step of B sequences of T tokens, without allocating anything.
std::vector<ModelledOperation> modelled_step_of(const GpuSpec& gpu, ModelConfig config, const std::string& wiring,
                                                int B, int T) {
  config.max_seq_len = T;
  config.wiring = parse_wiring(wiring);
  GPT2 model;
  gpt2_declare(model, config, {B, T});
  return modelled_step(gpu, model);
}

struct ModelledCall {
  double seconds = 0;
  int calls = 0;  // in a step
};

// An operation of a step, or a part of one, by the name that its measurement has: "..., one chunk" is the first chunk
// of logits, other names mean the last layer's operation, or the only one. No calls: the step has none of that name.
ModelledCall modelled_call(const std::vector<ModelledOperation>& step, std::string name, int last_layer) {
  const size_t chunk = name.find(", one chunk");
  if (chunk != std::string::npos) name.resize(chunk);
  const int instance = chunk != std::string::npos ? 0 : last_layer;
  ModelledCall call;
  bool is_found = false;
  const auto count = [&](double seconds, int of) {
    call.calls++;
    if (!is_found) call.seconds = seconds, is_found = of == instance;
  };
  for (const ModelledOperation& operation : step) {
    if (operation.name == name) count(operation.seconds(), operation.instance);
    else
      for (const ModelledPart& part : operation.parts)
        if (part.name == name) count(part.seconds, operation.instance);
  }
  return call;
}

// The operations and steps of `report` beside what they should take. Where a row is much above 1, this GPU is slower
// than it should be; the last column says what that costs a step.
json compare_with_model(const Scale& scale, const Ceilings& ceilings, const json& report) {
  const GpuSpec gpu = modelled_gpu(ceilings);
  const int T = scale.lengths[0], B = scale.tokens / T, last_layer = scale.config.num_layers - 1;
  const std::string wiring = default_wiring(scale.config.num_layers, scale.config.num_heads).text;
  const std::vector<ModelledOperation> step = modelled_step_of(gpu, scale.config, wiring, B, T);
  json results = json::array();
  const auto row = [&](const std::string& what, int calls, double measured, double modelled) {
    printf("| %s | %d | %.3f | %.3f | %.2f | %.2f |\n", what.c_str(), calls, measured * 1e3, modelled * 1e3,
           measured / modelled, calls * (measured - modelled) * 1e3);
    results.push_back(
        {{"what", what}, {"calls", calls}, {"measured_seconds", measured}, {"modelled_seconds", modelled}});
  };
  printf("\nMeasured beside modelled (dev/bench/gpu-model.md), for %s: %d x %d tokens, %s.\n\n"
         "| operation | calls a step | measured, ms | modelled, ms | ratio | slower by, ms a step |\n| --- | --: | --: "
         "| --: | --: | --: |\n",
         gpu.name.c_str(), B, T, wiring.c_str());
  for (const json& operation : report.at("operations")) {
    const std::string name = operation.at("operation");
    const ModelledCall call = modelled_call(step, name, last_layer);
    if (call.calls > 0) row(name, call.calls, operation.at("seconds"), call.seconds);
    else printf("| %s | | %.3f | not modelled | | |\n", name.c_str(), double(operation.at("seconds")) * 1e3);
  }
  for (const json& training : report.at("training")) {
    const int b = training.at("B"), t = training.at("T");
    const std::string attention = training.at("attention");
    row(format("step, %d x %d, %s", b, t, attention.c_str()), 1, training.at("seconds_per_step"),
        modelled_seconds(modelled_step_of(gpu, scale.config, attention, b, t)));
  }
  return results;
}

int main(int argc, char** argv) {
  try {
    bool is_tiny = false, tunes = false;
    std::string json_path;
    for (int i = 1; i < argc; i++) {
      const std::string argument = argv[i];
      if (argument == "--tiny") is_tiny = true;
      else if (argument == "--tune") tunes = true;
      else if (argument == "--json" && i + 1 < argc) json_path = argv[++i];
      else user_error("%s: bench_gpu takes --tune, --tiny and --json FILE", argv[i]);
    }
    Scale scale = is_tiny ? scale_tiny() : scale_124m();
    if (tunes && !is_tiny) scale.lengths = {1024, 4096, 16384};
    scale.tunes = tunes;
    const Ceilings ceilings = {copy_bandwidth(scale.copy_bytes, 0.2), gemm_peak(0.3)};
    printf("%s, %s. Ceilings of this run: copy %.0f GB/s, GEMM %.1f TFLOP/s.\n\n", device_name(), precision_name,
           ceilings.copy * 1e-9, ceilings.gemm * 1e-12);
    json report = {{"device", device_name()},
                   {"precision", precision_name},
                   {"copy_bytes_per_second", ceilings.copy},
                   {"gemm_flops", ceilings.gemm}};
    gemm_plans().clear();  // the ceilings' GemmPlans
    report["operations"] = bench_operations(scale, ceilings);
    report["algorithms"] = bench_algorithms(scale);
    report["attention"] = bench_attention(scale);
    if (!scale.tunes) report["training"] = bench_training(scale, ceilings);
    if (has_master_weights && !scale.tunes)  // the model is of bf16
      report["modelled"] = compare_with_model(scale, ceilings, report);
    if (!json_path.empty()) write_file_durably(json_path, report.dump(2) + "\n");
    for (const json& matmul : report["algorithms"])
      if (!matmul["same_bits"])
        user_error("a matmul does not give the same bits each time; see the table of algorithms");
    return 0;
  } catch (const UserError& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
