// How a branch's output joins the residual stream with `reversible` (terms/reversible.h). There are two streams, in
// fp32 so that sums can be undone: attention's output is added to the first, the MLP's to the second, and each branch
// reads the other stream, so that the backward pass can take back what a branch added: it computes the branch again,
// from a stream that has not changed since, and subtracts. No sublayer keeps anything but K/V that other layers use.
//
// A LayerNorm reads its stream rounded to floatX. There is one tensor for that, Activations::embedded, because each
// LayerNorm reads the stream that the sublayer before it has added to; before the output head it holds the streams'
// mean.
#pragma once
#include "llmc/model/binding.h"
#include "norm.h"

// The two streams and their gradients.
struct Streams {
  float *x1 = nullptr, *x2 = nullptr;     // (N, C)
  floatX *dx1 = nullptr, *dx2 = nullptr;  // (N, C)
  floatX* rounded = nullptr;              // (N, C): a stream, or the mean of both
};

struct ReversibleResidual {
  int64_t C = 0;
  bool is_last = false;  // after it the output head reads the mean of both
  bool adds_to_first = false;
  floatX* branch_out = nullptr;  // (N, C)
  Streams streams;

  float* x() const { return adds_to_first ? streams.x1 : streams.x2; }
  float* read_x() const { return adds_to_first ? streams.x2 : streams.x1; }  // what the sublayer's LayerNorm reads
  floatX* dx() const { return adds_to_first ? streams.dx1 : streams.dx2; }
  floatX* read_dx() const { return adds_to_first ? streams.dx2 : streams.dx1; }
};

inline void declare(ReversibleResidual& r, Recompute, ActivationList& list) {
  const std::vector<int64_t> shape = {list.shape.rows, r.C};
  list.in_buffer(buffers::branch_out, r.branch_out, shape);
  list.in_buffer({"first stream"}, r.streams.x1, shape);
  list.in_buffer({"second stream"}, r.streams.x2, shape);
  if (list.shape.training) list.in_buffer({"dstream", MemoryGroup::backward}, r.streams.dx2, shape);
}

// Sets the pointers. Returns what the next LayerNorm reads.
inline const floatX* bind_residual(ReversibleResidual& r, const floatX*, const Activations& acts) {
  r.streams.dx1 = acts.dresidual, r.streams.rounded = acts.embedded;
  return r.streams.rounded;
}

// The sublayer's stream += branch_out; rounded = what the next LayerNorm reads.
inline void residual_forward(const ReversibleResidual& r, const Batch& batch) {
  const int64_t n = batch.rows() * r.C;
  stream_add(r.x(), r.streams.rounded, r.branch_out, /*factor=*/1, n);
  if (r.is_last) streams_mean(r.streams.rounded, r.streams.x1, r.streams.x2, n);
}

// In the backward pass: the sublayer's stream as it was before branch_out was added; `rounded` becomes the same, which
// is what the LayerNorm before this one read.
inline void take_back(const ReversibleResidual& r, const Batch& batch) {
  stream_add(r.x(), r.streams.rounded, r.branch_out, /*factor=*/-1, batch.rows() * r.C);
}

// In the backward pass: rounded = what the sublayer's LayerNorm read.
inline void round_stream(const ReversibleResidual& r, const Batch& batch) {
  streams_mean(r.streams.rounded, r.read_x(), r.read_x(), batch.rows() * r.C);
}

// Returns the gradient of branch_out (N, C), which equals the gradient of the stream that it was added to.
inline const floatX* residual_backward(const ReversibleResidual& r, const Batch& batch) {
  if (r.is_last) streams_mean_backward(r.streams.dx1, r.streams.dx2, batch.rows() * r.C);
  return r.dx();
}
