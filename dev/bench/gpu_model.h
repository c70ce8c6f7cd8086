// How long each operation of a training step should take on a GPU, by arithmetic: bytes over bandwidth, products in
// waves of tiles over the rate of tensor cores, instructions over the rate at which they are issued, attention at the
// published rate of FlashAttention-2 times the ratio that our machine code has to its. Shapes come from the model's
// own plan, so that it works for every wiring, size, B and T.
//
// What is assumed of a GPU is in `GpuSpec`, with its sources in dev/bench/gpu-model.md, the page that gpu_model.cu
// prints. bench_gpu prints what it has measured beside this. When attention's kernels change, their rates relative to
// FlashAttention-2's in h100_sxm() and a100_sxm() must change too.
//
// Not modelled: what L2 saves (an activation of 16 x 1,024 tokens and 768 channels is 25 MB, an H100's L2 50 MB),
// clocks that fall under load, the host, communication between ranks, and what kernels for masks lose to those without.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>
#include "llmc/cuda/vec.h"
#include "llmc/model/attention_plan.h"
#include "llmc/model/attention_pairs.h"
#include "llmc/model/parameters.h"
#include "llmc/model/sublayers.h"
#include "llmc/ops/precision.h"
#include "llmc/ops/parameter_table.h"

// ----------------------------------------------------------------------------
// GPUs

// The rate of a pass of attention with heads of 64 or 128 channels. A query that sees n keys is computed at limit * n /
// (n + overhead): the overhead is what a block's start and end and the tiles that a mask cuts cost.
struct AttentionRate {
  double limit;     // FLOP/s, of FlashAttention-2
  double overhead;  // keys
  double ratio;     // our rate to its, by the machine code
};

// FlashAttention-2 with a causal mask, FLOP/s that count the pairs below the diagonal.
inline double flash_attention_rate(const AttentionRate& rate, double keys) {
  return rate.limit * keys / (keys + rate.overhead);
}

struct GpuSpec {
  std::string name;
  std::string device_name;  // what the driver calls it; "" if it was not asked
  int multiprocessors;
  double clock;       // Hz, that peak_flops is for
  double peak_flops;  // dense bf16
  double bandwidth;   // bytes/s
  double memory_bytes;
  double matmul_share;  // of peak_flops, inside a wave of large tiles
  double copy_share;    // of bandwidth
  AttentionRate forward64, backward64, forward128, backward128;
};

inline GpuSpec h100_sxm() {
  return {"H100 SXM",
          "NVIDIA H100 80GB HBM3",
          132,
          1.83e9,
          989.4e12,
          3.35e12,
          80e9,
          0.75,
          0.90,
          {308e12, 192, 1.10},
          {281e12, 350, 0.96},
          {342e12, 160, 1.01},
          {313e12, 365, 0.75}};
}

// The H100's processor with more and faster memory.
inline GpuSpec h200_sxm() {
  GpuSpec gpu = h100_sxm();
  gpu.name = "H200 SXM", gpu.device_name = "NVIDIA H200";
  gpu.bandwidth = 4.8e12, gpu.memory_bytes = 141e9;
  return gpu;
}

inline GpuSpec a100_sxm() {
  return {"A100 SXM 80 GB",
          "NVIDIA A100-SXM4-80GB",
          108,
          1.41e9,
          312e12,
          2.04e12,
          80e9,
          0.85,
          0.88,
          {182e12, 192, 1.11},
          {174e12, 270, 0.94},
          {211e12, 160, 1.01},
          {188e12, 265, 0.77}};
}

// A GPU that is none of these, by the rates of a large matmul and of a copy that were measured on it; attention as on
// an A100, in proportion to the former.
inline GpuSpec other_gpu(const std::string& name, int multiprocessors, double matmul_flops,
                         double copy_bytes_per_second) {
  GpuSpec gpu = a100_sxm();
  gpu.name = name, gpu.device_name = name, gpu.multiprocessors = multiprocessors;
  const double scale = matmul_flops / gpu.matmul_share / gpu.peak_flops;
  gpu.peak_flops *= scale;
  gpu.bandwidth = copy_bytes_per_second / gpu.copy_share;
  for (AttentionRate* rate : {&gpu.forward64, &gpu.backward64, &gpu.forward128, &gpu.backward128}) rate->limit *= scale;
  return gpu;
}

// A T4, in fp16. It is assumed to sustain 40 of the data sheet's 65 TFLOP/s, because it lowers its clock to keep to
// 70 W, and 225 of its 320 GB/s. No FlashAttention-2 is for it: attention in proportion to matmuls is a guess.
inline GpuSpec t4() {
  GpuSpec gpu = other_gpu("T4", 40, 40e12, 225e9);
  gpu.clock = 1.59e9, gpu.memory_bytes = 15.84e9, gpu.device_name = "Tesla T4";
  return gpu;
}

