// GPT-2 with any wiring of its attention, written to be checked by eye: forward, backward and AdamW as loops over
// indices. It is what the trainer is measured against, so it shares nothing with it but ModelConfig, and takes no
// shortcut: nothing is fused, recomputed, tiled or left out. It takes the wiring's terms alone, and says itself what
// they mean: masks and attention maps are whole matrices, the keys and values of a head's sources are concatenated, and
// q, k and v that nobody uses are projected all the same (their gradient comes out as zero by itself).
//
// B batch, T length, C channels, L layers, h heads of size hs = C / h, g K/V heads (h without grouped-query attention),
// S sources of a head: the layers whose K/V it attends to; V vocabulary; m positions of each sequence that the memory
// holds (0 without `memory`), K = m + T keys of each source. Shapes are in the order of memory.
// An Array is an activation, (B, T, something) unless said otherwise; a Tensor is a parameter, its gradient or its
// optimizer state. Parameters bear their Hugging Face GPT-2 names; a linear layer's weight is (in, out), as in
// GPT-2's Conv1D. layers.h has parameters and layers, attention.h attention of one head; here is what is made of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>
#include "dev/test/reference/attention.h"
#include "dev/test/reference/dropout.h"
#include "dev/test/reference/layers.h"
#include "llmc/wiring/config.h"
#include "llmc/base/error.h"

namespace reference {

// Before each cycle: the residual stream x (B, T, C) += wpe[t] + wse[cycle]. A model may have either, both or none.
template <class Real>
void add_coordinates(const Tensors<Real>& params, int cycle, int64_t T, int64_t C, Array<Real>& x) {
  const Tensor<Real>*wpe = find(params, "wpe.weight"), *wse = find(params, "wse.weight");
  for (int64_t i = 0; i < int64_t(x.size()); i++) {
    if (wpe) x[i] += wpe->data[i / C % T * C + i % C];
    if (wse) x[i] += wse->data[cycle * C + i % C];
  }
}

// The gradients of wpe and wse are +=; the gradient of x is d_x before and after.
template <class Real>
void add_coordinates_backward(const Array<Real>& d_x, int cycle, int64_t T, int64_t C, Tensors<Real>& grads) {
  Tensor<Real>*d_wpe = find(grads, "wpe.weight"), *d_wse = find(grads, "wse.weight");
  for (int64_t i = 0; i < int64_t(d_x.size()); i++) {
    if (d_wpe) d_wpe->data[i / C % T * C + i % C] += d_x[i];
    if (d_wse) d_wse->data[cycle * C + i % C] += d_x[i];
  }
}

// How many residual streams there are: two of `reversible`, whose branches each read one and join the other.
inline int num_streams(const ModelConfig& config) { return find_term<ReversibleTerm>(config) ? 2 : 1; }

template <class Real>
Array<Real> mean_of(const std::vector<Array<Real>>& arrays) {
  Array<Real> mean(arrays[0].size());
  for (const Array<Real>& array : arrays)
    for (size_t i = 0; i < mean.size(); i++) mean[i] += array[i] / arrays.size();
  return mean;
}

// ----------------------------------------------------------------------------
// The model, forward

// Attention of one head.
template <class Real>
struct HeadCache {
  Array<Real> q;                   // (B, T, hs)      with `relative` q + u, and
  Array<Real> q_v;                 // (B, T, hs)      q + v
  Array<Real> k, v;                // (B, S * K, hs)  with `lsh` k = q / |q|
  Array<Real> q_before, k_before;  // the norm of `qknorm`; empty without it
  Array<Real> own_map;  // (B, T, S * K)  of these q and k; neither it nor q and k exist where the layer reuses a map
  Array<Real> map;      // (B, T, S * K)  what v is weighed by, but for dropout
};

// `relative`: what a layer's scores take from the distance of query and key. Empty without it.
template <class Real>
struct Distances {
  Array<Real> r;     // (K, C)   r_d = s_d W of the distances d
  Array<Real> u, v;  // (h, hs)
};

// With `lsh`: the buckets of each head's q, (h) of (rounds, B, T).
using HeadBuckets = std::vector<std::vector<int>>;

template <class Real>
struct LayerCache {
  Norm<Real> ln_1;  // (B, K, ...)   of the memory's rows and the segment's
  Array<Real> qkv;  // (B, K, C + 2 g hs)  what this layer projects, for itself and higher layers; with `lsh` q and v
  // (B, K, C + 2 g hs)  with `vres`, `router` and `depth` qkv before what layers below add to it; else empty. With
  // `router` its k is after `qknorm`, and normed_k is k before it; with `depth` its q and k are after `qknorm`.
  Array<Real> projected;
  Array<Real> normed_k;  // (B, K, g hs)
  Array<Real> mix;       // (B, T)        a of `blend` and `gate`; empty where the layer's map is its own
  Distances<Real> distances;
  Array<Real> sinks;                   // (h) of `sinks`; empty without it
  Array<Real> rotations;               // (h, rounds, hs, buckets / 2) of `lsh`; empty without it
  HeadBuckets buckets;                 // of `lsh`
  std::vector<HeadCache<Real>> heads;  // (h)
  Array<Real> heads_out;               // (B, T, C)     attention's output before its projection
  Norm<Real> ln_2;
  Array<Real> fc, fc_act;   // (B, T, ...)   before and after the MLP's activation
  Gate<Real> gru_1, gru_2;  // after attention and after the MLP; empty without `gru`
};

template <class Real>
struct Cache {
  int B = 0, T = 0, m = 0;
  std::vector<int> inputs, targets;      // (B, T)
  std::vector<LayerCache<Real>> layers;  // (L)
  Halting<Real> halting;                 // empty without `act`
  std::vector<Array<Real>> outputs;      // (L + 1) of (B, T, C)  with `dense` y_0 to y_L; else empty
  UpdateDraw draw;
  Norm<Real> ln_f;     // ln_f.out: the last hidden state
  Array<Real> logits;  // (B, T, V)  with `softcap` capped
  Array<Real> probs;   // (B, T, V)  softmax of the logits
};

// `memory`: each layer's input at the last m positions of each sequence: (L) of (B, m, C). Empty where a stream begins.
template <class Real>
using Memory = std::vector<Array<Real>>;

template <class Real>
struct Result {
  double loss = 0;           // mean of token_losses over the scored tokens, nats; 0 if there is none
  double ponder = 0;         // `act`: mean of their N + R. What is minimised is loss + cost * ponder
  Array<Real> token_losses;  // (B, T)  -log p(target), 0 where the target is -1: it is not scored
};

// Where head `head` has its q, k and v among the columns of c_attn; with `lsh` k is made of q.
struct HeadColumns {
  int64_t q, k, v;
};

inline HeadColumns head_columns(const ModelConfig& config, int head) {
  const int64_t C = config.channels, hs = config.head_size(), g = num_kv_heads(config);
  const int64_t kv_head = head * g / config.num_heads;
  if (find_term<LshTerm>(config)) return {head * hs, head * hs, C + head * hs};
  return {head * hs, C + kv_head * hs, C + g * hs + kv_head * hs};
}

// `vres`: layer l's v, of the qkv that it projected, becomes a v + b v_0, v_0 being layer 0's. A row has C + 2 w
// columns, the last w of them v.
template <class Real>
void mix_values(const Tensors<Real>& params, const std::string& name, std::vector<LayerCache<Real>>& layers, int l,
                int64_t C, int64_t w) {
  const std::vector<Real>& ab = params.at(name).data;
  layers[l].projected = layers[l].qkv;
  for (int64_t i = 0; i < int64_t(layers[l].qkv.size()); i++)
    if (i % (C + 2 * w) >= C + w) layers[l].qkv[i] = ab[0] * layers[l].projected[i] + ab[1] * layers[0].qkv[i];
}

// The gradients of a, b and what layer 0 projected (d_first) +=; d becomes the gradient of what layer l projected.
template <class Real>
void mix_values_backward(const Tensors<Real>& params, const std::string& name,
                         const std::vector<LayerCache<Real>>& layers, int l, int64_t C, int64_t w, Array<Real>& d,
                         Array<Real>& d_first, Tensors<Real>& grads) {
  const std::vector<Real>& ab = params.at(name).data;
  std::vector<Real>& d_ab = grads.at(name).data;
  for (int64_t i = 0; i < int64_t(d.size()); i++) {
    if (i % (C + 2 * w) < C + w) continue;
    d_ab[0] += d[i] * layers[l].projected[i];
    d_ab[1] += d[i] * layers[0].qkv[i];
    d_first[i] += ab[1] * d[i];
    d[i] *= ab[0];
  }
}

// Calls visit(row, out, j, in, r) for each element that `router` adds to one of layer l: to column `out` of a row of
// qkv R[r] times column `in` of the row of what layer j projected. Widths of a row: C + 2 g hs.
template <class Visit>
void for_each_routed(int64_t rows, int l, int64_t C, int64_t g, int64_t hs, Visit visit) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t first : {C, C + g * hs})  // of k, of v
      for (int64_t a = 0; a < g; a++)
        for (int64_t j = 0; j <= l; j++)
          for (int64_t b = 0; b < g; b++)
            for (int64_t c = 0; c < hs; c++)
              visit(row, first + a * hs + c, j, first + b * hs + c, (a * (l + 1) + j) * g + b);
}

