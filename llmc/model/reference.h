// GPT-2 with any wiring of its attention, written to be checked by eye: forward, backward and AdamW as loops over
// indices. It is what the trainer is measured against, so it shares nothing with it but ModelConfig, and takes no
// shortcut: nothing is fused, recomputed, tiled or left out. Of the wiring it has the terms alone, and says itself what
// they mean: masks and attention maps are whole matrices, the keys and values of a head's sources are concatenated, and
// q, k and v that nobody uses are projected all the same (their gradient comes out as zero by itself).
//
// B batch, T length, C channels, L layers, h heads of size hs = C / h, g K/V heads (h without grouped-query attention),
// S sources of a head: the layers whose K/V it attends to; V vocabulary; m positions of each sequence that the memory
// holds (0 without `memory`), K = m + T keys of each source. Shapes are in the order of memory.
// An Array is an activation, (B, T, something) unless said otherwise; a Tensor is a parameter, its gradient or its
// optimizer state. Parameters bear their Hugging Face GPT-2 names; a linear layer's weight is (in, out), as in
// GPT-2's Conv1D.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>
#include "config.h"
#include "llmc/utils/error.h"

namespace reference {

template <class Real>
using Array = std::vector<Real>;

template <class Real>
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<Real> data;
};

template <class Real>
using Tensors = std::map<std::string, Tensor<Real>>;  // by name

// ----------------------------------------------------------------------------
// The wiring: what its terms say, applied from left to right. wiring.h describes them.

using Kind = WiringTerm::Kind;
using How = WiringTerm::How;

// The last term of that kind; null if the wiring has none.
inline const WiringTerm* find_term(const ModelConfig& config, Kind kind) {
  const WiringTerm* found = nullptr;
  for (const WiringTerm& term : config.wiring.terms)
    if (term.kind == kind) found = &term;
  return found;
}

// g. Query head i attends to K/V head i * g / h.
inline int num_kv_heads(const ModelConfig& config) {
  const WiringTerm* gqa = find_term(config, Kind::gqa);
  return gqa ? gqa->n : config.num_heads;
}

// The layers whose own keys and values a head of layer l attends to, ascending.
inline std::set<int> source_layers(const ModelConfig& config, int l, int head) {
  std::set<int> sources = {l};
  for (const WiringTerm& term : config.wiring.terms) {
    const int first = term.last_heads > 0 ? config.num_heads - term.last_heads : term.first_head;
    const int end = term.last_heads > 0 ? config.num_heads : term.end_head;
    const bool skips = l >= term.n && head >= first && head < end;
    if (term.kind == Kind::sla && skips) sources = {l - term.n};
    if (term.kind == Kind::also && skips) sources.insert(l - term.n);
    if (term.kind == Kind::share) sources = {l - l % term.n};
    if (term.kind == Kind::layers) sources = {term.layers[l]};
  }
  return sources;
}

// Whether the query at position t may see the keys at position j, whichever layer's they are.
inline bool is_visible(const ModelConfig& config, int l, int head, int t, int j) {
  if (j > t) return false;
  for (const WiringTerm& term : config.wiring.terms) {
    bool a1 = true, a2 = true;  // Sparse Transformer's two patterns
    if (term.kind == Kind::window && (term.pattern.empty() || term.pattern[l % term.pattern.size()] == 'S')) {
      if (t - j >= term.n) return false;
    } else if (term.kind == Kind::strided) {
      a1 = t - j <= term.n;
      a2 = (t - j) % term.n == 0;
    } else if (term.kind == Kind::fixed) {
      a1 = j / term.n == t / term.n;
      a2 = j % term.n >= term.n - term.c;
    }
    const bool takes_a1 = term.how == How::heads ? head < (config.num_heads + 1) / 2 : l % 2 == 0;
    if (term.how == How::both ? !a1 && !a2 : takes_a1 ? !a1 : !a2) return false;
  }
  return true;
}

// is_visible of all t and j, counted from the memory's first position, in each of B sequences: (B, T, K).
inline std::vector<bool> visibility(const ModelConfig& config, int l, int head, int64_t B, int64_t m, int64_t T) {
  const int64_t K = m + T;
  std::vector<bool> visible(B * T * K);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j < K; j++) visible[(b * T + t) * K + j] = is_visible(config, l, head, int(m + t), int(j));
  return visible;
}

// The layer whose attention map layer l uses: its own, but for `reuse`.
inline int map_layer(const ModelConfig& config, int l) {
  const WiringTerm* reuse = find_term(config, Kind::reuse);
  return reuse ? l - l % reuse->n : l;
}

// The k of `universal`: layers run in cycles of k, and layer l has the parameters of layer l mod k. Without it all
// layers are one cycle.
inline int layers_in_cycle(const ModelConfig& config) {
  const WiringTerm* universal = find_term(config, Kind::universal);
  return universal ? universal->n : config.num_layers;
}

// What the names of layer l's parameters begin with.
inline std::string name_of_layer(const ModelConfig& config, int l) {
  return "h." + std::to_string(l % layers_in_cycle(config));
}

// ----------------------------------------------------------------------------
// Parameters: their names and shapes

// Whether training leaves the tensor as it is: the rotations of `lsh`. It has no gradient and does not decay.
inline bool is_constant(const std::string& name) { return name.find(".attn.rotations") != std::string::npos; }

// Every parameter of the model, filled with zeros; gradients and optimizer state have the same names and shapes, those
// of constants staying zero. Without config.bias the `.bias` tensors do not exist, but for those of `gru`.
template <class Real>
Tensors<Real> make_parameters(const ModelConfig& config) {
  Tensors<Real> params;
  auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    params[name] = {shape, std::vector<Real>(size)};
  };
  auto add_norm = [&](const std::string& name, int64_t channels) {
    add(name + ".weight", {channels});
    if (config.bias && !find_term(config, Kind::rmsnorm)) add(name + ".bias", {channels});
  };
  auto add_linear = [&](const std::string& name, int64_t in, int64_t out) {
    add(name + ".weight", {in, out});
    if (config.bias) add(name + ".bias", {out});
  };
  auto add_gate = [&](const std::string& name, int64_t channels) {
    if (!find_term(config, Kind::gru)) return;
    add(name + ".y.weight", {channels, 3 * channels});  // columns: W_r | W_z | W_g
    add(name + ".x.weight", {channels, 2 * channels});  // columns: U_r | U_z
    add(name + ".rx.weight", {channels, channels});     // U_g
    add(name + ".bias", {channels});
  };
  const int64_t C = config.channels, g = num_kv_heads(config), hs = config.head_size();
  const bool relative = find_term(config, Kind::relative);
  const WiringTerm* lsh = find_term(config, Kind::lsh);
  add("wte.weight", {config.vocab_size, C});  // token embedding, and the output head: tied
  if (!relative && !find_term(config, Kind::rope)) add("wpe.weight", {config.max_seq_len, C});  // position embedding
  const int k = layers_in_cycle(config);
  if (find_term(config, Kind::universal)) add("wse.weight", {config.num_layers / k, C});  // embedding of the cycle
  if (find_term(config, Kind::act)) add_linear("halt", C, 1);
  for (int l = 0; l < k; l++) {
    const std::string h = name_of_layer(config, l);
    add_norm(h + ".ln_1", C);
    add_linear(h + ".attn.c_attn", C, C + (lsh ? 1 : 2) * g * hs);  // columns: q | k | v, or q | v, each head by head
    if (lsh) add(h + ".attn.rotations", {config.num_heads, lsh->c, hs, lsh->n / 2});
    if (find_term(config, Kind::gate) && l > 0) add_linear(h + ".attn.map_gate", C, 1);
    if (relative) {
      add(h + ".attn.relative.weight", {C, C});
      for (const char* bias : {"u", "v"}) add(h + ".attn.relative." + bias, {config.num_heads, hs});
    }
    add_linear(h + ".attn.c_proj", C, C);
    add_gate(h + ".gru_1", C);
    add_norm(h + ".ln_2", C);
    add_linear(h + ".mlp.c_fc", C, 4 * C);
    add_linear(h + ".mlp.c_proj", 4 * C, C);
    add_gate(h + ".gru_2", C);
  }
  add_norm("ln_f", C);
  return params;
}