// A GPU by its data sheet. `flops`: of a multiprocessor in a cycle, dense, of bf16 with sums in fp32. Matmuls, copies
// and attention are assumed to reach the shares of that which they are assumed to reach on an A100.
inline GpuSpec by_data_sheet(const std::string& name, int multiprocessors, double clock, double flops, double bandwidth,
                             double memory_bytes) {
  const GpuSpec a100 = a100_sxm();
  GpuSpec gpu = other_gpu(name, multiprocessors, multiprocessors * clock * flops * a100.matmul_share,
                          bandwidth * a100.copy_share);
  gpu.clock = clock, gpu.memory_bytes = memory_bytes, gpu.device_name = {};
  return gpu;
}

// Matmuls and copies reach an H100's shares. Attention has no kernels by tcgen05 and so is an H100's by mma, in
// proportion to multiprocessors and clock: that is a guess.
inline GpuSpec b200() {
  const GpuSpec h100 = h100_sxm();
  GpuSpec gpu = h100;
  gpu.name = "B200", gpu.device_name = {}, gpu.multiprocessors = 148, gpu.clock = 1.856e9;
  gpu.peak_flops = 2250e12, gpu.bandwidth = 8e12, gpu.memory_bytes = 180e9;
  const double scale = gpu.multiprocessors * gpu.clock / (h100.multiprocessors * h100.clock);
  for (AttentionRate* rate : {&gpu.forward64, &gpu.backward64, &gpu.forward128, &gpu.backward128}) rate->limit *= scale;
  return gpu;
}

// Between two kernels of a graph the GPU drains and fills again.
constexpr double seconds_between_kernels = 1e-6;

// ----------------------------------------------------------------------------
// Parts: what one kernel, or a few for one purpose, take

struct MatmulTiles {
  int64_t m = 0, n = 0, k = 0;
  int rows = 0, columns = 0, splits = 0;  // of a tile; parts along k
  int64_t tiles = 0, waves = 0;
};

struct ModelledPart {
  std::string name;
  double seconds = 0;
  double flops = 0, bytes = 0;
  int kernels = 0;
  const char* bound = "";
  MatmulTiles tiles = {};  // of a matmul
};

// A kernel that does little with each element: `bytes` read and written, and instructions of a thread for each of
// `groups` groups of eight elements.
inline ModelledPart streamed(const GpuSpec& gpu, const char* name, double bytes, double groups, double instructions,
                             int kernels = 1) {
  const double by_memory = bytes / (gpu.bandwidth * gpu.copy_share);
  // Each of the four schedulers issues an instruction of a warp per cycle.
  const double by_issue = groups * instructions / 32 / (gpu.clock * 4 * gpu.multiprocessors);
  return {name,    std::max(by_memory, by_issue) + kernels * seconds_between_kernels,
          0,       bytes,
          kernels, by_memory > by_issue ? "memory" : "issue"};
}

// Tiles that cuBLASLt's kernels have, and how much of the rate of the largest they reach: smaller ones load more for
// each product.
struct MatmulTile {
  int rows, columns;
  double share;
};
constexpr MatmulTile matmul_tiles[] = {{128, 256, 1},   {256, 128, 1},   {128, 128, 0.9},
                                       {64, 128, 0.75}, {128, 64, 0.75}, {64, 64, 0.6}};
constexpr int most_matmul_splits = 8;
constexpr double matmul_tile_overhead = 128;  // as many k as a tile's first loads and its epilogue take the time of

// c (m, n) = or += a b, the sum over k, a and b in floatX; elements of c have out_bytes. The fastest of the tilings
// above, in whole waves; parts along k are written in fp32 and added up.
inline ModelledPart modelled_matmul(const GpuSpec& gpu, const char* name, int64_t m, int64_t n, int64_t k,
                                    size_t out_bytes, bool accumulate) {
  ModelledPart best;
  best.flops = 2.0 * double(m) * double(n) * double(k);
  const double x = sizeof(floatX), c_bytes = double(m * n) * double(out_bytes) * (accumulate ? 2 : 1);
  const double bandwidth = gpu.bandwidth * gpu.copy_share,
               sm_rate = gpu.peak_flops * gpu.matmul_share / gpu.multiprocessors;
  for (const MatmulTile& tile : matmul_tiles)
    for (int splits = 1; splits <= most_matmul_splits; splits++) {
      const int64_t tiles = ceil_div(m, tile.rows) * ceil_div(n, tile.columns) * splits,
                    waves = ceil_div(tiles, gpu.multiprocessors);
      const double of_tile =
          2.0 * tile.rows * tile.columns * (double(k) / splits + matmul_tile_overhead) / (sm_rate * tile.share);
      const double part_bytes = splits > 1 ? 2.0 * splits * double(m * n) * sizeof(float) : 0;
      const double bytes = double(m * k + n * k) * x + c_bytes + part_bytes;
      const double by_tiles = double(waves) * of_tile + part_bytes / bandwidth, by_memory = bytes / bandwidth;
      const double seconds = std::max(by_tiles, by_memory) + seconds_between_kernels * (splits > 1 ? 2 : 1);
      if (best.seconds != 0 && seconds >= best.seconds) continue;
      best.name = name, best.seconds = seconds, best.bytes = bytes, best.kernels = splits > 1 ? 2 : 1;
      best.bound = by_memory > by_tiles ? "memory" : "tensor cores";
      best.tiles = {m, n, k, tile.rows, tile.columns, splits, tiles, waves};
    }
  return best;
}