// `router`: layer l's `projected` becomes its qkv as it was projected, but with k after `qknorm`: what routers use.
// From layer 1 on k and v of qkv become sums over the layers up to l.
template <class Real>
void route(const ModelConfig& config, const Tensors<Real>& params, const std::string& name,
           std::vector<LayerCache<Real>>& layers, int l) {
  const int64_t C = config.channels, g = num_kv_heads(config), hs = config.head_size(), width = C + 2 * g * hs;
  const int64_t rows = int64_t(layers[l].qkv.size()) / width;
  Array<Real>& projected = layers[l].projected = layers[l].qkv;
  if (find_term<QknormTerm>(config)) {
    layers[l].normed_k = take_columns<Real>({&layers[l].qkv}, C, 1, rows, g * hs);
    const Array<Real> k = normed_rows(layers[l].normed_k, hs);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t c = 0; c < g * hs; c++) projected[row * width + C + c] = k[row * g * hs + c];
  }
  Array<Real>& qkv = layers[l].qkv = projected;
  if (l == 0) return;
  const std::vector<Real>& R = params.at(name).data;
  for (int64_t i = 0; i < int64_t(qkv.size()); i++)
    if (i % width >= C) qkv[i] = 0;
  for_each_routed(rows, l, C, g, hs, [&](int64_t row, int64_t out, int64_t j, int64_t in, int64_t r) {
    qkv[row * width + out] += R[r] * layers[j].projected[row * width + in];
  });
}

