// Softmax and cross-entropy over the vocabulary: the operations of llmc/cpu/classifier.h, loss and gradient with one
// read of the logits from memory. Every exponential is of a logit minus the row's largest, so that none overflows.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/ops/step_stats.h"
#include "llmc/ops/classifier_args.h"
#include "tile.h"
#include "vec.h"

// What a chunk of logits may take, in bytes: a GiB, or a 32nd of the GPU's memory where that is less. Each chunk is a
// pass over the fp32 gradient of the head's weight: with 124M 309 MB, read and written, 0.09 ms at 3.35 TB/s. The three
// matmuls of a GiB's 10,496 rows take an H100 3.5 ms at 700 TFLOP/s, a 64 MiB chunk's 0.2 ms. The size depends on how
// much memory there is and not on what others have taken of it, for the chunks are the order in which that gradient is
// summed: another chunk, other bits.
inline int64_t logit_chunk_bytes(size_t device_memory = device_memory_total()) {
  return int64_t(std::min<size_t>(1 << 30, device_memory / 32));
}
constexpr int64_t logit_row_multiple = 256;  // rows of the largest tiles of matmuls, none of which is cut then

constexpr int classifier_threads = 1024;  // at most: a byte-level vocabulary takes 64
constexpr int classifier_sums_bytes = classifier_threads / warp_size * int(sizeof(float));  // of shared memory

// What classifier_kernel does with a row whose target is not scored: loss and gradient = 0. It reads none of it.
__device__ inline void skip_row(const ClassifierArgs& args, floatX* row) {
  if (threadIdx.x == 0) {
    args.losses[blockIdx.x] = 0;
    if (args.correct != nullptr) args.correct[blockIdx.x] = false;
  }
  const float zeros[8] = {};
  for (int i = int(threadIdx.x) * 8; args.write_gradient && i < args.ld; i += int(blockDim.x) * 8)
    store8(row + i, zeros);
}

// 1 if among this thread's columns of the row is a larger logit than the target's, or one as large before it, else 0.
__device__ inline float is_beaten(const floatX* row, int target, float target_logit, int V) {
  bool beaten = false;
  for (int i = int(threadIdx.x) * 8; i < V; i += int(blockDim.x) * 8) {
    float x[8];
    load8(x, row + i);
    for (int j = 0; j < 8 && i + j < V; j++)
      beaten = beaten || x[j] > target_logit || (x[j] == target_logit && i + j < target);
  }
  return beaten ? 1.0f : 0.0f;
}

// A block owns a row, a warp 32 neighbouring groups of eight columns of each pass over the row, a thread every
// blockDim.x-th group. The first loop computes the maximum and the sum together: each thread rescales its sum when its
// maximum grows, and all of them once more at the end. The second loop reads the row from L1 or L2 (100 KB of bf16 for
// GPT-2's vocabulary), so that memory is read once and written once; logits are capped in both. Rows are padded to
// whole groups: the last one is read whole, and columns from V on count as -inf. `correct` compares logits before they
// are capped. With `copies` the row is copied to shared memory at once, by the threads that then read it there.
template <bool capped, bool copies>
__global__ void __launch_bounds__(classifier_threads) classifier_kernel(ClassifierArgs args) {
  float* shared = reinterpret_cast<float*>(shared_memory);
  const int V = int(args.V);
  const int64_t ld = args.ld;
  const float dloss = args.loss_scale.times(args.dloss);
  floatX* row = args.logits + int64_t(blockIdx.x) * ld;
  const int target = args.targets[blockIdx.x];
  if (target == not_scored) return skip_row(args, row);
  const float target_logit = to_float(row[target]);  // read before the barriers, after which the gradient overwrites it
  const float cap = args.cap, over_cap = 1.0f / cap;
  if (copies) {
    for (int i = int(threadIdx.x) * 8; i < ld; i += int(blockDim.x) * 8)
      copy8_async(classifier_sums_bytes + i * int(sizeof(floatX)), row + i);
    commit_copies();
    wait_for_copies();
  }
  const floatX* const logits = copies ? shared_elements(classifier_sums_bytes) : row;

  float max = -INFINITY, sum = 0;  // of this thread's columns
  for (int i = int(threadIdx.x) * 8; i < V; i += int(blockDim.x) * 8) {
    float x[8];
    load8(x, logits + i);
    if (capped)
      for (int j = 0; j < 8; j++) x[j] = cap * tanhf(x[j] * over_cap);
    if (i + 8 > V)
      for (int j = 0; j < 8; j++) x[j] = i + j < V ? x[j] : -INFINITY;
    float larger = max;
    for (int j = 0; j < 8; j++) larger = fmaxf(larger, x[j]);
    sum *= __expf(max - larger);
    for (int j = 0; j < 8; j++) sum += __expf(x[j] - larger);
    max = larger;
  }
  const float row_max = block_max(max, shared);
  // A thread without columns adds 0 * exp(-inf) = 0.
  const float row_sum = block_sum(sum * __expf(max - row_max), shared);
  if (threadIdx.x == 0)
    args.losses[blockIdx.x] =
        logf(row_sum) + (row_max - (capped ? cap * tanhf(target_logit * over_cap) : target_logit));
  if (args.correct != nullptr) {
    const float beaten = block_max(is_beaten(logits, target, target_logit, V), shared);
    if (threadIdx.x == 0) args.correct[blockIdx.x] = beaten == 0;
  }
  if (!args.write_gradient) return;

  const float scale = dloss / row_sum;
  for (int i = int(threadIdx.x) * 8; i < ld; i += int(blockDim.x) * 8) {
    float x[8], slope[8];
    load8(x, logits + i);
    for (int j = 0; j < 8; j++) {
      const float t = capped ? tanhf(x[j] * over_cap) : 0.0f;
      slope[j] = 1.0f - t * t;
      x[j] = __expf((capped ? cap * t : x[j]) - row_max);
    }
    if (i + 8 > V || unsigned(target - i) < 8) {  // the vocabulary's end and what is beyond it, or the target
      for (int j = 0; j < 8; j++) {
        const float gradient = x[j] * scale - (i + j == target ? dloss : 0.0f);
        x[j] = i + j < V ? gradient : 0.0f;
      }
    } else {
      for (int j = 0; j < 8; j++) x[j] *= scale;
    }
    if (capped)
      for (int j = 0; j < 8; j++) x[j] *= i + j < V ? slope[j] : 0.0f;
    store8(row + i, x);
  }
}