// The tensor of that name; null where the model has none (the biases of a model without them).
template <class Real>
const Tensor<Real>* find(const Tensors<Real>& tensors, const std::string& name) {
  auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}
template <class Real>
Tensor<Real>* find(Tensors<Real>& tensors, const std::string& name) {
  auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

// ----------------------------------------------------------------------------
// Layers, each beside its backward. A backward function returns the gradient of its input (=) and adds to those of
// its parameters (+=).

// out[n,o] = bias[o] + sum_i in[n,i] weight[i,o]; in (N, I), out (N, O). `name` is the layer's, like "h.0.mlp.c_fc".
template <class Real>
Array<Real> linear(const Tensors<Real>& params, const std::string& name, const Array<Real>& in) {
  const Tensor<Real>& weight = params.at(name + ".weight");
  const Tensor<Real>* bias = find(params, name + ".bias");
  const int64_t I = weight.shape[0], O = weight.shape[1], N = in.size() / I;
  Array<Real> out(N * O);
  for (int64_t n = 0; n < N; n++) {
    Real* y = &out[n * O];
    for (int64_t o = 0; o < O; o++) y[o] = bias ? bias->data[o] : 0;
    for (int64_t i = 0; i < I; i++) {
      const Real x = in[n * I + i];
      const Real* w = &weight.data[i * O];
      for (int64_t o = 0; o < O; o++) y[o] += x * w[o];
    }
  }
  return out;
}

template <class Real>
Array<Real> linear_backward(const Tensors<Real>& params, const std::string& name, const Array<Real>& in,
                            const Array<Real>& d_out, Tensors<Real>& grads) {
  const Tensor<Real>& weight = params.at(name + ".weight");
  Tensor<Real>& d_weight = grads.at(name + ".weight");
  Tensor<Real>* d_bias = find(grads, name + ".bias");
  const int64_t I = weight.shape[0], O = weight.shape[1], N = in.size() / I;
  Array<Real> d_in(N * I);
  for (int64_t n = 0; n < N; n++) {
    const Real* dy = &d_out[n * O];
    for (int64_t i = 0; i < I; i++) {
      const Real x = in[n * I + i];
      const Real* w = &weight.data[i * O];
      Real* dw = &d_weight.data[i * O];
      Real dx = 0;
      for (int64_t o = 0; o < O; o++) dx += dy[o] * w[o];
      for (int64_t o = 0; o < O; o++) dw[o] += x * dy[o];
      d_in[n * I + i] = dx;
    }
    if (d_bias)
      for (int64_t o = 0; o < O; o++) d_bias->data[o] += dy[o];
  }
  return d_in;
}

template <class Real>
struct Norm {
  Array<Real> xhat;  // (B, T, C)  (x - mean) * rstd
  Array<Real> rstd;  // (B, T)     1 / sqrt(variance + eps)
  Array<Real> out;   // (B, T, C)  xhat * weight + bias
};

// LayerNorm over the channels, with the biased variance (divided by C); with `rmsnorm` the mean is 0 in both.
template <class Real>
Norm<Real> norm_of(const ModelConfig& config, const Tensors<Real>& params, const std::string& name,
                   const Array<Real>& x) {
  const bool takes_mean = !find_term(config, Kind::rmsnorm);
  const Tensor<Real>& weight = params.at(name + ".weight");
  const Tensor<Real>* bias = find(params, name + ".bias");
  const int64_t C = weight.shape[0], N = x.size() / C;
  Norm<Real> norm = {Array<Real>(N * C), Array<Real>(N), Array<Real>(N * C)};
  for (int64_t n = 0; n < N; n++) {
    Real mean = 0, variance = 0;
    for (int64_t c = 0; c < C && takes_mean; c++) mean += x[n * C + c] / C;
    for (int64_t c = 0; c < C; c++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
    norm.rstd[n] = 1 / std::sqrt(variance + Real(config.layer_norm_eps));
    for (int64_t c = 0; c < C; c++) {
      norm.xhat[n * C + c] = (x[n * C + c] - mean) * norm.rstd[n];
      norm.out[n * C + c] = norm.xhat[n * C + c] * weight.data[c] + (bias ? bias->data[c] : 0);
    }
  }
  return norm;
}

// With d_xhat = d_out * weight: d_x = rstd * (d_xhat - mean_c(d_xhat) - xhat * mean_c(d_xhat * xhat)), and with
// `rmsnorm` without mean_c(d_xhat).
template <class Real>
Array<Real> norm_backward(const ModelConfig& config, const Tensors<Real>& params, const std::string& name,
                          const Norm<Real>& norm, const Array<Real>& d_out, Tensors<Real>& grads) {
  const bool takes_mean = !find_term(config, Kind::rmsnorm);
  const Tensor<Real>& weight = params.at(name + ".weight");
  Tensor<Real>& d_weight = grads.at(name + ".weight");
  Tensor<Real>* d_bias = find(grads, name + ".bias");
  const int64_t C = weight.shape[0], N = d_out.size() / C;
  Array<Real> d_x(N * C);
  for (int64_t n = 0; n < N; n++) {
    Real mean_d_xhat = 0, mean_d_xhat_xhat = 0;
    for (int64_t c = 0; c < C; c++) {
      const Real d_xhat = d_out[n * C + c] * weight.data[c];
      mean_d_xhat += takes_mean ? d_xhat / C : 0;
      mean_d_xhat_xhat += d_xhat * norm.xhat[n * C + c] / C;
    }
    for (int64_t c = 0; c < C; c++) {
      const Real d_xhat = d_out[n * C + c] * weight.data[c];
      d_x[n * C + c] = norm.rstd[n] * (d_xhat - mean_d_xhat - norm.xhat[n * C + c] * mean_d_xhat_xhat);
      d_weight.data[c] += d_out[n * C + c] * norm.xhat[n * C + c];
      if (d_bias) d_bias->data[c] += d_out[n * C + c];
    }
  }
  return d_x;
}

// GPT-2's GELU ("gelu_new"): 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3).
template <class Real>
Array<Real> gelu(const Array<Real>& in) {
  const Real sqrt_2_over_pi = Real(0.79788456080286535588);
  Array<Real> out(in.size());
  for (size_t i = 0; i < in.size(); i++) {
    const Real x = in[i], u = sqrt_2_over_pi * (x + Real(0.044715) * x * x * x);
    out[i] = Real(0.5) * x * (1 + std::tanh(u));
  }
  return out;
}

template <class Real>
Array<Real> gelu_backward(const Array<Real>& in, const Array<Real>& d_out) {
  const Real sqrt_2_over_pi = Real(0.79788456080286535588);
  Array<Real> d_in(in.size());
  for (size_t i = 0; i < in.size(); i++) {
    const Real x = in[i], tanh_u = std::tanh(sqrt_2_over_pi * (x + Real(0.044715) * x * x * x));
    const Real du_dx = sqrt_2_over_pi * (1 + 3 * Real(0.044715) * x * x);
    d_in[i] = d_out[i] * (Real(0.5) * (1 + tanh_u) + Real(0.5) * x * (1 - tanh_u * tanh_u) * du_dx);
  }
  return d_in;
}

// ----------------------------------------------------------------------------
// Attention, of one head: q (B, T, hs), k and v (B, S * K, hs), where key s * K + j is that at position j of source s,
// and an attention map (B, T, S * K), zero where a query does not see a key.

// map[t] = softmax of (q[t].k[j] + of_distances[t,j]) / sqrt(hs) over the keys j that t sees: those that `visible` (B,
// T, K) has, of every source alike, and of these, where topk > 0, the topk with the highest scores, of equal ones the
// first. All zero if t sees none. of_distances (B, T, K), of every source alike; empty: zeros.
template <class Real>
Array<Real> attention_map(const Array<Real>& q, const Array<Real>& k, const Array<Real>& of_distances,
                          const std::vector<bool>& visible, int topk, int64_t B, int64_t T, int64_t hs) {
  const int64_t keys = k.size() / (B * hs), K = visible.size() / (B * T);
  Array<Real> map(B * T * keys), scores(keys);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      std::vector<int64_t> seen;
      for (int64_t j = 0; j < keys; j++) {
        if (!visible[(b * T + t) * K + j % K]) continue;
        seen.push_back(j);
        Real dot = of_distances.empty() ? 0 : of_distances[(b * T + t) * K + j % K];
        for (int64_t i = 0; i < hs; i++) dot += q[(b * T + t) * hs + i] * k[(b * keys + j) * hs + i];
        scores[j] = dot / std::sqrt(Real(hs));
      }
      if (topk > 0 && int64_t(seen.size()) > topk) {
        std::stable_sort(seen.begin(), seen.end(), [&](int64_t i, int64_t j) { return scores[i] > scores[j]; });
        seen.resize(topk);
      }
      if (seen.empty()) continue;
      Real* p = &map[(b * T + t) * keys];
      Real largest = scores[seen[0]], sum = 0;
      for (int64_t j : seen) largest = std::max(largest, scores[j]);
      for (int64_t j : seen) sum += p[j] = std::exp(scores[j] - largest);
      for (int64_t j : seen) p[j] /= sum;
    }
  }
  return map;
}