// From the gradients of each layer's qkv, and of what routers above have used, in d_projected: the gradient of R +=,
// d_projected of the layers up to l +=; d_qkv[l] becomes the gradient of what c_attn of layer l gave.
template <class Real>
void route_backward(const ModelConfig& config, const Tensors<Real>& params, const std::string& name,
                    const std::vector<LayerCache<Real>>& layers, int l, std::vector<Array<Real>>& d_qkv,
                    std::vector<Array<Real>>& d_projected, Tensors<Real>& grads) {
  const int64_t C = config.channels, g = num_kv_heads(config), hs = config.head_size(), width = C + 2 * g * hs;
  const int64_t rows = int64_t(layers[l].qkv.size()) / width;
  Array<Real>& d = d_qkv[l];
  if (l > 0) {
    const std::vector<Real>& R = params.at(name).data;
    std::vector<Real>& d_R = grads.at(name).data;
    for_each_routed(rows, l, C, g, hs, [&](int64_t row, int64_t out, int64_t j, int64_t in, int64_t r) {
      d_R[r] += d[row * width + out] * layers[j].projected[row * width + in];
      d_projected[j][row * width + in] += R[r] * d[row * width + out];
    });
    for (int64_t i = 0; i < int64_t(d.size()); i++)
      if (i % width >= C) d[i] = 0;
  }
  add_into(d, d_projected[l]);
  if (!find_term<QknormTerm>(config)) return;
  const Array<Real> d_k = normed_rows_backward(layers[l].normed_k, take_columns<Real>({&d}, C, 1, rows, g * hs), hs);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t c = 0; c < g * hs; c++) d[row * width + C + c] = d_k[row * g * hs + c];
}

// `depth`: calls visit(q, p) at each row and head, q the index of the head's first channel in a row of qkv (B, T, 3 C),
// p (l + 1) the weights of the layers' v. Rotations of `rope` leave products of q and k of one token as they are.
template <class Real, class Visit>
void for_each_query_of_depth(const ModelConfig& config, const std::vector<LayerCache<Real>>& layers, int l,
                             Visit visit) {
  const int64_t C = config.channels, hs = config.head_size();
  for (int64_t row = 0; row < int64_t(layers[l].qkv.size()); row += 3 * C)
    for (int64_t q = row; q < row + C; q += hs) {
      Array<Real> p(l + 1);
      for (int j = 0; j <= l; j++)
        for (int64_t c = 0; c < hs; c++) p[j] += layers[l].projected[q + c] * layers[j].projected[q + C + c];
      Real sum = 0;
      for (Real& x : p) sum += x = std::exp(x / std::sqrt(Real(hs)));
      for (Real& x : p) x /= sum;
      visit(q, p);
    }
}

// `depth`: v of layer l's qkv, as it was projected, becomes the weighted sum of the layers' v.
template <class Real>
void mix_depth(const ModelConfig& config, std::vector<LayerCache<Real>>& layers, int l) {
  const int64_t C = config.channels, hs = config.head_size();
  Array<Real>&qkv = layers[l].qkv, &projected = layers[l].projected = qkv;
  if (find_term<QknormTerm>(config)) {
    const int64_t rows = int64_t(qkv.size()) / (3 * C);
    const Array<Real> qk = normed_rows(take_columns<Real>({&qkv}, 0, 1, rows, 2 * C), hs);
    for (size_t i = 0; i < qk.size(); i++) projected[i / (2 * C) * 3 * C + i % (2 * C)] = qk[i];
  }
  for_each_query_of_depth(config, layers, l, [&](int64_t q, const Array<Real>& p) {
    for (int64_t v = q + 2 * C; v < q + 2 * C + hs; v++) {
      qkv[v] = 0;
      for (int j = 0; j <= l; j++) qkv[v] += p[j] * layers[j].projected[v];
    }
  });
}

// From d_qkv, the gradient of layer l's qkv: d_projected, the gradients of `projected` in the layers up to l, +=; d_qkv
// becomes the gradient of what c_attn of layer l gave.
template <class Real>
void mix_depth_backward(const ModelConfig& config, const std::vector<LayerCache<Real>>& layers, int l,
                        Array<Real>& d_qkv, std::vector<Array<Real>>& d_projected) {
  const int64_t C = config.channels, hs = config.head_size();
  for_each_query_of_depth(config, layers, l, [&](int64_t q, const Array<Real>& p) {
    const int64_t k = q + C, v = q + 2 * C;
    Array<Real> d_p(l + 1);
    Real mean = 0;
    for (int j = 0; j <= l; j++) {
      for (int64_t c = 0; c < hs; c++) d_p[j] += d_qkv[v + c] * layers[j].projected[v + c];
      mean += p[j] * d_p[j];
    }
    for (int j = 0; j <= l; j++) {
      const Real d_score = p[j] * (d_p[j] - mean) / std::sqrt(Real(hs));
      for (int64_t c = 0; c < hs; c++) {
        d_projected[l][q + c] += d_score * layers[j].projected[k + c];
        d_projected[j][k + c] += d_score * layers[l].projected[q + c];
        d_projected[j][v + c] += p[j] * d_qkv[v + c];
      }
    }
  });
  Array<Real> d = d_projected[l];
  if (find_term<QknormTerm>(config)) {
    const int64_t rows = int64_t(d.size()) / (3 * C);
    const Array<Real> d_qk = normed_rows_backward(take_columns<Real>({&layers[l].qkv}, 0, 1, rows, 2 * C),
                                                  take_columns<Real>({&d}, 0, 1, rows, 2 * C), hs);
    for (size_t i = 0; i < d_qk.size(); i++) d[i / (2 * C) * 3 * C + i % (2 * C)] = d_qk[i];
  }
  for (size_t i = 0; i < d.size(); i++) d_qkv[i] = d[i] + (int64_t(i) % (3 * C) < 2 * C ? d_qkv[i] : 0);
}

// `dense`: what follows the layer of that name: the sum of a_i y_i. The layer has a weight a_i for each output y_i so
// far.
template <class Real>
Array<Real> sum_of_outputs(const Tensors<Real>& params, const std::string& name,
                           const std::vector<Array<Real>>& outputs) {
  const std::vector<Real>& a = params.at(name + ".dense").data;
  CHECK(a.size() == outputs.size());
  Array<Real> sum(outputs[0].size());
  for (size_t i = 0; i < a.size(); i++)
    for (size_t n = 0; n < sum.size(); n++) sum[n] += a[i] * outputs[i][n];
  return sum;
}

