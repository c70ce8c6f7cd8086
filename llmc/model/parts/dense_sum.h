// What follows a layer with `dense` (terms/dense.h): the input of the next layer, or of the last norm, is a weighted
// sum of the embeddings and the outputs of all layers so far. All of these are kept; generation keeps them for the new
// tokens alone. The backward pass keeps the gradient of each layer's input, so that the gradient of a layer's output is
// a sum like the forward pass's, and rounded as often: once, or on a GPU once for each 64 terms.
#pragma once
#include <vector>
#include "llmc/model/binding.h"
#include "add_residual.h"
#include "llmc/ops/weighted_sum.h"

struct DenseSum {
  int64_t C = 0;
  int layer = 0;                          // the one before
  floatX* out = nullptr;                  // (N, C)
  std::vector<WeightedTensor> outputs;    // of the embeddings and of layers 0 to `layer`: what is summed
  floatX* dout = nullptr;                 // (N, C): the gradient of out, the input of the next layer or the last norm
  floatX* doutput = nullptr;              // (N, C): the gradient of the layer's own output,
  std::vector<WeightedTensor> gradients;  //   and of what it is a sum: gradients of inputs of the layers above
  float *dweights = nullptr, *scratch = nullptr;
};

// `before`: how the output of the layer's last branch joins the stream, which is the layer's output.
inline void declare(DenseSum& d, AddResidual& before, ActivationList& list) {
  list.add(MemoryGroup::activations, "layer_output", before.out, {list.shape.rows, d.C});
  list.in_buffer(buffers::branch_out, before.branch_out, {list.shape.rows, d.C});
  const int64_t N = list.shape.rows, L = list.shape.config.num_layers;
  list.of_sublayer(Recompute::norm, "layer_input", d.out, {N, d.C});
  if (!list.shape.training) return;
  list.add(MemoryGroup::backward, "dlayer_input", d.dout, {N, d.C});
  list.in_buffer({"dense_scratch", MemoryGroup::backward}, d.scratch, {weighted_sum_pieces(N * d.C), L + 1});
}

// The gradient of the embeddings, output 0, or of layer l's output, l + 1, is the sum of these; the embeddings' has
// beside it what comes through layer 0. `dinputs`: the gradients of the inputs of all layers, and of the last norm.
inline std::vector<WeightedTensor> gradients_of_output(int output, const Params<floatX>& params,
                                                       const std::vector<floatX*>& dinputs) {
  std::vector<WeightedTensor> terms;
  for (int l = std::max(output - 1, 0); l + 1 < int(dinputs.size()); l++)
    terms.push_back({dinputs[size_t(l) + 1], params.layers[size_t(l)].dense + output});
  return terms;
}

// Sets the pointers; `outputs`: those so far, the layer's own the last; `dinputs`: as above, none in generation, where
// `dweights` is null. Returns `out`.
inline const floatX* bind_dense(DenseSum& d, const std::vector<const floatX*>& outputs, const Params<floatX>& params,
                                float* dweights, const std::vector<floatX*>& dinputs) {
  for (size_t i = 0; i < outputs.size(); i++)
    d.outputs.push_back({outputs[i], params.layers[size_t(d.layer)].dense + i});
  if (dweights == nullptr) return d.out;
  d.doutput = dinputs[size_t(d.layer)];
  d.gradients = gradients_of_output(d.layer + 1, params, dinputs);
  d.dweights = dweights;
  return d.out;
}

inline void dense_forward(const DenseSum& d, const Batch& batch) {
  weighted_sum(d.out, d.outputs, batch.rows() * d.C, /*accumulate=*/false);
}

// From the gradients of this and all later sums: dweights +=, doutput =.
inline void dense_backward(const DenseSum& d, const Batch& batch) {
  weighted_sum_backward(d.dweights, d.dout, d.outputs, d.scratch, batch.rows() * d.C);
  weighted_sum(d.doutput, d.gradients, batch.rows() * d.C, /*accumulate=*/false);
}

// Products of a token with weights.
inline double matmul_elements(const DenseSum& d) { return double(d.layer + 2) * double(d.C); }