enum class Pass { forward, backward };

// What relative positions multiply the kernels' products by, from their tiles: a fragment of 16 queries and 64 keys, or
// of 16 keys and 16 queries, has 16 distances more than keys. Forward 2 products become 3.25, backward 7 become 17.5,
// as there is another kernel, for the gradient of r.
struct RelativeProducts {
  static constexpr double forward = 3.25 / 2, backward = 18.0 / 7;
};

// Keys that a query is multiplied with in vain where documents begin anywhere, beside plain attention's. If a document
// begins among a warp's 32 queries, half of them see the one before, as all are multiplied with it; and if it begins
// among 64 keys (backward 32), half of those are before it. The emulated GPU counts them (test_attention).
struct KeysBesideDocuments {
  static constexpr double forward = 16 + 32, backward = 16 + 16;
};

// Attention of a layer, all its maps: forward a product of scored and one of multiplied pairs, and topk scores four
// times more; backward 5; RelativeProducts as many with relative positions. Heads whose size is neither 64 nor 128
// are computed as if they were. `segments`: the places of the data's tokens in their documents, with `documents`.
inline ModelledPart modelled_attention(const GpuSpec& gpu, const ModelShape& model, int l, Pass pass,
                                       const Segments& segments = {}) {
  const AttentionPlan& plan = model.attention_plan;
  const int hs = model.config.head_size(), D = hs <= 64 ? 64 : 128,
            heads = plan.num_heads * int(plan.attentions[l].size());
  const AttentionPairs pairs = attention_pairs(plan, l, model.training->T, segments);
  const bool is_forward = pass == Pass::forward;
  const double scored = pairs.scored * (plan.table.topk == 0 ? 1 : is_forward ? 5 : 1);
  const double relative = !plan.table.relative ? 1
                          : is_forward         ? RelativeProducts::forward
                                               : RelativeProducts::backward;
  const double products = relative * (is_forward ? scored + pairs.multiplied : scored + 4 * pairs.multiplied);
  AttentionRate rate =
      D == 64 ? (is_forward ? gpu.forward64 : gpu.backward64) : (is_forward ? gpu.forward128 : gpu.backward128);
  if (segments.places != nullptr)
    rate.overhead += is_forward ? KeysBesideDocuments::forward : KeysBesideDocuments::backward;
  const double keys = pairs.scored / heads / model.training->T;
  ModelledPart part;
  part.name = is_forward ? "attention_forward" : "attention_backward";
  const int kernels = is_forward ? (plan.table.topk > 0 ? 2 : 1) : plan.table.relative ? 4 : 2;
  part.kernels = kernels * int(plan.attentions[l].size());
  part.flops = 2.0 * model.training->B * hs * products;
  const double rows = double(model.rows) * heads * hs;
  part.bytes = rows * sizeof(floatX) * (is_forward ? 4 : 8);  // q, k, v, out; and their gradients, each once
  const double by_rate = part.flops * D / hs / (rate.ratio * flash_attention_rate(rate, keys));
  const double by_memory = part.bytes / (gpu.bandwidth * gpu.copy_share);
  part.seconds = std::max(by_rate, by_memory) + part.kernels * seconds_between_kernels;
  part.bound = by_memory > by_rate ? "memory" : "tensor cores";
  return part;
}

// ----------------------------------------------------------------------------
// A step

// A call of an operation, by the name that bench_gpu has for it.
struct ModelledOperation {
  std::string name;
  int instance;  // layer, or chunk of logits; 0 for what there is once
  std::vector<ModelledPart> parts;

  double seconds() const {
    double sum = 0;
    for (const ModelledPart& part : parts) sum += part.seconds;
    return sum;
  }
};

// Instructions that a thread issues for eight elements, without a loop's over the rest of a tensor: counted in the
// machine code for sm_90, from which sm_80's differs by less than a twentieth. The numbers for caps, relu2, silu,
// swiglu, norm_heads, mixes and depth are estimated from the source.
struct InstructionCounts {
  static constexpr double gelu_forward = 130, gelu_backward = 229, classifier = 255, caps = 330, layernorm_forward = 90,
                          layernorm_backward = 270, bias_backward = 21, adamw = 230, sum_of_squares = 44,
                          embedding = 52, comparison = 20, copy = 20, term_of_sum = 24, relu2 = 40, norm_heads = 110,
                          mix_values = 60, mix_heads = 20, mix_heads_backward = 3, depth_forward = 90,
                          depth_backward = 250, silu_forward = 100, silu_backward = 150, swiglu_forward = 130,
                          swiglu_backward = 220, rotary = 60;
};