// From d, the gradient of the sum of the first `count` outputs: d_outputs and the gradient of a +=.
template <class Real>
void sum_of_outputs_backward(const Tensors<Real>& params, const std::string& name,
                             const std::vector<Array<Real>>& outputs, int count, const Array<Real>& d,
                             std::vector<Array<Real>>& d_outputs, Tensors<Real>& grads) {
  const std::vector<Real>& a = params.at(name + ".dense").data;
  std::vector<Real>& d_a = grads.at(name + ".dense").data;
  for (int i = 0; i < count; i++)
    for (size_t n = 0; n < d.size(); n++) {
      d_a[i] += d[n] * outputs[i][n];
      d_outputs[i][n] += a[i] * d[n];
    }
}

// Fills layer l's `heads` and `heads_out`, and `buckets` unless they are there; its `qkv`, `mix`, `distances` and
// `rotations`, the layers below, and the tokens (B, T), are given.
template <class Real>
void attention(const ModelConfig& config, const UpdateDraw& draw, std::vector<LayerCache<Real>>& layers, int l,
               const std::vector<int>& tokens, int64_t B, int64_t m, int64_t T) {
  const int64_t C = config.channels, hs = config.head_size(), K = m + T;
  const TopkTerm* topk = find_term<TopkTerm>(config);
  const RopeTerm* rope = find_term<RopeTerm>(config);
  const LshTerm* lsh = find_term<LshTerm>(config);
  LayerCache<Real>& layer = layers[l];
  layer.heads.resize(config.num_heads);
  layer.heads_out.assign(B * T * C, 0);
  for (int i = 0; i < config.num_heads; i++) {
    HeadCache<Real>& head = layer.heads[i];
    const HeadColumns columns = head_columns(config, i);
    std::vector<const Array<Real>*> sources_of_k, sources_of_v;
    for (const auto& [k, v] : sources_in_update(config, draw, l, i))
      sources_of_k.push_back(&layers[k].qkv), sources_of_v.push_back(&layers[v].qkv);
    if (map_layer(config, l) != l) {
      head.map = layers[map_layer(config, l)].heads[i].map;
    } else {
      head.q = last_rows(take_columns<Real>({&layer.qkv}, columns.q, B, K, hs), B, T, hs);
      head.k = lsh ? unit_rows(head.q, hs) : take_columns(sources_of_k, columns.k, B, K, hs);
      if (find_term<QknormTerm>(config)) {
        head.q_before = head.q, head.k_before = head.k;
        head.q = normed_rows(head.q, hs);
        if (!find_term<RouterTerm>(config)) head.k = normed_rows(head.k, hs);  // route() has done it
      }
      if (rope) head.q = rotate(head.q, rope->base, 1, m, T, hs), head.k = rotate(head.k, rope->base, 1, 0, K, hs);
      Array<Real> of_distances;
      if (find_term<RelativeTerm>(config)) {
        head.q_v = add_head_bias(head.q, layer.distances.v, i, hs);
        head.q = add_head_bias(head.q, layer.distances.u, i, hs);
        of_distances = distance_scores(head.q_v, take_columns<Real>({&layer.distances.r}, i * hs, 1, K, hs), B, T, hs);
      }
      if (find_term<AlibiTerm>(config)) of_distances = slope_scores<Real>(i, config.num_heads, B, T, K, hs);
      if (lsh && layer.buckets.size() == size_t(i))
        layer.buckets.push_back(
            buckets_of(head.k, &layer.rotations[i * layer.rotations.size() / config.num_heads], *lsh, hs));
      const std::vector<bool> visible =
          lsh ? shared_buckets(layer.buckets[i], B, T) : visibility(config, l, i, tokens, B, m, T);
      const Real* sink = layer.sinks.empty() ? nullptr : &layer.sinks[i];
      head.own_map = attention_map(head.q, head.k, of_distances, visible, topk ? topk->n : 0, sink, B, T, hs);
      head.map = layer.mix.empty() ? head.own_map : mix_maps(layer.mix, layers[l - 1].heads[i].map, head.own_map);
    }
    head.v = take_columns(sources_of_v, columns.v, B, K, hs);
    const Array<Real> dropped = drop_map(draw, l, i, head.map, B, T, K);
    add_columns<Real>({&layer.heads_out}, i * hs, apply_map(dropped, head.v, B, T, hs), B, T, hs);
  }
}

// A sublayer's output `branch` joins the residual stream x: x += branch, or gru() where `name` has parameters.
template <class Real>
void join(const Tensors<Real>& params, const std::string& name, const Array<Real>& branch, Array<Real>& x,
          Gate<Real>& gate) {
  if (find(params, name + ".bias")) gru(params, name, branch, x, gate);
  else add_into(x, branch);
}