// d_q, d_k, d_of_distances (=): d_score = p * (d_p - sum_j p d_p), which is zero for keys that are not seen, and
// through it the others. K: keys of a source.
template <class Real>
void attention_map_backward(const Array<Real>& q, const Array<Real>& k, const Array<Real>& map,
                            const Array<Real>& d_map, Array<Real>& d_q, Array<Real>& d_k, Array<Real>& d_of_distances,
                            int64_t B, int64_t T, int64_t K, int64_t hs) {
  const int64_t keys = k.size() / (B * hs);
  d_q.assign(q.size(), 0);
  d_k.assign(k.size(), 0);
  d_of_distances.assign(B * T * K, 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      const Real* p = &map[(b * T + t) * keys];
      const Real* d_p = &d_map[(b * T + t) * keys];
      Real mean_d_p = 0;
      for (int64_t j = 0; j < keys; j++) mean_d_p += p[j] * d_p[j];
      for (int64_t j = 0; j < keys; j++) {
        const Real d_dot = p[j] * (d_p[j] - mean_d_p) / std::sqrt(Real(hs));
        d_of_distances[(b * T + t) * K + j % K] += d_dot;
        for (int64_t i = 0; i < hs; i++) d_q[(b * T + t) * hs + i] += d_dot * k[(b * keys + j) * hs + i];
        for (int64_t i = 0; i < hs; i++) d_k[(b * keys + j) * hs + i] += d_dot * q[(b * T + t) * hs + i];
      }
    }
  }
}

// out[t] = sum_j map[t,j] v[j]: (B, T, hs).
template <class Real>
Array<Real> apply_map(const Array<Real>& map, const Array<Real>& v, int64_t B, int64_t T, int64_t hs) {
  const int64_t keys = v.size() / (B * hs);
  Array<Real> out(B * T * hs);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j < keys; j++)
        for (int64_t i = 0; i < hs; i++)
          out[(b * T + t) * hs + i] += map[(b * T + t) * keys + j] * v[(b * keys + j) * hs + i];
  return out;
}

// d_map += d_out[t].v[j], d_v (=) sum_t map[t,j] d_out[t].
template <class Real>
void apply_map_backward(const Array<Real>& map, const Array<Real>& v, const Array<Real>& d_out, Array<Real>& d_map,
                        Array<Real>& d_v, int64_t B, int64_t T, int64_t hs) {
  const int64_t keys = v.size() / (B * hs);
  d_v.assign(v.size(), 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j < keys; j++) {
        for (int64_t i = 0; i < hs; i++) {
          d_map[(b * T + t) * keys + j] += d_out[(b * T + t) * hs + i] * v[(b * keys + j) * hs + i];
          d_v[(b * keys + j) * hs + i] += map[(b * T + t) * keys + j] * d_out[(b * T + t) * hs + i];
        }
      }
    }
  }
}