// The operations of a training step of one micro-batch, in their order: what gpt2_forward_backward and gpt2_update
// call. It walks the model's steps as they do.
class StepModel {
 public:
  StepModel(const GpuSpec& gpu, const ModelShape& model, const Sublayers& sublayers, const ParameterTable& parameters,
            const Segments& segments)
      : gpu(gpu), model(model), plan(model.attention_plan), sublayers(sublayers), segments(segments),
        C(model.config.channels), H(plan.table.hidden_size(model.config.channels)),
        F(plan.table.fc_size(model.config.channels)), N(model.rows), x(sizeof(floatX)) {
    add("zero gradients", 0, {streamed(gpu, "zero gradients", double(parameters.layout.bytes), 0, 0)});
    forward();
    head();
    backward();
    update(parameters);
  }
  std::vector<ModelledOperation> operations;

 private:
  const GpuSpec& gpu;
  const ModelShape& model;
  const AttentionPlan& plan;
  const Sublayers& sublayers;
  const Segments& segments;
  const int64_t C, H, F, N;
  const double x;  // bytes of a weight or activation
  using Counts = InstructionCounts;

  void add(const char* name, int instance, std::vector<ModelledPart> parts) {
    operations.push_back({name, instance, std::move(parts)});
  }
  // An elementwise kernel over a tensor (rows, columns), which moves `bytes` bytes per element.
  ModelledPart elementwise(const char* name, double rows, double columns, double bytes, double instructions,
                           int kernels = 1) const {
    return streamed(gpu, name, rows * columns * bytes, rows * columns / 8, instructions, kernels);
  }
  ModelledPart matmul_of(const char* name, int64_t m, int64_t n, int64_t k, bool is_weight_gradient = false) const {
    return modelled_matmul(gpu, name, m, n, k, is_weight_gradient ? sizeof(float) : sizeof(floatX), is_weight_gradient);
  }
  // A linear layer from `in` to `out` channels.
  void linear_forward(const char* name, int l, int64_t in, int64_t out) {
    add(name, l, {matmul_of("matmul", N, out, in)});
  }
  std::vector<ModelledPart> linear_backward(int64_t in, int64_t out) const {
    std::vector<ModelledPart> parts = {matmul_of("dinp", N, in, out), matmul_of("dweight", out, in, N, true)};
    if (model.config.bias) parts.push_back(elementwise("dbias", double(N), double(out), x, Counts::bias_backward, 2));
    return parts;
  }
  double of_activation(double gelu, double silu, double swiglu) const {
    switch (plan.table.activation) {
      case Activation::gelu: return gelu;
      case Activation::relu2: return Counts::relu2;
      case Activation::silu: return silu;
      case Activation::swiglu: return swiglu;
    }
    return 0;
  }
  ModelledPart activation_part() const {
    return streamed(gpu, "activation_forward", double(N) * double(F + H) * x, double(N) * double(H) / 8,
                    of_activation(Counts::gelu_forward, Counts::silu_forward, Counts::swiglu_forward));
  }
  ModelledPart activation_backward_part() const {
    return streamed(gpu, "activation_backward", double(N) * double(H + 2 * F) * x, double(N) * double(H) / 8,
                    of_activation(Counts::gelu_backward, Counts::silu_backward, Counts::swiglu_backward));
  }