// The loss of predicting targets[b,t] from inputs[b,0..t]; both (B, T), T <= max_seq_len. `cache`, where given, is
// overwritten with everything that backward() needs. `memory`, where given, has the segments before, and is left with
// the segments up to this one. `buckets`, where given, has each layer's, (L): a program that rounds q decides otherwise
// about a q between two buckets, and this says what follows from its decisions. `draw`: of a training pass.
template <class Real>
Result<Real> forward(const ModelConfig& config, const Tensors<Real>& params, const std::vector<int>& inputs,
                     const std::vector<int>& targets, int B, int T, Cache<Real>* cache = nullptr,
                     Memory<Real>* memory = nullptr, const std::vector<HeadBuckets>* buckets = nullptr,
                     const UpdateDraw& draw = {}) {
  const int L = config.num_layers;
  const int64_t C = config.channels, V = config.vocab_size, N = int64_t(B) * T;
  CHECK(T <= config.max_seq_len && int64_t(inputs.size()) == N && int64_t(targets.size()) == N);
  Cache<Real> local;
  Cache<Real>& acts = cache ? *cache : local;
  Memory<Real> none;
  Memory<Real>& remembered = memory ? *memory : none;
  remembered.resize(L);
  const int m = int(remembered[0].size() / (B * C));
  acts = {B,
          T,
          m,
          inputs,
          targets,
          std::vector<LayerCache<Real>>(L),
          {},
          {},
          draw,
          {},
          Array<Real>(N * V),
          Array<Real>(N * V)};

  const Tensor<Real>&wte = params.at("wte.weight"), &head = params.at(name_of_head(config));
  Array<Real> x(N * C);  // (B, T, C)
  for (int64_t n = 0; n < N; n++) {
    CHECK(inputs[n] >= 0 && inputs[n] < V && targets[n] >= -1 && targets[n] < V);
    for (int64_t c = 0; c < C; c++) x[n * C + c] = wte.data[inputs[n] * C + c];
  }

  const int k = layers_in_cycle(config);
  const ActTerm* act = find_term<ActTerm>(config);
  // The residual stream, or the two of `reversible`; without it x1 and x2 are the same array.
  std::vector<Array<Real>> streams(num_streams(config), x);
  Array<Real>&x1 = streams.front(), &x2 = streams.back();
  for (int l = 0; l < L; l++) {
    if (l % k == 0)
      for (Array<Real>& stream : streams) add_coordinates(params, l / k, T, C, stream);
    if (l == 0)
      for (Array<Real>& stream : streams) drop(draw, Site::embeddings, l, T, C, stream);
    if (l == 0 && find_term<DenseTerm>(config)) acts.outputs = {x2};
    const std::string h = name_of_layer(config, l);
    LayerCache<Real>& layer = acts.layers[l];
    // x1 += c_proj(attention(ln_1(x2))), with `gru` its gate in place of +=
    const Array<Real> extended = append_rows(remembered[l], x2, B);
    const int64_t kept = std::min<int64_t>(positions_of_memory(config), m + T);
    remembered[l] = last_rows(extended, B, kept, C);
    layer.ln_1 = norm_of(config, params, h + ".ln_1", extended);
    layer.qkv = linear(params, h + ".attn.c_attn", layer.ln_1.out);
    if (l > 0 && find_term<VresTerm>(config))
      mix_values(params, h + ".attn.value_mix", acts.layers, l, C, num_kv_heads(config) * config.head_size());
    if (find_term<RouterTerm>(config)) route(config, params, h + ".attn.router", acts.layers, l);
    if (find_term<DepthTerm>(config)) mix_depth(config, acts.layers, l);
    if (l > 0 && find_term<BlendTerm>(config)) layer.mix.assign(N, Real(find_term<BlendTerm>(config)->share));
    if (l > 0 && find_term<GateTerm>(config)) layer.mix = sigmoid(linear(params, h + ".attn.map_gate", layer.ln_1.out));
    if (find_term<RelativeTerm>(config))
      layer.distances = {linear(params, h + ".attn.relative", sines_of_distances<Real>(m + T, C)),
                         params.at(h + ".attn.relative.u").data, params.at(h + ".attn.relative.v").data};
    if (find_term<SinksTerm>(config)) layer.sinks = params.at(h + ".attn.sinks").data;
    if (find_term<LshTerm>(config)) layer.rotations = params.at(h + ".attn.rotations").data;
    if (buckets) layer.buckets = (*buckets)[l];
    attention(config, draw, acts.layers, l, inputs, B, m, T);
    Array<Real> branch = linear(params, h + ".attn.c_proj", layer.heads_out);
    drop(draw, Site::attention_output, l, T, C, branch);
    join(params, h + ".gru_1", branch, x1, layer.gru_1);
    // x2 += c_proj(activation(c_fc(ln_2(x1))))
    layer.ln_2 = norm_of(config, params, h + ".ln_2", x1);
    layer.fc = linear(params, h + ".mlp.c_fc", layer.ln_2.out);
    layer.fc_act = activation(config, layer.fc);
    branch = linear(params, h + ".mlp.c_proj", layer.fc_act);
    drop(draw, Site::mlp_output, l, T, C, branch);
    join(params, h + ".gru_2", branch, x2, layer.gru_2);
    if (act && (l + 1) % k == 0) acts.halting.states.push_back(x2);
    if (find_term<DenseTerm>(config)) acts.outputs.push_back(x2), x2 = sum_of_outputs(params, h, acts.outputs);
  }

  Result<Real> result = {0, 0, Array<Real>(N)};
  const Array<Real> in_mean = weights_in_mean<Real>(targets);
  x = act ? halt(params, act->eps, in_mean, acts.halting, result.ponder) : mean_of(streams);
  acts.ln_f = norm_of(config, params, "ln_f", x);
  const SoftcapTerm* softcap = find_term<SoftcapTerm>(config);
  for (int64_t n = 0; n < N; n++) {
    Real* logits = &acts.logits[n * V];
    Real* probs = &acts.probs[n * V];
    for (int64_t token = 0; token < V; token++) {  // logits = ln_f(x) head^T
      Real sum = 0;
      for (int64_t c = 0; c < C; c++) sum += acts.ln_f.out[n * C + c] * head.data[token * C + c];
      logits[token] = softcap ? Real(softcap->cap) * std::tanh(sum / Real(softcap->cap)) : sum;
    }
    Real largest = logits[0], sum = 0;
    for (int64_t token = 0; token < V; token++) largest = std::max(largest, logits[token]);
    for (int64_t token = 0; token < V; token++) sum += probs[token] = std::exp(logits[token] - largest);
    for (int64_t token = 0; token < V; token++) probs[token] /= sum;
    if (targets[n] == -1) continue;
    result.token_losses[n] = std::log(sum) + largest - logits[targets[n]];
    result.loss += result.token_losses[n] * in_mean[n];
  }
  return result;
}