// `rope`: x[t] of a head, rotated by the angles direction * (first + t) * base^(-2i/hs); direction -1 is the backward
// pass. x (B, T, hs), or with S sources (B, S * T, hs).
template <class Real>
Array<Real> rotate(const Array<Real>& x, double base, int direction, int64_t first, int64_t T, int64_t hs) {
  Array<Real> out(x.size());
  for (int64_t row = 0; row < int64_t(x.size()) / hs; row++) {
    const int64_t t = first + row % T, half = hs / 2;
    for (int64_t i = 0; i < half; i++) {
      const Real angle = Real(direction * double(t) * std::pow(base, -2.0 * double(i) / double(hs)));
      const Real a = x[row * hs + i], b = x[row * hs + half + i];
      out[row * hs + i] = a * std::cos(angle) - b * std::sin(angle);
      out[row * hs + half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return out;
}

// `lsh`: each row of x (any, hs) divided by its norm.
template <class Real>
Array<Real> unit_rows(const Array<Real>& x, int64_t hs) {
  Array<Real> out(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real squares = 0;
    for (int64_t i = 0; i < hs; i++) squares += x[first + i] * x[first + i];
    for (int64_t i = 0; i < hs; i++) out[first + i] = x[first + i] / std::sqrt(squares);
  }
  return out;
}

// With y = x / |x| of a row: d_x = (d_y - y (y . d_y)) / |x|.
template <class Real>
Array<Real> unit_rows_backward(const Array<Real>& x, const Array<Real>& d_out, int64_t hs) {
  Array<Real> d_x(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real squares = 0, dot = 0;
    for (int64_t i = 0; i < hs; i++) squares += x[first + i] * x[first + i], dot += x[first + i] * d_out[first + i];
    for (int64_t i = 0; i < hs; i++)
      d_x[first + i] = (d_out[first + i] - x[first + i] * dot / squares) / std::sqrt(squares);
  }
  return d_x;
}

// `lsh`: the values of x (hs) in one round, of which the place of the largest is its bucket: x R, and then -x R. R (hs,
// buckets / 2).
template <class Real>
Array<Real> hash_values(const Real* x, const Real* R, int64_t hs, int buckets) {
  Array<Real> values(buckets);
  for (int64_t i = 0; i < hs; i++) {
    for (int c = 0; c < buckets / 2; c++) {
      values[c] += x[i] * R[i * (buckets / 2) + c];
      values[buckets / 2 + c] -= x[i] * R[i * (buckets / 2) + c];
    }
  }
  return values;
}

// `lsh`: the buckets of k (N, hs), which are those of q, (rounds, N); rotations (rounds, hs, buckets / 2).
template <class Real>
std::vector<int> buckets_of(const Array<Real>& k, const Real* rotations, const WiringTerm& lsh, int64_t hs) {
  std::vector<int> buckets;
  for (int round = 0; round < lsh.c; round++) {
    for (size_t first = 0; first < k.size(); first += hs) {
      const Array<Real> values = hash_values(&k[first], rotations + round * hs * (lsh.n / 2), hs, lsh.n);
      buckets.push_back(int(std::max_element(values.begin(), values.end()) - values.begin()));
    }
  }
  return buckets;
}

// `lsh`: whether the query at t sees the key at j, (B, T, T): earlier ones that are in its bucket in some round, and
// its own if there are none. buckets (rounds, B, T).
inline std::vector<bool> shared_buckets(const std::vector<int>& buckets, int64_t B, int64_t T) {
  std::vector<bool> visible(B * T * T);
  for (size_t round = 0; round < buckets.size(); round += B * T) {
    const int* bucket = &buckets[round];
    for (int64_t n = 0; n < B * T; n++)
      for (int64_t j = 0; j < n % T; j++)
        if (bucket[n] == bucket[n - n % T + j]) visible[n * T + j] = true;
  }
  for (int64_t n = 0; n < B * T; n++) {
    bool sees_earlier = false;
    for (int64_t j = 0; j < n % T; j++) sees_earlier |= visible[n * T + j];
    visible[n * T + n % T] = !sees_earlier;
  }
  return visible;
}

// `relative`: s_d of the distances d = 0 .. K - 1, (K, C): the sines of d * 10000^(-2i/C), i = 0 .. C/2 - 1, then the
// cosines.
template <class Real>
Array<Real> sines_of_distances(int64_t K, int64_t C) {
  Array<Real> sines(K * C);
  for (int64_t d = 0; d < K; d++) {
    for (int64_t i = 0; i < C / 2; i++) {
      const double angle = double(d) * std::pow(10000.0, -2.0 * double(i) / double(C));
      sines[d * C + i] = Real(std::sin(angle));
      sines[d * C + C / 2 + i] = Real(std::cos(angle));
    }
  }
  return sines;
}

// out[t,j] = q[t].r[m + t - j], the distance of key j being counted from the query's place behind m positions of
// memory; zero for later keys. q (B, T, hs), r (K, hs), out (B, T, K).
template <class Real>
Array<Real> distance_scores(const Array<Real>& q, const Array<Real>& r, int64_t B, int64_t T, int64_t hs) {
  const int64_t K = r.size() / hs, m = K - T;
  Array<Real> out(B * T * K);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j <= m + t; j++)
        for (int64_t i = 0; i < hs; i++) out[(b * T + t) * K + j] += q[(b * T + t) * hs + i] * r[(m + t - j) * hs + i];
  return out;
}

// d_q, d_r (=).
template <class Real>
void distance_scores_backward(const Array<Real>& q, const Array<Real>& r, const Array<Real>& d_out, Array<Real>& d_q,
                              Array<Real>& d_r, int64_t B, int64_t T, int64_t hs) {
  const int64_t K = r.size() / hs, m = K - T;
  d_q.assign(q.size(), 0);
  d_r.assign(r.size(), 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j <= m + t; j++) {
        for (int64_t i = 0; i < hs; i++) {
          d_q[(b * T + t) * hs + i] += d_out[(b * T + t) * K + j] * r[(m + t - j) * hs + i];
          d_r[(m + t - j) * hs + i] += d_out[(b * T + t) * K + j] * q[(b * T + t) * hs + i];
        }
      }
    }
  }
}

// Every row of x (any, hs), plus row `head` of `bias` (h, hs).
template <class Real>
Array<Real> add_head_bias(const Array<Real>& x, const Array<Real>& bias, int head, int64_t hs) {
  Array<Real> sum = x;
  for (size_t n = 0; n < x.size(); n++) sum[n] += bias[head * hs + int64_t(n) % hs];
  return sum;
}

// d_bias +=; that of x is d_sum.
template <class Real>
void add_head_bias_backward(const Array<Real>& d_sum, Array<Real>& d_bias, int head, int64_t hs) {
  for (size_t n = 0; n < d_sum.size(); n++) d_bias[head * hs + int64_t(n) % hs] += d_sum[n];
}

// `blend` and `gate`: map[t] = a[t] below[t] + (1 - a[t]) own[t], with the map of the layer below and the layer's own;
// a (B, T).
template <class Real>
Array<Real> mix_maps(const Array<Real>& a, const Array<Real>& below, const Array<Real>& own) {
  const int64_t keys = own.size() / a.size();
  Array<Real> map(own.size());
  for (size_t i = 0; i < map.size(); i++) map[i] = a[i / keys] * below[i] + (1 - a[i / keys]) * own[i];
  return map;
}

// d_a and d_below +=, d_own (=).
template <class Real>
void mix_maps_backward(const Array<Real>& a, const Array<Real>& below, const Array<Real>& own, const Array<Real>& d_map,
                       Array<Real>& d_a, Array<Real>& d_below, Array<Real>& d_own) {
  const int64_t keys = own.size() / a.size();
  d_own.resize(own.size());
  for (size_t i = 0; i < d_map.size(); i++) {
    d_a[i / keys] += d_map[i] * (below[i] - own[i]);
    d_below[i] += d_map[i] * a[i / keys];
    d_own[i] = d_map[i] * (1 - a[i / keys]);
  }
}

template <class Real>
Real sigmoid_of(Real x) {
  return 1 / (1 + std::exp(-x));
}

template <class Real>
Array<Real> sigmoid(const Array<Real>& in) {
  Array<Real> out(in.size());
  for (size_t i = 0; i < in.size(); i++) out[i] = sigmoid_of(in[i]);
  return out;
}