  void layernorm_forward(const char* name, int l, double tensors) {
    add(name, l, {elementwise(name, double(N), double(C), tensors * x, Counts::layernorm_forward)});
  }
  // Reads and writes the gradient, reads the output's and the input; blocks' sums are added up by another kernel.
  void layernorm_backward(int l) {
    add("layernorm_backward", l,
        {elementwise("layernorm_backward", double(N), double(C), 4 * x, Counts::layernorm_backward, 2)});
  }
  void residual_forward(const AddResidual&, int l) { layernorm_forward("residual_layernorm_forward", l, 4); }
  void residual_forward(const GruResidual& gru, int l) {
    branch_relu(gru, l);
    gates_forward(gru, l);
    layernorm_forward("layernorm_forward", l, 2);
  }
  void branch_relu(const GruResidual&, int l) { add("relu_forward", l, {gru_part("relu_forward", 2)}); }
  void gates_forward(const GruResidual&, int l) {
    add("matmul_forward, gru", l, {matmul_of("y", N, 3 * C, C), matmul_of("x", N, 2 * C, C), matmul_of("rx", N, C, C)});
    add("gru_forward", l, {gru_part("gru_gates", 8), gru_part("gru_output", 6)});
  }
  // An operation that moves as many tensors (N, C).
  ModelledPart gru_part(const char* name, double tensors) const {
    return elementwise(name, double(N), double(C), tensors * x, Counts::gelu_forward);
  }
  // The stream is read and written in fp32, and rounded to floatX.
  ModelledPart stream_part(const char* name) const {
    return elementwise(name, double(N), double(C), 2 * sizeof(float) + 2 * x, Counts::copy);
  }
  void residual_forward(const ReversibleResidual&, int l) {
    add("stream_add", l, {stream_part("stream_add")});
    layernorm_forward("layernorm_forward", l, 2);
  }
  void residual_backward(const AddResidual&, int) {}
  void residual_backward(const ReversibleResidual&, int) {}
  void residual_backward(const GruResidual&, int l) {
    add("gru_backward", l,
        {gru_part("gru_output", 7), gru_part("gru_gates", 7), gru_part("relu", 3),
         elementwise("bias", double(N), double(C), x, Counts::bias_backward, 2)});
    add("matmul_backward, gru", l,
        {matmul_of("dy", N, C, 3 * C), matmul_of("dx", N, C, 2 * C), matmul_of("drx", N, C, C),
         matmul_of("y.weight", 3 * C, C, N, true), matmul_of("x.weight", 2 * C, C, N, true),
         matmul_of("rx.weight", C, C, N, true)});
  }
  void residual_forward(const Sublayer& sublayer) {
    std::visit([&](const auto& residual) { residual_forward(residual, sublayer.layer); }, sublayer.residual);
    if (sublayer.cycle_end) cycle_end_forward(*sublayer.cycle_end, sublayer.layer);
    if (sublayer.dense) dense_forward(*sublayer.dense);
  }
  // A sum of so many tensors (N, C), or of products with them.
  ModelledPart sum_part(const char* name, int terms, int kernels = 1) const {
    return elementwise(name, double(N), double(C), (terms + 1) * x, terms * Counts::term_of_sum, kernels);
  }
  // The norm that follows does not have the stream at hand, but reads it again.
  void dense_forward(const DenseSum& d) { add("weighted_sum", d.layer, {sum_part("weighted_sum", d.layer + 2)}); }
  void dense_backward(const DenseSum& d) {
    add("weighted_sum_backward", d.layer,
        {sum_part("weighted_sum_backward", d.layer + 2, 2),
         sum_part("weighted_sum", model.config.num_layers - d.layer)});
  }
  // What it takes beside a sum and a LayerNorm that are one pass, and beside the coordinates: the stream is read again.
  void cycle_end_forward(const CycleEnd& end, int l) {
    std::vector<ModelledPart> parts = {
        elementwise("halting_forward", double(N), double(C), 2 * x + 2 * sizeof(float), Counts::copy, 2)};
    if (!end.is_last()) parts.push_back(elementwise("token_gate_forward", double(N), double(C), x, Counts::copy));
    add("cycle_end_forward", l, std::move(parts));
  }
  void cycle_end_backward(const CycleEnd& end, int l) {
    std::vector<ModelledPart> parts = {elementwise("halting_backward", double(N), double(C), 4 * x, Counts::copy)};
    if (!end.is_last())
      parts.push_back(elementwise("token_gate_backward", double(N), double(C), 3 * x, Counts::copy, 2));
    add("cycle_end_backward", l, std::move(parts));
  }