// ----------------------------------------------------------------------------
// The model, backward

// Gradients of q, k, v and attention maps, which several layers may use. A layer's are complete once the backward pass
// has come down to it.
template <class Real>
struct SharedGradients {
  std::vector<Array<Real>> d_qkv;               // (L): (B, K, C + 2 g hs)
  std::vector<std::vector<Array<Real>>> d_map;  // (L, h): (B, T, S * K)
};

// Gradients of what attention takes from its own layer alone, besides q.
template <class Real>
struct OwnGradients {
  Array<Real> d_mix;  // (B, T)  empty where the layer has no `mix`
  Distances<Real> d_distances;
  Array<Real> d_sinks;  // (h)   empty without `sinks`
};

// The backward pass of layer l's attention, from d_heads_out, the gradient of its `heads_out`: `shared` +=, `own` =.
template <class Real>
void attention_backward(const ModelConfig& config, const UpdateDraw& draw, const std::vector<LayerCache<Real>>& layers,
                        int l, const Array<Real>& d_heads_out, SharedGradients<Real>& shared, OwnGradients<Real>& own,
                        int64_t B, int64_t m, int64_t T) {
  const int64_t hs = config.head_size(), K = m + T;
  const RopeTerm* rope = find_term<RopeTerm>(config);
  const LayerCache<Real>& layer = layers[l];
  Distances<Real>& d_distances = own.d_distances;
  own.d_mix.assign(layer.mix.size(), 0);
  own.d_sinks.assign(layer.sinks.size(), 0);
  d_distances.r.assign(layer.distances.r.size(), 0);
  d_distances.u.assign(layer.distances.u.size(), 0);
  d_distances.v.assign(layer.distances.v.size(), 0);
  for (int i = 0; i < config.num_heads; i++) {
    const HeadCache<Real>& head = layer.heads[i];
    const HeadColumns columns = head_columns(config, i);
    std::vector<Array<Real>*> d_sources_of_k, d_sources_of_v;
    for (const auto& [k, v] : sources_in_update(config, draw, l, i))
      d_sources_of_k.push_back(&shared.d_qkv[k]), d_sources_of_v.push_back(&shared.d_qkv[v]);
    const Array<Real> d_out = take_columns<Real>({&d_heads_out}, i * hs, B, T, hs);
    Array<Real>& d_map = shared.d_map[l][i];
    Array<Real> d_q, d_k, d_v, d_of_distances, d_dropped(d_map.size());
    apply_map_backward(drop_map(draw, l, i, head.map, B, T, K), head.v, d_out, d_dropped, d_v, B, T, hs);
    add_into(d_map, drop_map(draw, l, i, d_dropped, B, T, K));
    add_columns(d_sources_of_v, columns.v, d_v, B, K, hs);
    if (map_layer(config, l) != l) {
      add_into(shared.d_map[map_layer(config, l)][i], d_map);
      continue;
    }
    Array<Real> d_own_map = d_map;
    if (!layer.mix.empty())
      mix_maps_backward(layer.mix, layers[l - 1].heads[i].map, head.own_map, d_map, own.d_mix, shared.d_map[l - 1][i],
                        d_own_map);
    attention_map_backward(head.q, head.k, head.own_map, d_own_map, d_q, d_k, d_of_distances, B, T, K, hs);
    if (!layer.sinks.empty()) own.d_sinks[i] = sink_gradient(head.own_map, d_own_map, B * T);
    if (find_term<RelativeTerm>(config)) {
      Array<Real> d_q_v, d_r;
      distance_scores_backward(head.q_v, take_columns<Real>({&layer.distances.r}, i * hs, 1, K, hs), d_of_distances,
                               d_q_v, d_r, B, T, hs);
      add_columns<Real>({&d_distances.r}, i * hs, d_r, 1, K, hs);
      add_head_bias_backward(d_q, d_distances.u, i, hs);
      add_head_bias_backward(d_q_v, d_distances.v, i, hs);
      add_into(d_q, d_q_v);
    }
    if (rope) d_q = rotate(d_q, rope->base, -1, m, T, hs), d_k = rotate(d_k, rope->base, -1, 0, K, hs);
    if (find_term<QknormTerm>(config)) {
      d_q = normed_rows_backward(head.q_before, d_q, hs);
      if (!find_term<RouterTerm>(config)) d_k = normed_rows_backward(head.k_before, d_k, hs);
    }
    if (find_term<LshTerm>(config)) d_k = unit_rows_backward(head.q, d_k, hs);
    add_columns({&shared.d_qkv[l]}, columns.q, append_rows(Array<Real>(B * m * hs), d_q, B), B, K, hs);
    add_columns(d_sources_of_k, columns.k, d_k, B, K, hs);
  }
}

// The backward pass of join(): returns the gradient of `branch`; d_x is the gradient of x after it, and becomes the
// gradient of x before it.
template <class Real>
Array<Real> join_backward(const Tensors<Real>& params, const std::string& name, const Gate<Real>& gate,
                          Array<Real>& d_x, Tensors<Real>& grads) {
  return find(params, name + ".bias") ? gru_backward(params, name, gate, d_x, grads) : d_x;
}