template <class Real>
Array<Real> sigmoid_backward(const Array<Real>& out, const Array<Real>& d_out) {
  Array<Real> d_in(out.size());
  for (size_t i = 0; i < out.size(); i++) d_in[i] = d_out[i] * out[i] * (1 - out[i]);
  return d_in;
}

// A head's `hs` columns, from `first` on, of each of the S `matrices` (B, T, width), concatenated: (B, S * T, hs).
template <class Real>
Array<Real> take_columns(const std::vector<const Array<Real>*>& matrices, int64_t first, int64_t B, int64_t T,
                         int64_t hs) {
  const int64_t S = matrices.size(), width = matrices[0]->size() / (B * T);
  Array<Real> out(B * S * T * hs);
  for (int64_t b = 0; b < B; b++)
    for (int64_t s = 0; s < S; s++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < hs; i++)
          out[((b * S + s) * T + t) * hs + i] = (*matrices[s])[(b * T + t) * width + first + i];
  return out;
}

// The reverse of take_columns: `hs` columns, from `first` on, of each of the S `matrices` (B, T, width) += their part
// of x (B, S * T, hs).
template <class Real>
void add_columns(const std::vector<Array<Real>*>& matrices, int64_t first, const Array<Real>& x, int64_t B, int64_t T,
                 int64_t hs) {
  const int64_t S = matrices.size(), width = matrices[0]->size() / (B * T);
  for (int64_t b = 0; b < B; b++)
    for (int64_t s = 0; s < S; s++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < hs; i++)
          (*matrices[s])[(b * T + t) * width + first + i] += x[((b * S + s) * T + t) * hs + i];
}

// x (B, m + T, width) = the rows of `before` (B, m, width) and then those of `rows` (B, T, width), of each sequence.
template <class Real>
Array<Real> append_rows(const Array<Real>& before, const Array<Real>& rows, int64_t B) {
  const int64_t a = before.size() / B, b = rows.size() / B;
  Array<Real> x;
  for (int64_t i = 0; i < B; i++) {
    x.insert(x.end(), before.begin() + i * a, before.begin() + (i + 1) * a);
    x.insert(x.end(), rows.begin() + i * b, rows.begin() + (i + 1) * b);
  }
  return x;
}

// The last `count` rows of each sequence of x (B, any, width).
template <class Real>
Array<Real> last_rows(const Array<Real>& x, int64_t B, int64_t count, int64_t width) {
  const int64_t all = x.size() / B;
  Array<Real> rows;
  for (int64_t i = 1; i <= B; i++) rows.insert(rows.end(), x.begin() + i * all - count * width, x.begin() + i * all);
  return rows;
}

template <class Real>
void add_into(Array<Real>& sum, const Array<Real>& term) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] += term[i];
}

// Before each cycle: the residual stream x (B, T, C) += wpe[t] + wse[cycle], of which a model may have either, both or
// none.
template <class Real>
void add_coordinates(const Tensors<Real>& params, int cycle, int64_t T, int64_t C, Array<Real>& x) {
  const Tensor<Real>*wpe = find(params, "wpe.weight"), *wse = find(params, "wse.weight");
  for (int64_t i = 0; i < int64_t(x.size()); i++) {
    if (wpe) x[i] += wpe->data[i / C % T * C + i % C];
    if (wse) x[i] += wse->data[cycle * C + i % C];
  }
}

// The gradients of wpe and wse are +=; that of x is d_x before and after.
template <class Real>
void add_coordinates_backward(const Array<Real>& d_x, int cycle, int64_t T, int64_t C, Tensors<Real>& grads) {
  Tensor<Real>*d_wpe = find(grads, "wpe.weight"), *d_wse = find(grads, "wse.weight");
  for (int64_t i = 0; i < int64_t(d_x.size()); i++) {
    if (d_wpe) d_wpe->data[i / C % T * C + i % C] += d_x[i];
    if (d_wse) d_wse->data[cycle * C + i % C] += d_x[i];
  }
}

// How many residual streams there are: two of `reversible`, whose branches each read one and join the other.
inline int num_streams(const ModelConfig& config) { return find_term(config, Kind::reversible) ? 2 : 1; }

template <class Real>
Array<Real> mean_of(const std::vector<Array<Real>>& arrays) {
  Array<Real> mean(arrays[0].size());
  for (const Array<Real>& array : arrays)
    for (size_t i = 0; i < mean.size(); i++) mean[i] += array[i] / arrays.size();
  return mean;
}

// ----------------------------------------------------------------------------
// `gru`: the gate in which a sublayer's output joins the residual stream; all (B, T, C)

template <class Real>
struct Gate {
  Array<Real> x;   // the residual stream before
  Array<Real> y;   // relu(the sublayer's output)
  Array<Real> r;   // sigmoid(y W_r + x U_r)
  Array<Real> z;   // sigmoid(y W_z + x U_z - b)
  Array<Real> rx;  // r x
  Array<Real> g;   // tanh(y W_g + rx U_g)
};

// x = (1 - z) x + z g. `branch`: the sublayer's output; `gate` is overwritten.
template <class Real>
void gru(const Tensors<Real>& params, const std::string& name, const Array<Real>& branch, Array<Real>& x,
         Gate<Real>& gate) {
  const Array<Real>& b = params.at(name + ".bias").data;
  const int64_t C = b.size(), size = x.size();
  gate = {x, branch, Array<Real>(size), Array<Real>(size), Array<Real>(size), Array<Real>(size)};
  for (Real& y : gate.y) y = std::max(y, Real(0));
  const Array<Real> of_y = linear(params, name + ".y", gate.y);  // (B, T, 3C)
  const Array<Real> of_x = linear(params, name + ".x", x);       // (B, T, 2C)
  for (int64_t i = 0; i < size; i++) {
    const int64_t n = i / C, c = i % C;
    gate.r[i] = sigmoid_of(of_y[n * 3 * C + c] + of_x[n * 2 * C + c]);
    gate.z[i] = sigmoid_of(of_y[n * 3 * C + C + c] + of_x[n * 2 * C + C + c] - b[c]);
    gate.rx[i] = gate.r[i] * x[i];
  }
  const Array<Real> of_rx = linear(params, name + ".rx", gate.rx);
  for (int64_t i = 0; i < size; i++) {
    gate.g[i] = std::tanh(of_y[i / C * 3 * C + 2 * C + i % C] + of_rx[i]);
    x[i] = (1 - gate.z[i]) * x[i] + gate.z[i] * gate.g[i];
  }
}