  // Branches, forward; `again`: for the backward pass, where K/V has been kept.
  void project_qkv(const AttentionBranch& b, int l, bool again) {
    const int64_t q = int64_t(plan.projected[Qkv::q][l].size()) * model.config.head_size();
    const bool all = !again || !keeps_kv(plan, l), none = again && keeps_qkv(*model.training, plan, l);
    const int64_t rows = all ? qkv_rows(model.config, plan, l) : none ? 0 : q;
    if (rows > 0) linear_forward("matmul_forward, qkv", l, C, rows);
    if (plan.table.qknorm) norm_heads(Pass::forward, l, all ? rotated_channels(l) : none ? 0 : q);
    else if (plan.table.rope > 0) rotate("rotate", l, all ? rotated_channels(l) : none ? 0 : q);
    const auto runs = [&](const auto* stage) { return stage != nullptr && !(again && stage->is_kept); };
    if (runs(find_stage<ValueResidual>(b.stages))) add("mix_values", l, {mix_of_values("mix_values", l, 3, 1)});
    if (l > 0 && runs(find_stage<KVRouter>(b.stages))) add("mix_heads", l, {mix_of_heads("mix_heads", l, l + 1)});
    if (l > 0 && runs(find_stage<DepthValues>(b.stages)))
      add("depth_attention_forward", l, {depth_part("depth_attention_forward", l, 2, Counts::depth_forward)});
    if (plan.table.relative)
      add("relative_forward", l, {matmul_of("distances", relative_distances(model), C, C), relative_queries()});
  }
  // It moves as many tensors of the layer's values.
  ModelledPart mix_of_values(const char* name, int l, double tensors, int kernels) const {
    const double width = double(plan.first_values(l).size()) * model.config.head_size();
    return elementwise(name, double(N), width, tensors * x, Counts::mix_values, kernels);
  }
  // k and v of the layer are sums over as many layers' k and v; tensor cores compute the weights' gradients.
  ModelledPart mix_of_heads(const char* name, int l, int layers, double instructions = Counts::mix_heads,
                            int kernels = 2) const {
    const double width = double(qkv_rows(model.config, plan, l) - C), kv = plan.table.num_kv_heads;
    return elementwise(name, double(N), width, (layers + 1) * x, layers * kv * instructions, kernels);
  }
  const std::vector<int>& depth_values(int l) const {
    static const std::vector<int> none;
    return plan.table.depth ? plan.projected[Qkv::v][l] : none;
  }
  // It moves as many tensors of each layer's values, and two of the layer's own.
  ModelledPart depth_part(const char* name, int l, int tensors, double instructions) const {
    const double width = double(depth_values(l).size()) * model.config.head_size(), layers = l + 1;
    return elementwise(name, double(N), width, (tensors * layers + 2) * x, layers * instructions);
  }
  ModelledPart relative_queries() const {
    return elementwise("relative_queries", double(N), double(C), 3 * x, Counts::copy);
  }
  // The sums over rows of the two queries' gradients are the gradients of u and v.
  void relative_backward(int l) {
    const ModelledPart bias = elementwise("dbias", double(N), double(C), x, Counts::bias_backward, 2);
    add("relative_backward", l,
        {bias, bias, relative_queries(), matmul_of("dweight", C, C, relative_distances(model), true)});
  }
  void branch_forward(const AttentionBranch& b, int l, bool again) {
    project_qkv(b, l, again);
    if (has_map_gate(plan, l))
      add("token_gate_forward", l, {elementwise("token_gate_forward", double(N), double(C), x, Counts::copy)});
    attend(b, l, Pass::forward);
    if (b.mixed_maps) mix_maps("mix maps", l, 2 * x + 4);
    linear_forward("matmul_forward, attproj", l, C, C);
  }
  // Hashing is products in fp32 of q and rotations; sorting reads buckets and writes positions.
  void branch_forward(const LshBranch& b, int l, bool) {
    const WiringTable& table = plan.table;
    const double hashes = double(N) * table.lsh_rounds * plan.num_heads;
    linear_forward("matmul_forward, qv", l, C, 2 * C);
    add("lsh_hash", l,
        {elementwise("lsh_hash", double(N), double(C), x, double(table.lsh_rounds) * table.lsh_buckets / 2 * 8)});
    add("lsh_sort", l, {streamed(gpu, "lsh_sort", hashes * 3 * sizeof(int), hashes / 8, Counts::copy)});
    attend(b, l, Pass::forward);
    linear_forward("matmul_forward, attproj", l, C, C);
  }
  bool has_chunks() const { return model.hidden_rows() < N; }
  void branch_forward(const MlpBranch&, int l, bool again) {
    if (again && has_chunks()) return;  // that is part of the backward pass
    add("matmul_activation_forward, fc", l, {matmul_of("matmul", N, F, C), activation_part()});
    if (!again) linear_forward("matmul_forward, fcproj", l, H, C);
  }
  void attend(const AttentionBranch&, int l, Pass pass) {
    add(pass == Pass::forward ? "attention_forward" : "attention_backward", l,
        {modelled_attention(gpu, model, l, pass, segments)});
  }
  void attend(const LshBranch&, int l, Pass pass) {
    const bool is_forward = pass == Pass::forward;
    const double share = lsh_pairs(plan, l, model.training->T) / attention_pairs(plan, l, model.training->T).scored;
    ModelledPart part = modelled_attention(gpu, model, l, pass);
    part.flops *= share, part.seconds *= share, part.kernels = plan.table.lsh_rounds * (is_forward ? 1 : 2);
    // Each round reads and writes sums of the rounds before it, in fp32.
    const ModelledPart sums = elementwise("sums of rounds", double(N) * plan.table.lsh_rounds, double(C),
                                          (is_forward ? 2 : 6) * sizeof(float), Counts::copy, 0);
    add(is_forward ? "lsh_forward" : "lsh_backward", l, {part, sums});
  }
  // The weighted sum of several attention maps' outputs, or its backward pass.
  void mix_maps(const char* name, int l, double bytes) {
    const double maps = double(plan.attentions[l].size());
    add(name, l, {elementwise(name, double(N) * maps, double(C), bytes, Counts::copy, int(maps))});
  }