// grads += scale * d(mean loss)/d(params), with `act` of loss + cost * ponder, of the forward() that filled `cache`
// with the same parameters; the memory is a constant. With gradient accumulation each micro-batch has scale 1 /
// grad_accum_steps.
template <class Real>
void backward(const ModelConfig& config, const Tensors<Real>& params, const Cache<Real>& cache, Tensors<Real>& grads,
              double scale = 1) {
  const int B = cache.B, T = cache.T, L = config.num_layers;
  const int64_t C = config.channels, V = config.vocab_size, N = int64_t(B) * T;
  const Tensor<Real>& head = params.at(name_of_head(config));
  Tensor<Real>&d_head = grads.at(name_of_head(config)), &d_wte = grads.at("wte.weight");

  const Array<Real> in_mean = weights_in_mean<Real>(cache.targets);
  const SoftcapTerm* softcap = find_term<SoftcapTerm>(config);
  Array<Real> d_hidden(N * C);  // of ln_f's output
  for (int64_t n = 0; n < N; n++) {
    for (int64_t token = 0; token < V; token++) {
      Real d_logit = (cache.probs[n * V + token] - (token == cache.targets[n])) * Real(scale) * in_mean[n];
      const Real tanh = softcap ? cache.logits[n * V + token] / Real(softcap->cap) : 0;
      d_logit *= 1 - tanh * tanh;
      for (int64_t c = 0; c < C; c++) {
        d_hidden[n * C + c] += d_logit * head.data[token * C + c];
        d_head.data[token * C + c] += d_logit * cache.ln_f.out[n * C + c];
      }
    }
  }
  Array<Real> d_x = norm_backward(config, params, "ln_f", cache.ln_f, d_hidden, grads);
  const ActTerm* act = find_term<ActTerm>(config);
  std::vector<Array<Real>> d_states;  // of the residual stream after each cycle, through ln_f's input alone
  if (act) {
    d_states = halt_backward(params, scale * act->cost, in_mean, cache.halting, d_x, grads);
    d_x.assign(N * C, 0);
  }
  for (Real& d : d_x) d /= num_streams(config);
  std::vector<Array<Real>> d_streams(num_streams(config), d_x);
  Array<Real>&d_x1 = d_streams.front(), &d_x2 = d_streams.back();

  SharedGradients<Real> shared;
  for (const LayerCache<Real>& layer : cache.layers) {
    shared.d_qkv.push_back(Array<Real>(layer.qkv.size()));
    shared.d_map.emplace_back();
    for (const HeadCache<Real>& head : layer.heads) shared.d_map.back().push_back(Array<Real>(head.map.size()));
  }
  std::vector<Array<Real>> d_projected = shared.d_qkv;  // of `router` and `depth`
  std::vector<Array<Real>> d_outputs(cache.outputs.size(), Array<Real>(N * C));
  const int k = layers_in_cycle(config);
  for (int l = L - 1; l >= 0; l--) {
    const std::string h = name_of_layer(config, l);
    const LayerCache<Real>& layer = cache.layers[l];
    if (act && (l + 1) % k == 0) add_into(d_x2, d_states[l / k]);
    if (find_term<DenseTerm>(config)) {
      sum_of_outputs_backward(params, h, cache.outputs, l + 2, d_x2, d_outputs, grads);
      d_x2 = d_outputs[l + 1];
    }
    Array<Real> d_mlp = join_backward(params, h + ".gru_2", layer.gru_2, d_x2, grads);
    drop(cache.draw, Site::mlp_output, l, T, C, d_mlp);
    const Array<Real> d_act = linear_backward(params, h + ".mlp.c_proj", layer.fc_act, d_mlp, grads);
    const Array<Real> d_fc = activation_backward(config, layer.fc, d_act);
    const Array<Real> d_ln_2 = linear_backward(params, h + ".mlp.c_fc", layer.ln_2.out, d_fc, grads);
    add_into(d_x1, norm_backward(config, params, h + ".ln_2", layer.ln_2, d_ln_2, grads));

    Array<Real> d_attention = join_backward(params, h + ".gru_1", layer.gru_1, d_x1, grads);
    drop(cache.draw, Site::attention_output, l, T, C, d_attention);
    const Array<Real> d_heads_out = linear_backward(params, h + ".attn.c_proj", layer.heads_out, d_attention, grads);
    OwnGradients<Real> own;
    attention_backward(config, cache.draw, cache.layers, l, d_heads_out, shared, own, B, cache.m, T);
    if (find_term<RelativeTerm>(config)) {
      linear_backward(params, h + ".attn.relative", sines_of_distances<Real>(cache.m + T, C), own.d_distances.r, grads);
      add_into(grads.at(h + ".attn.relative.u").data, own.d_distances.u);
      add_into(grads.at(h + ".attn.relative.v").data, own.d_distances.v);
    }
    if (find_term<SinksTerm>(config)) add_into(grads.at(h + ".attn.sinks").data, own.d_sinks);
    if (l > 0 && find_term<VresTerm>(config))
      mix_values_backward(params, h + ".attn.value_mix", cache.layers, l, C, num_kv_heads(config) * config.head_size(),
                          shared.d_qkv[l], shared.d_qkv[0], grads);
    if (find_term<RouterTerm>(config))
      route_backward(config, params, h + ".attn.router", cache.layers, l, shared.d_qkv, d_projected, grads);
    if (find_term<DepthTerm>(config)) mix_depth_backward(config, cache.layers, l, shared.d_qkv[l], d_projected);
    Array<Real> d_ln_1 = linear_backward(params, h + ".attn.c_attn", layer.ln_1.out, shared.d_qkv[l], grads);
    if (l > 0 && find_term<GateTerm>(config)) {
      const Array<Real> d_gate = sigmoid_backward(layer.mix, own.d_mix);
      add_into(d_ln_1, linear_backward(params, h + ".attn.map_gate", layer.ln_1.out, d_gate, grads));
    }
    add_into(d_x2, last_rows(norm_backward(config, params, h + ".ln_1", layer.ln_1, d_ln_1, grads), B, T, C));
    if (l == 0 && find_term<DenseTerm>(config)) add_into(d_x2, d_outputs[0]);
    if (l == 0)
      for (Array<Real>& d_stream : d_streams) drop(cache.draw, Site::embeddings, l, T, C, d_stream);
    if (l % k == 0)
      for (const Array<Real>& d_stream : d_streams) add_coordinates_backward(d_stream, l / k, T, C, grads);
  }

  for (const Array<Real>& d_stream : d_streams)
    for (int64_t n = 0; n < N; n++)
      for (int64_t c = 0; c < C; c++) d_wte.data[cache.inputs[n] * C + c] += d_stream[n * C + c];
}