// Returns the gradient of the sublayer's output; d_x is that of the stream after the gate, and becomes that of the
// stream before it.
template <class Real>
Array<Real> gru_backward(const Tensors<Real>& params, const std::string& name, const Gate<Real>& gate, Array<Real>& d_x,
                         Tensors<Real>& grads) {
  Array<Real>& d_b = grads.at(name + ".bias").data;
  const int64_t C = d_b.size(), size = d_x.size();
  const Array<Real> d_out = d_x;
  Array<Real> d_of_y(3 * size), d_of_x(2 * size), d_of_rx(size);  // of what r, z and g are functions of
  for (int64_t i = 0; i < size; i++) {
    const int64_t n = i / C, c = i % C;
    const Real d_z = d_out[i] * (gate.g[i] - gate.x[i]) * gate.z[i] * (1 - gate.z[i]);
    d_of_rx[i] = d_out[i] * gate.z[i] * (1 - gate.g[i] * gate.g[i]);
    d_of_y[n * 3 * C + C + c] = d_of_x[n * 2 * C + C + c] = d_z;
    d_of_y[n * 3 * C + 2 * C + c] = d_of_rx[i];
    d_b[c] -= d_z;
    d_x[i] = d_out[i] * (1 - gate.z[i]);
  }
  const Array<Real> d_rx = linear_backward(params, name + ".rx", gate.rx, d_of_rx, grads);
  for (int64_t i = 0; i < size; i++) {
    const Real d_r = d_rx[i] * gate.x[i] * gate.r[i] * (1 - gate.r[i]);
    d_of_y[i / C * 3 * C + i % C] = d_of_x[i / C * 2 * C + i % C] = d_r;
    d_x[i] += d_rx[i] * gate.r[i];
  }
  add_into(d_x, linear_backward(params, name + ".x", gate.x, d_of_x, grads));
  Array<Real> d_branch = linear_backward(params, name + ".y", gate.y, d_of_y, grads);
  for (int64_t i = 0; i < size; i++)
    if (gate.y[i] == 0) d_branch[i] = 0;
  return d_branch;
}

// ----------------------------------------------------------------------------
// `act`: after which cycle each token halts, and with what weights its states are added

template <class Real>
struct Halting {
  std::vector<Array<Real>> states;  // (cycles): (B, T, C)  the residual stream after each cycle
  std::vector<Array<Real>> p;       // (cycles): (B, T)     sigmoid(state w + b)
  std::vector<int> last;            // (B, T)  N - 1: the first cycle with p_1 + ... + p_N >= 1 - eps, or the last
  Array<Real> remainder;            // (B, T)  R = 1 - (p_1 + ... + p_(N-1))

  // The weight of token n's state after that cycle.
  Real weight(int cycle, int64_t n) const {
    return cycle < last[n] ? p[cycle][n] : cycle == last[n] ? remainder[n] : Real(0);
  }
};

// (B, T): what each position weighs in the mean loss. A target of -1 is not scored, and weighs nothing.
template <class Real>
Array<Real> weights_in_mean(const std::vector<int>& targets) {
  const auto unscored = std::count(targets.begin(), targets.end(), -1);
  Array<Real> weights(targets.size());
  for (size_t n = 0; n < targets.size(); n++)
    weights[n] = targets[n] == -1 ? Real(0) : Real(1) / Real(int64_t(targets.size()) - unscored);
  return weights;
}

// Returns the weighted sum of halting.states, which are given, (B, T, C); the rest of `halting` is =. `mean_ponder`
// (=): the mean of N + R of the positions that are scored.
template <class Real>
Array<Real> halt(const Tensors<Real>& params, double eps, const Array<Real>& in_mean, Halting<Real>& halting,
                 double& mean_ponder) {
  const int cycles = int(halting.states.size());
  halting.p.clear();
  for (const Array<Real>& state : halting.states) halting.p.push_back(sigmoid(linear(params, "halt", state)));
  const int64_t N = halting.p[0].size(), C = halting.states[0].size() / N;
  halting.last.assign(N, 0);
  halting.remainder.assign(N, 1);
  mean_ponder = 0;
  Array<Real> x(N * C);
  for (int64_t n = 0; n < N; n++) {
    int& last = halting.last[n];
    Real sum = halting.p[0][n];
    while (last < cycles - 1 && sum < Real(1 - eps)) {
      halting.remainder[n] -= halting.p[last][n];
      sum += halting.p[++last][n];
    }
    mean_ponder += (last + 1 + double(halting.remainder[n])) * double(in_mean[n]);
    for (int cycle = 0; cycle < cycles; cycle++)
      for (int64_t c = 0; c < C; c++) x[n * C + c] += halting.weight(cycle, n) * halting.states[cycle][n * C + c];
  }
  return x;
}

// Returns the gradients of the states (cycles): (B, T, C), from d_x, that of their weighted sum, and cost times the
// mean of N + R. N has no gradient; R's is -1 with respect to each p before the last cycle's.
template <class Real>
std::vector<Array<Real>> halt_backward(const Tensors<Real>& params, double cost, const Array<Real>& in_mean,
                                       const Halting<Real>& halting, const Array<Real>& d_x, Tensors<Real>& grads) {
  const int64_t N = halting.last.size(), C = d_x.size() / N;
  auto d_weight = [&](int cycle, int64_t n) {
    Real sum = 0;
    for (int64_t c = 0; c < C; c++) sum += d_x[n * C + c] * halting.states[cycle][n * C + c];
    return sum;
  };
  std::vector<Array<Real>> d_states;
  for (int cycle = 0; cycle < int(halting.states.size()); cycle++) {
    Array<Real> d_state(N * C), d_p(N);
    for (int64_t n = 0; n < N; n++) {
      for (int64_t c = 0; c < C; c++) d_state[n * C + c] = halting.weight(cycle, n) * d_x[n * C + c];
      if (cycle < halting.last[n]) d_p[n] = d_weight(cycle, n) - d_weight(halting.last[n], n) - Real(cost) * in_mean[n];
    }
    const Array<Real> d_logit = sigmoid_backward(halting.p[cycle], d_p);
    add_into(d_state, linear_backward(params, "halt", halting.states[cycle], d_logit, grads));
    d_states.push_back(d_state);
  }
  return d_states;
}

// ----------------------------------------------------------------------------
// The model, forward

// Attention of one head.
template <class Real>
struct HeadCache {
  Array<Real> q;        // (B, T, hs)      with `relative` q + u, and
  Array<Real> q_v;      // (B, T, hs)      q + v
  Array<Real> k, v;     // (B, S * K, hs)  with `lsh` k = q / |q|
  Array<Real> own_map;  // (B, T, S * K)  of these q and k; neither it nor q and k exist where the layer reuses a map
  Array<Real> map;      // (B, T, S * K)  what v is weighed by
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
  Array<Real> mix;  // (B, T)        a of `blend` and `gate`; empty where the layer's map is its own
  Distances<Real> distances;
  Array<Real> rotations;               // (h, rounds, hs, buckets / 2) of `lsh`; empty without it
  HeadBuckets buckets;                 // of `lsh`
  std::vector<HeadCache<Real>> heads;  // (h)
  Array<Real> heads_out;               // (B, T, C)     attention's output before its projection
  Norm<Real> ln_2;
  Array<Real> fc;           // (B, T, 4C)    before GELU
  Array<Real> fc_gelu;      // (B, T, 4C)
  Gate<Real> gru_1, gru_2;  // after attention and after the MLP; empty without `gru`
};

template <class Real>
struct Cache {
  int B = 0, T = 0, m = 0;
  std::vector<int> inputs, targets;      // (B, T)
  std::vector<LayerCache<Real>> layers;  // (L)
  Halting<Real> halting;                 // empty without `act`
  Norm<Real> ln_f;                       // ln_f.out: the last hidden state
  Array<Real> logits;                    // (B, T, V)
  Array<Real> probs;                     // (B, T, V)  softmax of the logits
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
  if (find_term(config, Kind::lsh)) return {head * hs, head * hs, C + head * hs};
  return {head * hs, C + kv_head * hs, C + g * hs + kv_head * hs};
}