__global__ void __launch_bounds__(element_threads) cap_logits_kernel(floatX* logits, int64_t n, float cap) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8];
  load8(x, logits + i);
  for (int j = 0; j < 8; j++) x[j] = cap * tanhf(x[j] / cap);
  store8(logits + i, x);
}

// n is a multiple of 8.
inline void cap_logits(floatX* logits, int64_t n, float cap) { launch_elements(cap_logits_kernel, n, logits, n, cap); }

// stats += the rows' sums. One block, in which a thread owns every 1,024th row.
__global__ void __launch_bounds__(classifier_threads) add_losses_kernel(StepStats* stats, LossRows r) {
  double loss = 0, ponder = 0, scored = 0, correct = 0;
  for (int64_t i = threadIdx.x; i < r.count; i += blockDim.x) {
    if (r.targets[i] == not_scored) continue;
    loss += double(r.losses[i]), scored++;
    if (r.ponder != nullptr) ponder += double(r.ponder[i]);
    if (r.correct != nullptr) correct += r.correct[i];
  }
  double* shared = reinterpret_cast<double*>(shared_memory);
  loss = block_sum(loss, shared), ponder = block_sum(ponder, shared);
  scored = block_sum(scored, shared), correct = block_sum(correct, shared);
  if (threadIdx.x != 0) return;
  stats->loss += loss / r.divisor, stats->ponder += ponder / r.divisor;
  stats->scored += scored, stats->correct += correct, stats->tokens += double(r.count);
}

// stats (1) += the rows' loss, ponder, scored, tokens and correct. Sums are in double, on the device.
inline void add_losses(StepStats* stats, const LossRows& rows) {
  launch(add_losses_kernel, 1, classifier_threads, classifier_threads / warp_size * sizeof(double), stats, rows);
}

// losses =, correct =, logits = as the head and ClassifierArgs say. ld is a multiple of 64 (whole tiles of the head's
// matmuls).
inline void classifier(const ClassifierArgs& args) {
  CHECK(args.V <= args.ld && args.ld % 64 == 0);
  const int threads = int(std::min<int64_t>(classifier_threads, ceil_div(args.V, 8 * warp_size) * warp_size));
  const size_t row_bytes = size_t(args.ld) * sizeof(floatX), sums_bytes = classifier_sums_bytes;
  // A multiprocessor's shared memory has room for two blocks.
  const bool copies = gpu().candidates.classifier && 2 * (sums_bytes + row_bytes) <= gpu().shared_bytes;
  const auto kernel = args.cap > 0 ? copies ? classifier_kernel<true, true> : classifier_kernel<true, false>
                      : copies ? classifier_kernel<false, true>
                                   : classifier_kernel<false, false>;
  launch(kernel, unsigned(args.rows), unsigned(threads), sums_bytes + (copies ? row_bytes : 0), args);
}
