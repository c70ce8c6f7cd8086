// What the parts of the model are made from (parts/): operations, lists of activations and parameters, a batch; and
// what a branch gets to set its pointers and sizes.
#pragma once
#include "activation_list.h"
#include "activations.h"
#include "attention_plan.h"
#include "batch.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "parameters.h"
#include "shape.h"

// The model's shape, weights and shared activations.
struct Binding {
  const ModelShape& shape;
  const Activations& acts;
  const KVCache* cache;  // of generation
  const Params<floatX>& params;
  const Params<float>& grads;  // in generation null pointers

  const AttentionPlan& plan() const { return shape.attention_plan; }
  int64_t head_size() const { return shape.config.head_size(); }
  // The parameters of layer l's attention, and their gradients.
  const AttentionParams<floatX>& weights(int l) const { return of_layer(params, l).attention; }
  const AttentionParams<float>& gradients(int l) const { return of_layer(grads, l).attention; }

 private:
  template <class T>
  const LayerParams<T>& of_layer(const Params<T>& p, int l) const {
    return p.layers[size_t(l % plan().table.stored_layers)];
  }
};
