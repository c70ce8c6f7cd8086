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
  AttentionParams<float> g;
  RelativeQueries<floatX> queries;
  RelativeQueryGradients<floatX> gradients;
};

// Declares r. Generation keeps that of each layer for as long as a text continues.
inline void declare(RelativeAttention& relative, ActivationList& list) {
  relative.C = list.shape.config.channels, relative.distances = relative_distances(list.shape);
  const std::vector<int64_t> shape = {relative.distances, relative.C};
  if (list.shape.generation) list.add(MemoryGroup::activations, "relative", relative.r, shape);
  else list.of_sublayer(Recompute::block, "relative", relative.r, shape);
}

// Sets the pointers, and those of the attention, whose q and dq are those of the layer until then.
inline void bind_relative(RelativeAttention& relative, const AttentionParams<floatX>& w,
                          const AttentionParams<float>& g, const Activations& acts, AttentionArgs<floatX>& args) {
  relative.sines = acts.sines, relative.w = w.relativew, relative.g = g, relative.dr = acts.relative_dr;
  relative.queries = {args.q, args.q_stride, w.relativeu, w.relativev, acts.queries_of_keys, acts.queries_of_distances};
  relative.gradients = {args.dq, args.dq_stride, acts.dqueries_of_keys, acts.dqueries_of_distances};
  args.q = acts.queries_of_keys, args.dq = acts.dqueries_of_keys;
  args.q_stride = args.dq_stride = relative.C;
  args.relative = {acts.queries_of_distances,  relative.r,       relative.distances,
                   acts.dqueries_of_distances, acts.relative_dr, acts.relative_dr_of_sequences};
}

// The first row of the distances that occur in a batch of training.
inline int64_t first_distance_row(const RelativeAttention& relative, const Batch& batch) {
  return relative.distances - (batch.remembered + batch.T);
}

// The operand of attention with the distances of a batch of training.
inline RelativePositions<floatX> positions_of(const RelativeAttention& relative, RelativePositions<floatX> positions,
                                              const Batch& batch) {
  const int64_t first = first_distance_row(relative, batch);
  positions.r += first * relative.C, positions.distances -= first;
  return positions;
}

// r =, for all distances in generation. While a text continues weights do not change, and r stays.
inline void distances_forward(const RelativeAttention& relative, const Batch& batch) {
  const auto begins = [](const SequencePart& part) { return part.first == 0; };
  const bool is_generation = !batch.parts.empty();
  if (is_generation && std::none_of(batch.parts.begin(), batch.parts.end(), begins)) return;
  const int64_t C = relative.C, first = is_generation ? 0 : first_distance_row(relative, batch);
  matmul_forward(relative.r + first * C, relative.sines + first * C, relative.w, nullptr, relative.distances - first, C,
                 C);
}

// Both queries =. The backward pass of the attention computes them again, because other layers have overwritten them.
inline void queries_forward(const RelativeAttention& relative, const Batch& batch) {
  relative_queries_forward(relative.queries, batch.rows(), relative.C);
}

inline void relative_forward(const RelativeAttention& relative, const Batch& batch) {
  distances_forward(relative, batch);
  queries_forward(relative, batch);
}

// From the gradients of both queries and of r: dq =, and those of u, v and W +=.
inline void relative_backward(const RelativeAttention& relative, const Batch& batch) {
  const int64_t N = batch.rows(), C = relative.C, first = first_distance_row(relative, batch);
  bias_backward(relative.g.relativeu, relative.gradients.of_keys, N, C);
  bias_backward(relative.g.relativev, relative.gradients.of_distances, N, C);
  relative_queries_backward(relative.gradients, N, C);
  matmul_backward_weight(relative.g.relativew, nullptr, relative.dr, relative.sines + first * C,
                         relative.distances - first, C, C);
}
