// What follows a layer with `dense` (terms/dense.h): the input of the next layer, or of the last norm, is a weighted
// sum of the embeddings and the outputs of all layers so far. All of these are kept; generation keeps them for the new
// tokens alone. The backward pass keeps the gradient of each layer's input, so that the gradient of a layer's output is
// a sum like the forward pass's, and rounded once.
#pragma once
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/ops/weighted_sum.h"

struct DenseSum {
  int64_t C = 0;
  int layer = 0;                          // the one before
  floatX* out = nullptr;                  // (N, C)
  std::vector<WeightedTensor> outputs;    // of the embeddings and of layers 0 to `layer`: what is summed
  const floatX* dout = nullptr;           // (N, C): the gradient of out
  floatX* doutput = nullptr;              // (N, C): the gradient of the layer's own output,
  std::vector<WeightedTensor> gradients;  //   and of what it is a sum: gradients of inputs of the layers above
  float *dweights = nullptr, *scratch = nullptr;
};

// `output`: the layer's own.
inline void declare(DenseSum& d, floatX*& output, ActivationList& list) {
  list.add(MemoryGroup::activations, "layer_output", output, {list.shape.rows, d.C});
  list.of_sublayer(Recompute::norm, "layer_input", d.out, {list.shape.rows, d.C});
}

// The gradient of layer l's input (N, C); l = L is the last norm. The first layer's input is the embeddings.
inline floatX* dlayer_input(const Activations& acts, int l) {
  return l == 0 ? acts.dresidual : acts.dlayer_inputs[l - 1];
}

// The gradient of the embeddings, output 0, or of layer l's output, l + 1, is the sum of these; for the embeddings
// there is also what comes through layer 0.
inline std::vector<WeightedTensor> gradients_of_output(int output, const Params<floatX>& params,
                                                       const Activations& acts) {
  std::vector<WeightedTensor> terms;
  for (int l = std::max(output - 1, 0); l < int(acts.dlayer_inputs.size()); l++)
    terms.push_back({dlayer_input(acts, l + 1), params.layers[size_t(l)].dense + output});
  return terms;
}

// Sets the pointers; `outputs`: those so far, the layer's own the last. Returns `out`. In generation `dweights` is
// null.
inline const floatX* bind_dense(DenseSum& d, const std::vector<const floatX*>& outputs, const Params<floatX>& params,
                                float* dweights, const Activations& acts) {
  for (size_t i = 0; i < outputs.size(); i++)
    d.outputs.push_back({outputs[i], params.layers[size_t(d.layer)].dense + i});
  if (dweights == nullptr) return d.out;
  d.dout = dlayer_input(acts, d.layer + 1), d.doutput = dlayer_input(acts, d.layer);
  d.gradients = gradients_of_output(d.layer + 1, params, acts);
  d.dweights = dweights, d.scratch = acts.dense_scratch;
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
