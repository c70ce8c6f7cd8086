// What a layer's attention with relative positions computes beside others (terms/relative.h,
// llmc/ops/relative.h): r of the distances, and the two queries. With a memory, distances reach over it.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/model/binding.h"
#include "llmc/ops/attention_args.h"
#include "llmc/ops/relative.h"

struct RelativeAttention {
  int64_t C = 0, distances = 0;
  const floatX *sines = nullptr, *w = nullptr;  // (distances, C), (C, C)
  floatX *r = nullptr, *dr = nullptr;           // (distances, C)
  float* dr_of_sequences = nullptr;             // (B, distances, C)
  AttentionParams<float> g;
  RelativeQueries queries;
  RelativeQueryGradients gradients;
};

// Generation keeps the r of each layer for as long as a text continues.
inline void declare(RelativeAttention& relative, ActivationList& list) {
  const ModelShape& shape = list.shape;
  relative.C = shape.config.channels, relative.distances = relative_distances(shape);
  const int64_t N = shape.rows, C = relative.C, D = relative.distances;
  list.in_buffer({"queries_of_keys"}, relative.queries.of_keys, {N, C});
  list.in_buffer({"queries_of_distances"}, relative.queries.of_distances, {N, C});
  if (shape.generation) return list.add(MemoryGroup::activations, "relative", relative.r, {D, C});
  list.of_sublayer(Recompute::block, "relative", relative.r, {D, C});
  constexpr MemoryGroup backward = MemoryGroup::backward;
  list.in_buffer({"dqueries_of_keys", backward}, relative.gradients.of_keys, {N, C});
  list.in_buffer({"dqueries_of_distances", backward}, relative.gradients.of_distances, {N, C});
  list.in_buffer({"relative_dr", backward}, relative.dr, {D, C});
  list.in_buffer({"relative_dr_of_sequences", backward}, relative.dr_of_sequences, {shape.training->B, D, C});
}

// Sets the pointers, and the attention's: its q and dq, which are the layer's so far, become q + u and its gradient.
inline void bind_relative(RelativeAttention& relative, const AttentionParams<floatX>& w,
                          const AttentionParams<float>& g, const Activations& acts, AttentionArgs& args) {
  RelativeQueries& queries = relative.queries;
  RelativeQueryGradients& gradients = relative.gradients;
  relative.sines = acts.sines, relative.w = w.relativew, relative.g = g;
  queries.q = args.q, queries.q_stride = args.q_stride, queries.u = w.relativeu, queries.v = w.relativev;
  gradients.dq = args.dq, gradients.dq_stride = args.dq_stride;
  args.q = queries.of_keys, args.dq = gradients.of_keys;
  args.q_stride = args.dq_stride = relative.C;
  args.relative = {queries.of_distances,   relative.r,  relative.distances,
                   gradients.of_distances, relative.dr, relative.dr_of_sequences};
}

// The first row of the distances that occur in a batch of training.
inline int64_t first_distance_row(const RelativeAttention& relative, const Batch& batch) {
  return relative.distances - (batch.remembered + batch.T);
}

// The operand of attention with the distances of a batch of training.
inline RelativePositions positions_of(const RelativeAttention& relative, RelativePositions positions,
                                      const Batch& batch) {
  const int64_t first = first_distance_row(relative, batch);
  positions.r += first * relative.C, positions.distances -= first;
  return positions;
}

// r =, for all distances in generation. While a text continues weights do not change, and r stays.
inline void distances_forward(const RelativeAttention& relative, const Batch& batch) {
  const auto begins = [](const SequenceSpan& span) { return span.first == 0; };
  const bool is_generation = !batch.spans.empty();
  if (is_generation && std::none_of(batch.spans.begin(), batch.spans.end(), begins)) return;
  const int64_t C = relative.C, first = is_generation ? 0 : first_distance_row(relative, batch);
  matmul_forward(relative.r + first * C, relative.sines + first * C, relative.w, nullptr, relative.distances - first, C,
                 C);
}

// From the gradients of both queries and of r: dq =, and the gradients of u, v and W +=.
inline void relative_backward(const RelativeAttention& relative, const Batch& batch) {
  const int64_t N = batch.rows(), C = relative.C, first = first_distance_row(relative, batch);
  bias_backward(relative.g.relativeu, relative.gradients.of_keys, N, C);
  bias_backward(relative.g.relativev, relative.gradients.of_distances, N, C);
  relative_queries_backward(relative.gradients, N, C);
  matmul_backward_weight(relative.g.relativew, nullptr, relative.dr, relative.sines + first * C,
                         relative.distances - first, C, C);
}