  void forward() {
    const double positions = plan.table.learns_positions() ? x : 0;  // rows of wpe
    add("embedding_forward", 0,
        {elementwise("embedding_forward", double(N), double(C), 2 * x + (cycles() > 0 ? 0 : positions),
                     Counts::embedding)});
    layernorm_forward("layernorm_forward", 0, 2);
    if (cycles() > 0)
      add("add_coordinates", 0,
          {elementwise("add_coordinates", double(N) * cycles(), double(C), 2 * x + positions, Counts::embedding,
                       cycles())});
    for (const Sublayer& sublayer : sublayers.list) {
      std::visit([&](const auto& branch) { branch_forward(branch, sublayer.layer, /*again=*/false); }, sublayer.branch);
      residual_forward(sublayer);
    }
  }

  // How many cycles layers that repeat have; 0 without such.
  int cycles() const {
    const int stored = plan.table.stored_layers;
    return stored < plan.num_layers ? plan.num_layers / stored : 0;
  }

  void head() {
    const int64_t Vp = model.logit_stride;
    for (int64_t row = 0, chunk = 0; row < N; row += model.logit_rows, chunk++) {
      const int64_t rows = std::min(model.logit_rows, N - row);
      add("head logits", int(chunk), {matmul_of("matmul", rows, Vp, C)});
      add("classifier", int(chunk),
          {elementwise("classifier", double(rows), double(Vp), 2 * x,
                       Counts::classifier + (plan.table.softcap > 0 ? Counts::caps : 0))});
      add("head gradients", int(chunk), {matmul_of("dlnf", rows, C, Vp), matmul_of("dwte", Vp, C, rows, true)});
    }
    add("add_losses", 0, {streamed(gpu, "add_losses", double(N) * 4, 0, 0)});
  }

  void compute_again(const Recomputation& r) {
    using What = Recomputation::What;
    const Sublayer& sublayer = sublayers.list[size_t(r.sublayer)];
    switch (r.what) {
      case What::norm: layernorm_forward("layernorm_forward", sublayer.layer, 2); break;
      case What::branch:
        std::visit([&](const auto& branch) { branch_forward(branch, sublayer.layer, /*again=*/true); },
                   sublayer.branch);
        break;
      case What::residual: residual_forward(sublayer); break;
      case What::activation: add("activation_forward", sublayer.layer, {activation_part()}); break;
      case What::output:
        linear_forward("matmul_forward, output", sublayer.layer,
                       std::holds_alternative<MlpBranch>(sublayer.branch) ? H : C, C);
        if (const auto* gru = std::get_if<GruResidual>(&sublayer.residual)) branch_relu(*gru, sublayer.layer);
        break;
      case What::input: dense_forward(*sublayer.dense); break;
      case What::gates: gates_forward(std::get<GruResidual>(sublayer.residual), sublayer.layer); break;
      case What::stream:
      case What::taken_back: add("stream_add", sublayer.layer, {stream_part("stream_add")}); break;
    }
  }

  // The gradients of shared heads, from their accumulator.
  void load_accumulator(int l) {
    int copies = 0;
    for (Qkv which : all_qkv) copies += !plan.shared[which][l].empty();
    if (copies == 0) return;
    const double width = double(plan.num_shared(l)) * model.config.head_size();
    add("load shared gradients", l,
        {elementwise("load shared gradients", double(N), width, 2 * x, Counts::copy, copies)});
  }
  int64_t rotated_channels(int l) const {
    return int64_t(plan.projected[Qkv::q][l].size() + plan.projected[Qkv::k][l].size()) * model.config.head_size();
  }
  void rotate(const char* name, int l, int64_t channels) {
    if (channels > 0) add(name, l, {elementwise(name, double(N), double(channels), 2 * x, Counts::rotary)});
  }
  // The pass of `qknorm`, in which heads are rotated as well; the backward pass reads what it has made of them.
  void norm_heads(Pass pass, int l, int64_t channels) {
    const char* name = pass == Pass::forward ? "norm_heads" : "norm_heads_backward";
    const double bytes = (pass == Pass::forward ? 2 : 3) * x;
    const int kernels = keeps_qkv(*model.training, plan, l) ? 1 : 2;
    if (channels > 0)
      add(name, l, {elementwise(name, double(N), double(channels), bytes, Counts::norm_heads, kernels)});
  }
  void project_qkv_backward(int l) {
    if (plan.table.qknorm) norm_heads(Pass::backward, l, rotated_channels(l));
    else if (plan.table.rope > 0) rotate("rotate_back", l, rotated_channels(l));
    add("matmul_backward, qkv", l, linear_backward(C, qkv_rows(model.config, plan, l)));
  }
  void branch_backward(const AttentionBranch& b, int l) {
    add("matmul_backward, attproj", l, linear_backward(C, C));
    load_accumulator(l);
    if (plan.table.relative) add("relative_queries", l, {relative_queries()});
    if (b.mixed_maps) {
      attend(b, l, Pass::forward);
      mix_maps("mix maps backward", l, 3 * x);
    }
    attend(b, l, Pass::backward);
    if (plan.table.relative) relative_backward(l);
    if (!plan.first_values(l).empty()) add("mix_values_backward", l, {mix_of_values("mix_values_backward", l, 5, 2)});
    if (plan.table.router && qkv_rows(model.config, plan, l) > C) {
      if (l > 0)
        add("mix_heads_backward", l, {mix_of_heads("mix_heads_backward", l, l + 1, Counts::mix_heads_backward, 4)});
      add("mix_heads", l, {mix_of_heads("mix_heads", l, model.config.num_layers - std::max(l, 1))});
    }
    if (!depth_values(l).empty())
      add("depth_attention_backward", l, {depth_part("depth_attention_backward", l, 6, Counts::depth_backward)});
    project_qkv_backward(l);
    if (has_map_gate(plan, l))
      add("token_gate_backward", l, {elementwise("token_gate_backward", double(N), double(C), 3 * x, Counts::copy, 2)});
  }
  void branch_backward(const LshBranch& b, int l) {
    add("matmul_backward, attproj", l, linear_backward(C, C));
    attend(b, l, Pass::backward);
    add("matmul_backward, qv", l, linear_backward(C, 2 * C));
  }
  void branch_backward(const MlpBranch&, int l) {
    if (has_chunks()) add("matmul_activation_forward, fc", l, {matmul_of("matmul", N, F, C), activation_part()});
    std::vector<ModelledPart> fcproj = linear_backward(H, C);
    fcproj.push_back(activation_backward_part());
    add("matmul_activation_backward, fcproj", l, std::move(fcproj));
    add("matmul_backward, fc", l, linear_backward(C, F));
  }