// Fills layer l's `heads` and `heads_out`, and `buckets` unless they are there; its `qkv`, `mix`, `distances` and
// `rotations`, and the layers below, are given.
template <class Real>
void attention(const ModelConfig& config, std::vector<LayerCache<Real>>& layers, int l, int64_t B, int64_t m,
               int64_t T) {
  const int64_t C = config.channels, hs = config.head_size(), K = m + T;
  const WiringTerm *topk = find_term(config, Kind::topk), *rope = find_term(config, Kind::rope);
  const WiringTerm* lsh = find_term(config, Kind::lsh);
  LayerCache<Real>& layer = layers[l];
  layer.heads.resize(config.num_heads);
  layer.heads_out.assign(B * T * C, 0);
  for (int i = 0; i < config.num_heads; i++) {
    HeadCache<Real>& head = layer.heads[i];
    const HeadColumns columns = head_columns(config, i);
    std::vector<const Array<Real>*> sources;
    for (int source : source_layers(config, l, i)) sources.push_back(&layers[source].qkv);
    if (map_layer(config, l) != l) {
      head.map = layers[map_layer(config, l)].heads[i].map;
    } else {
      head.q = last_rows(take_columns<Real>({&layer.qkv}, columns.q, B, K, hs), B, T, hs);
      head.k = lsh ? unit_rows(head.q, hs) : take_columns(sources, columns.k, B, K, hs);
      if (rope) head.q = rotate(head.q, rope->a, 1, m, T, hs), head.k = rotate(head.k, rope->a, 1, 0, K, hs);
      Array<Real> of_distances;
      if (find_term(config, Kind::relative)) {
        head.q_v = add_head_bias(head.q, layer.distances.v, i, hs);
        head.q = add_head_bias(head.q, layer.distances.u, i, hs);
        of_distances = distance_scores(head.q_v, take_columns<Real>({&layer.distances.r}, i * hs, 1, K, hs), B, T, hs);
      }
      if (lsh && layer.buckets.size() == size_t(i))
        layer.buckets.push_back(
            buckets_of(head.k, &layer.rotations[i * layer.rotations.size() / config.num_heads], *lsh, hs));
      const std::vector<bool> visible =
          lsh ? shared_buckets(layer.buckets[i], B, T) : visibility(config, l, i, B, m, T);
      head.own_map = attention_map(head.q, head.k, of_distances, visible, topk ? topk->n : 0, B, T, hs);
      head.map = layer.mix.empty() ? head.own_map : mix_maps(layer.mix, layers[l - 1].heads[i].map, head.own_map);
    }
    head.v = take_columns(sources, columns.v, B, K, hs);
    add_columns<Real>({&layer.heads_out}, i * hs, apply_map(head.map, head.v, B, T, hs), B, T, hs);
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
// overwritten with everything that backward() needs. `memory`, where given, is that of the segments before, and becomes
// that of the segments after this one. `buckets`, where given, are those of each layer, (L): a program that rounds q
// decides otherwise about a q between two buckets, and this says what follows from its decisions.
template <class Real>
Result<Real> forward(const ModelConfig& config, const Tensors<Real>& params, const std::vector<int>& inputs,
                     const std::vector<int>& targets, int B, int T, Cache<Real>* cache = nullptr,
                     Memory<Real>* memory = nullptr, const std::vector<HeadBuckets>* buckets = nullptr) {
  const int L = config.num_layers;
  const int64_t C = config.channels, V = config.vocab_size, N = int64_t(B) * T;
  CHECK(T <= config.max_seq_len && int64_t(inputs.size()) == N && int64_t(targets.size()) == N);
  Cache<Real> local;
  Cache<Real>& acts = cache ? *cache : local;
  Memory<Real> none;
  Memory<Real>& remembered = memory ? *memory : none;
  remembered.resize(L);
  const int m = int(remembered[0].size() / (B * C));
  acts = {B, T, m, inputs, targets, std::vector<LayerCache<Real>>(L), {}, {}, Array<Real>(N * V), Array<Real>(N * V)};

  const Tensor<Real>& wte = params.at("wte.weight");
  Array<Real> x(N * C);  // (B, T, C)
  for (int64_t n = 0; n < N; n++) {
    CHECK(inputs[n] >= 0 && inputs[n] < V && targets[n] >= -1 && targets[n] < V);
    for (int64_t c = 0; c < C; c++) x[n * C + c] = wte.data[inputs[n] * C + c];
  }

  const int k = layers_in_cycle(config);
  const WiringTerm* act = find_term(config, Kind::act);
  // The residual stream, or the two of `reversible`; without it x1 and x2 are the same array.
  std::vector<Array<Real>> streams(num_streams(config), x);
  Array<Real>&x1 = streams.front(), &x2 = streams.back();
  for (int l = 0; l < L; l++) {
    if (l % k == 0)
      for (Array<Real>& stream : streams) add_coordinates(params, l / k, T, C, stream);
    const std::string h = name_of_layer(config, l);
    LayerCache<Real>& layer = acts.layers[l];
    // x1 += c_proj(attention(ln_1(x2))), with `gru` its gate in place of +=
    const Array<Real> extended = append_rows(remembered[l], x2, B);
    const int64_t kept = std::min<int64_t>(memory_positions(config.wiring), m + T);
    remembered[l] = last_rows(extended, B, kept, C);
    layer.ln_1 = norm_of(config, params, h + ".ln_1", extended);
    layer.qkv = linear(params, h + ".attn.c_attn", layer.ln_1.out);
    if (l > 0 && find_term(config, Kind::blend)) layer.mix.assign(N, Real(find_term(config, Kind::blend)->a));
    if (l > 0 && find_term(config, Kind::gate))
      layer.mix = sigmoid(linear(params, h + ".attn.map_gate", layer.ln_1.out));
    if (find_term(config, Kind::relative))
      layer.distances = {linear(params, h + ".attn.relative", sines_of_distances<Real>(m + T, C)),
                         params.at(h + ".attn.relative.u").data, params.at(h + ".attn.relative.v").data};
    if (find_term(config, Kind::lsh)) layer.rotations = params.at(h + ".attn.rotations").data;
    if (buckets) layer.buckets = (*buckets)[l];
    attention(config, acts.layers, l, B, m, T);
    join(params, h + ".gru_1", linear(params, h + ".attn.c_proj", layer.heads_out), x1, layer.gru_1);
    // x2 += c_proj(gelu(c_fc(ln_2(x1))))
    layer.ln_2 = norm_of(config, params, h + ".ln_2", x1);
    layer.fc = linear(params, h + ".mlp.c_fc", layer.ln_2.out);
    layer.fc_gelu = gelu(layer.fc);
    join(params, h + ".gru_2", linear(params, h + ".mlp.c_proj", layer.fc_gelu), x2, layer.gru_2);
    if (act && (l + 1) % k == 0) acts.halting.states.push_back(x2);
  }

  Result<Real> result = {0, 0, Array<Real>(N)};
  const Array<Real> in_mean = weights_in_mean<Real>(targets);
  x = act ? halt(params, act->a, in_mean, acts.halting, result.ponder) : mean_of(streams);
  acts.ln_f = norm_of(config, params, "ln_f", x);
  for (int64_t n = 0; n < N; n++) {
    Real* logits = &acts.logits[n * V];
    Real* probs = &acts.probs[n * V];
    for (int64_t token = 0; token < V; token++) {  // the tied head: logits = ln_f(x) wte^T
      Real sum = 0;
      for (int64_t c = 0; c < C; c++) sum += acts.ln_f.out[n * C + c] * wte.data[token * C + c];
      logits[token] = sum;
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
};

// The backward pass of layer l's attention, from d_heads_out, the gradient of its `heads_out`: `shared` +=, `own` =.
template <class Real>
void attention_backward(const ModelConfig& config, const std::vector<LayerCache<Real>>& layers, int l,
                        const Array<Real>& d_heads_out, SharedGradients<Real>& shared, OwnGradients<Real>& own,
                        int64_t B, int64_t m, int64_t T) {
  const int64_t hs = config.head_size(), K = m + T;
  const WiringTerm* rope = find_term(config, Kind::rope);
  const LayerCache<Real>& layer = layers[l];
  Distances<Real>& d_distances = own.d_distances;
  own.d_mix.assign(layer.mix.size(), 0);
  d_distances.r.assign(layer.distances.r.size(), 0);
  d_distances.u.assign(layer.distances.u.size(), 0);
  d_distances.v.assign(layer.distances.v.size(), 0);
  for (int i = 0; i < config.num_heads; i++) {
    const HeadCache<Real>& head = layer.heads[i];
    const HeadColumns columns = head_columns(config, i);
    std::vector<Array<Real>*> d_sources;
    for (int source : source_layers(config, l, i)) d_sources.push_back(&shared.d_qkv[source]);
    const Array<Real> d_out = take_columns<Real>({&d_heads_out}, i * hs, B, T, hs);
    Array<Real>& d_map = shared.d_map[l][i];
    Array<Real> d_q, d_k, d_v, d_of_distances;
    apply_map_backward(head.map, head.v, d_out, d_map, d_v, B, T, hs);
    add_columns(d_sources, columns.v, d_v, B, K, hs);
    if (map_layer(config, l) != l) {
      add_into(shared.d_map[map_layer(config, l)][i], d_map);
      continue;
    }
    Array<Real> d_own_map = d_map;
    if (!layer.mix.empty())
      mix_maps_backward(layer.mix, layers[l - 1].heads[i].map, head.own_map, d_map, own.d_mix, shared.d_map[l - 1][i],
                        d_own_map);
    attention_map_backward(head.q, head.k, head.own_map, d_own_map, d_q, d_k, d_of_distances, B, T, K, hs);
    if (find_term(config, Kind::relative)) {
      Array<Real> d_q_v, d_r;
      distance_scores_backward(head.q_v, take_columns<Real>({&layer.distances.r}, i * hs, 1, K, hs), d_of_distances,
                               d_q_v, d_r, B, T, hs);
      add_columns<Real>({&d_distances.r}, i * hs, d_r, 1, K, hs);
      add_head_bias_backward(d_q, d_distances.u, i, hs);
      add_head_bias_backward(d_q_v, d_distances.v, i, hs);
      add_into(d_q, d_q_v);
    }
    if (rope) d_q = rotate(d_q, rope->a, -1, m, T, hs), d_k = rotate(d_k, rope->a, -1, 0, K, hs);
    if (find_term(config, Kind::lsh)) d_k = unit_rows_backward(head.q, d_k, hs);
    add_columns({&shared.d_qkv[l]}, columns.q, append_rows(Array<Real>(B * m * hs), d_q, B), B, K, hs);
    add_columns(d_sources, columns.k, d_k, B, K, hs);
  }
}

// The backward pass of join(): returns the gradient of `branch`; d_x is that of x after it, and becomes that of x
// before it.
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
  const Tensor<Real>& wte = params.at("wte.weight");
  Tensor<Real>& d_wte = grads.at("wte.weight");

  const Array<Real> in_mean = weights_in_mean<Real>(cache.targets);
  Array<Real> d_hidden(N * C);  // of ln_f's output
  for (int64_t n = 0; n < N; n++) {
    for (int64_t token = 0; token < V; token++) {
      const Real d_logit = (cache.probs[n * V + token] - (token == cache.targets[n])) * Real(scale) * in_mean[n];
      for (int64_t c = 0; c < C; c++) {
        d_hidden[n * C + c] += d_logit * wte.data[token * C + c];
        d_wte.data[token * C + c] += d_logit * cache.ln_f.out[n * C + c];
      }
    }
  }
  Array<Real> d_x = norm_backward(config, params, "ln_f", cache.ln_f, d_hidden, grads);
  const WiringTerm* act = find_term(config, Kind::act);
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
  const int k = layers_in_cycle(config);
  for (int l = L - 1; l >= 0; l--) {
    const std::string h = name_of_layer(config, l);
    const LayerCache<Real>& layer = cache.layers[l];
    if (act && (l + 1) % k == 0) add_into(d_x2, d_states[l / k]);
    const Array<Real> d_mlp = join_backward(params, h + ".gru_2", layer.gru_2, d_x2, grads);
    const Array<Real> d_gelu = linear_backward(params, h + ".mlp.c_proj", layer.fc_gelu, d_mlp, grads);
    const Array<Real> d_fc = gelu_backward(layer.fc, d_gelu);
    const Array<Real> d_ln_2 = linear_backward(params, h + ".mlp.c_fc", layer.ln_2.out, d_fc, grads);
    add_into(d_x1, norm_backward(config, params, h + ".ln_2", layer.ln_2, d_ln_2, grads));

    const Array<Real> d_attention = join_backward(params, h + ".gru_1", layer.gru_1, d_x1, grads);
    const Array<Real> d_heads_out = linear_backward(params, h + ".attn.c_proj", layer.heads_out, d_attention, grads);
    OwnGradients<Real> own;
    attention_backward(config, cache.layers, l, d_heads_out, shared, own, B, cache.m, T);
    if (find_term(config, Kind::relative)) {
      linear_backward(params, h + ".attn.relative", sines_of_distances<Real>(cache.m + T, C), own.d_distances.r, grads);
      add_into(grads.at(h + ".attn.relative.u").data, own.d_distances.u);
      add_into(grads.at(h + ".attn.relative.v").data, own.d_distances.v);
    }
    Array<Real> d_ln_1 = linear_backward(params, h + ".attn.c_attn", layer.ln_1.out, shared.d_qkv[l], grads);
    if (l > 0 && find_term(config, Kind::gate)) {
      const Array<Real> d_gate = sigmoid_backward(layer.mix, own.d_mix);
      add_into(d_ln_1, linear_backward(params, h + ".attn.map_gate", layer.ln_1.out, d_gate, grads));
    }
    add_into(d_x2, last_rows(norm_backward(config, params, h + ".ln_1", layer.ln_1, d_ln_1, grads), B, T, C));
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