// ----------------------------------------------------------------------------
// The update

// sqrt of the sum of the squares of all elements of all tensors.
template <class Real>
double global_norm(const Tensors<Real>& grads) {
  double sum = 0;
  for (const auto& [name, grad] : grads)
    for (Real g : grad.data) sum += double(g) * double(g);
  return std::sqrt(sum);
}

struct AdamWOptions {
  double learning_rate = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // on tensors of two or more dimensions; LayerNorms and biases have one
  double grad_clip = 1.0;     // largest global norm
};

// One step of AdamW as PyTorch takes it, `step` counted from 1; m and v start as zeros. The gradients are scaled by
// min(1, grad_clip / (norm + 1e-6)) first, as clip_grad_norm_ does. Returns the norm before clipping.
//   w *= 1 - lr * weight_decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// Constants stay as they are.
template <class Real>
double adamw(Tensors<Real>& params, const Tensors<Real>& grads, Tensors<Real>& m, Tensors<Real>& v, int step,
             const AdamWOptions& o) {
  const double norm = global_norm(grads);
  const double clip = std::min(1.0, o.grad_clip / (norm + 1e-6));
  const Real step_size = Real(o.learning_rate / (1 - std::pow(o.beta1, step)));
  const Real sqrt_correction2 = Real(std::sqrt(1 - std::pow(o.beta2, step)));
  for (auto& [name, param] : params) {
    if (is_constant(name)) continue;
    const std::vector<Real>& grad = grads.at(name).data;
    std::vector<Real>& m_data = m.at(name).data;
    std::vector<Real>& v_data = v.at(name).data;
    const double decay = param.shape.size() >= 2 ? o.weight_decay : 0;
    for (size_t i = 0; i < grad.size(); i++) {
      const Real g = grad[i] * Real(clip);
      m_data[i] = Real(o.beta1) * m_data[i] + Real(1 - o.beta1) * g;
      v_data[i] = Real(o.beta2) * v_data[i] + Real(1 - o.beta2) * g * g;
      param.data[i] *= Real(1 - o.learning_rate * decay);
      param.data[i] -= step_size * m_data[i] / (std::sqrt(v_data[i]) / sqrt_correction2 + Real(o.eps));
    }
  }
  return norm;
}

struct MuonOptions {
  double learning_rate = 1e-3;
  double momentum = 0.95;
  double weight_decay = 0.1;
};

// One step of Muon as torch.optim.Muon takes it, with nesterov and adjust_lr_fn="match_rms_adamw", of a matrix w (rows,
// columns) whose momentum m starts as zeros; g: the gradient, clipped. Unlike there all is computed in Real, and no
// matrix is transposed: with u / ||u|| = U S V^T both ways give U p(S) V^T, p being the five polynomials one after the
// other.
template <class Real>
void muon(std::vector<Real>& w, std::vector<Real>& m, const std::vector<Real>& g, int64_t rows, int64_t columns,
          const MuonOptions& o) {
  std::vector<Real> x(g.size());
  double squares = 0;
  for (size_t i = 0; i < g.size(); i++) {
    m[i] += Real(1 - o.momentum) * (g[i] - m[i]);
    x[i] = g[i] + Real(o.momentum) * (m[i] - g[i]);
    squares += double(x[i]) * double(x[i]);
  }
  for (Real& value : x) value /= Real(std::max(std::sqrt(squares), 1e-7));
  // (., n) = (., inner) (inner, n).
  auto product = [](const std::vector<Real>& a, const std::vector<Real>& b, int64_t inner, int64_t n) {
    std::vector<Real> c(a.size() / size_t(inner) * size_t(n), Real(0));
    for (size_t i = 0; i < c.size() / size_t(n); i++)
      for (int64_t k = 0; k < inner; k++)
        for (int64_t j = 0; j < n; j++)
          c[i * size_t(n) + size_t(j)] += a[i * size_t(inner) + size_t(k)] * b[size_t(k * n + j)];
    return c;
  };
  for (int step = 0; step < 5; step++) {
    std::vector<Real> transposed(x.size());
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) transposed[size_t(j * rows + i)] = x[size_t(i * columns + j)];
    const std::vector<Real> gram = product(x, transposed, columns, rows), cubed = product(gram, x, rows, columns);
    const std::vector<Real> fifth = product(gram, cubed, rows, columns);
    for (size_t i = 0; i < x.size(); i++)
      x[i] = Real(3.4445) * x[i] - Real(4.7750) * cubed[i] + Real(2.0315) * fifth[i];
  }
  const double step_size = o.learning_rate * 0.2 * std::sqrt(double(std::max(rows, columns)));
  for (size_t i = 0; i < w.size(); i++)
    w[i] = w[i] * Real(1 - o.learning_rate * o.weight_decay) - Real(step_size) * x[i];
}

}  // namespace reference