  void backward() {
    add("zero dresidual", 0, {streamed(gpu, "zero dresidual", double(N * C) * x, 0, 0)});
    layernorm_backward(model.config.num_layers);
    for (int i = sublayers.size() - 1; i >= 0; i--) {
      const Sublayer& sublayer = sublayers.list[size_t(i)];
      for (const Recomputation& again : sublayer.again) compute_again(again);
      if (sublayer.dense) dense_backward(*sublayer.dense);
      if (sublayer.cycle_end) cycle_end_backward(*sublayer.cycle_end, sublayer.layer);
      std::visit([&](const auto& residual) { residual_backward(residual, sublayer.layer); }, sublayer.residual);
      std::visit([&](const auto& branch) { branch_backward(branch, sublayer.layer); }, sublayer.branch);
      layernorm_backward(sublayer.layer);
    }
    std::vector<ModelledPart> coordinates, embeddings;
    if (cycles() > 0) {
      coordinates.push_back(
          elementwise("wse", double(N) * cycles(), double(C), x, Counts::bias_backward, 2 * cycles()));
      if (plan.table.learns_positions())
        coordinates.push_back(elementwise("wpe", double(N) * cycles(), double(C), x, Counts::embedding, cycles()));
      add("coordinates_backward", 0, std::move(coordinates));
    } else if (plan.table.learns_positions()) {
      embeddings.push_back(elementwise("wpe", double(N + 4 * model.training->T), double(C), x, Counts::embedding));
    }
    // Tokens as if drawn evenly, which is more different ones than text has. For each the positions between its first
    // and its last are compared, in rounds of 1,024, four in a thread: k positions span (k - 1) / (k + 1) N.
    const double V = model.config.vocab_size, of_each = double(N) / V, none = std::exp(-of_each),
                 different = V * (1 - none),
                 compared = different * 1024 + N * V * (1 - none - 2 * ((1 - none) / of_each - none));
    embeddings.push_back(streamed(gpu, "wte", double(N * C) * x + different * double(C) * 8, compared / 4,
                                  Counts::comparison, /*kernels=*/3));
    add("embedding_backward", 0, std::move(embeddings));
  }

  void update(const ParameterTable& parameters) {
    const double P = double(parameters.num_parameters), owned = P / parameters.shard.count;
    add("sum_of_squares", 0, {streamed(gpu, "sum_of_squares", owned * 4, owned / 8, Counts::sum_of_squares, 2)});
    // Reads master, m, v and the gradient, writes the first three and the weight.
    add("adamw_update", 0,
        {streamed(gpu, "adamw_update", owned * (7 * 4 + (has_master_weights ? x : 0)), owned / 8, Counts::adamw)});
  }
};

// Model: the trainer's GPT2, planned for training. `segments`: as in modelled_attention.
template <class Model>
std::vector<ModelledOperation> modelled_step(const GpuSpec& gpu, const Model& model, const Segments& segments = {}) {
  return StepModel(gpu, model, model.sublayers, model.parameters, segments).operations;
}

// A step's.
inline double modelled_seconds(const std::vector<ModelledOperation>& step) {
  double sum = 0;
  for (const ModelledOperation& operation : step) sum += operation.seconds();
  return sum;
}
