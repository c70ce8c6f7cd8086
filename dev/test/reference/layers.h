// The layers of the reference model (reference.h), each beside its backward; its parameters; and what the terms of a
// wiring say.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>
#include "llmc/wiring/config.h"

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
// The wiring: what its terms say, applied from left to right. llmc/wiring/terms describes them.

// The last term of that kind; null if the wiring has none.
template <class T>
const T* find_term(const ModelConfig& config) {
  const T* found = nullptr;
  for (const WiringTerm& term : config.wiring.terms)
    if (const T* of_kind = std::get_if<T>(&term)) found = of_kind;
  return found;
}

// g. Query head i attends to K/V head i * g / h.
inline int num_kv_heads(const ModelConfig& config) {
  const GqaTerm* gqa = find_term<GqaTerm>(config);
  return gqa ? gqa->n : config.num_heads;
}

// Whether `sla` or `also` is meant for the head of layer l.
inline bool skips(const ModelConfig& config, const SourceBelow& term, int l, int head) {
  const int first = term.last_heads > 0 ? config.num_heads - term.last_heads : term.first_head;
  const int end = term.last_heads > 0 ? config.num_heads : term.end_head;
  return l >= term.distance && head >= first && head < end;
}

// Sources of a head, ascending: the layer whose keys it attends to, and the one whose values are theirs.
using Sources = std::set<std::pair<int, int>>;

// `sources` with this layer in place of the key layers and the value layers, or of one of them.
inline Sources moved(const Sources& sources, bool keys, bool values, int layer) {
  Sources now;
  for (const auto& [k, v] : sources) now.insert({keys ? layer : k, values ? layer : v});
  return now;
}

// What a head of layer l attends to: keys and values as these layers project them.
inline Sources source_layers(const ModelConfig& config, int l, int head) {
  Sources sources = {{l, l}};
  for (const WiringTerm& term : config.wiring.terms) {
    if (const auto* sla = std::get_if<SlaTerm>(&term); sla && skips(config, *sla, l, head))
      sources = moved(sources, sla->part.k, sla->part.v, l - sla->distance);
    if (const auto* also = std::get_if<AlsoTerm>(&term); also && skips(config, *also, l, head))
      sources.insert({l - also->distance, l - also->distance});
    if (const auto* share = std::get_if<ShareTerm>(&term))
      sources = moved(sources, share->part.k, share->part.v, l - l % share->n);
    if (const auto* layers = std::get_if<LayersTerm>(&term)) sources = {{layers->layers[l], layers->layers[l]}};
  }
  return sources;
}

// Whether the query at position t may see the keys at position j, whichever layer's they are.
inline bool is_visible(const ModelConfig& config, int l, int head, int t, int j) {
  if (j > t) return false;
  for (const WiringTerm& term : config.wiring.terms) {
    bool a1 = true, a2 = true;  // Sparse Transformer's two patterns
    SparsePattern::How how = SparsePattern::How::both;
    if (const auto* window = std::get_if<WindowTerm>(&term)) {
      const std::string& pattern = window->pattern;
      if ((pattern.empty() || pattern[l % pattern.size()] == 'S') && t - j >= window->keys) return false;
    } else if (const auto* strided = std::get_if<StridedTerm>(&term)) {
      a1 = t - j <= strided->stride;
      a2 = (t - j) % strided->stride == 0;
      how = strided->how;
    } else if (const auto* fixed = std::get_if<FixedTerm>(&term)) {
      a1 = j / fixed->block == t / fixed->block;
      a2 = j % fixed->block >= fixed->block - fixed->columns;
      how = fixed->how;
    }
    const bool takes_a1 = how == SparsePattern::How::heads ? head < (config.num_heads + 1) / 2 : l % 2 == 0;
    if (how == SparsePattern::How::both ? !a1 && !a2 : takes_a1 ? !a1 : !a2) return false;
  }
  return true;
}

// Whether the token at j is in the same document as the token at t >= j. Without `documents` all tokens are in one.
inline bool is_same_document(const ModelConfig& config, const int* tokens, int64_t t, int64_t j) {
  if (!find_term<DocumentsTerm>(config)) return true;
  for (int64_t i = j + 1; i <= t; i++)
    if (tokens[i] == config.end_of_text) return false;
  return true;
}

// is_visible of all t and j, counted from the memory's first position, in each of B sequences of tokens: (B, T, K).
inline std::vector<bool> visibility(const ModelConfig& config, int l, int head, const std::vector<int>& tokens,
                                    int64_t B, int64_t m, int64_t T) {
  const int64_t K = m + T;
  std::vector<bool> visible(B * T * K);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j < K; j++)
        visible[(b * T + t) * K + j] =
            is_visible(config, l, head, int(m + t), int(j)) && is_same_document(config, &tokens[b * T], t, j - m);
  return visible;
}

// The layer whose attention map layer l uses: its own, but for `reuse`.
inline int map_layer(const ModelConfig& config, int l) {
  const ReuseTerm* reuse = find_term<ReuseTerm>(config);
  return reuse ? l - l % reuse->n : l;
}

// The k of `universal`: layers run in cycles of k, and layer l has the parameters of layer l mod k. Without it all
// layers are one cycle.
inline int layers_in_cycle(const ModelConfig& config) {
  const UniversalTerm* universal = find_term<UniversalTerm>(config);
  return universal ? universal->n : config.num_layers;
}

// The positions of earlier segments that a query sees: the m of `memory`; 0 without it.
inline int positions_of_memory(const ModelConfig& config) {
  const MemoryTerm* memory = find_term<MemoryTerm>(config);
  return memory ? memory->n : 0;
}

// The hidden units of MLPs; by default of `swiglu` 8/3 of the channels, up to a multiple of 64.
inline int64_t hidden_units(const ModelConfig& config) {
  const SwigluTerm* swiglu = find_term<SwigluTerm>(config);
  if (!swiglu) return 4 * config.channels;
  return swiglu->hidden_units > 0 ? swiglu->hidden_units : int64_t(std::ceil(config.channels / 24.0)) * 64;
}

// What the names of layer l's parameters begin with.
inline std::string name_of_layer(const ModelConfig& config, int l) {
  return "h." + std::to_string(l % layers_in_cycle(config));
}

// ----------------------------------------------------------------------------
// Parameters: their names and shapes

// Whether training leaves the tensor as it is: the rotations of `lsh`. It has no gradient and does not decay.
inline bool is_constant(const std::string& name) { return name.find(".attn.rotations") != std::string::npos; }

// Every parameter of the model, filled with zeros; gradients and optimizer state have the same names and shapes, and
// are zero for constants. Without config.bias the `.bias` tensors do not exist, but for the gates' of `gru`.
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
    if (config.bias && !find_term<RmsnormTerm>(config)) add(name + ".bias", {channels});
  };
  auto add_linear = [&](const std::string& name, int64_t in, int64_t out) {
    add(name + ".weight", {in, out});
    if (config.bias) add(name + ".bias", {out});
  };
  auto add_gate = [&](const std::string& name, int64_t channels) {
    if (!find_term<GruTerm>(config)) return;
    add(name + ".y.weight", {channels, 3 * channels});  // columns: W_r | W_z | W_g
    add(name + ".x.weight", {channels, 2 * channels});  // columns: U_r | U_z
    add(name + ".rx.weight", {channels, channels});     // U_g
    add(name + ".bias", {channels});
  };
  const int64_t C = config.channels, g = num_kv_heads(config), hs = config.head_size();
  const bool relative = find_term<RelativeTerm>(config);
  const LshTerm* lsh = find_term<LshTerm>(config);
  add("wte.weight", {config.vocab_size, C});  // token embedding, and without `untied` the output head
  if (find_term<UntiedTerm>(config)) add("lm_head.weight", {config.vocab_size, C});
  if (!relative && !find_term<RopeTerm>(config) && !find_term<AlibiTerm>(config))
    add("wpe.weight", {config.max_seq_len, C});  // position embedding
  const int k = layers_in_cycle(config);
  if (find_term<UniversalTerm>(config)) add("wse.weight", {config.num_layers / k, C});  // embedding of the cycle
  if (find_term<ActTerm>(config)) add_linear("halt", C, 1);
  for (int l = 0; l < k; l++) {
    const std::string h = name_of_layer(config, l);
    add_norm(h + ".ln_1", C);
    add_linear(h + ".attn.c_attn", C, C + (lsh ? 1 : 2) * g * hs);  // columns: q | k | v, or q | v, each head by head
    if (lsh) add(h + ".attn.rotations", {config.num_heads, lsh->rounds, hs, lsh->buckets / 2});
    if (find_term<GateTerm>(config) && l > 0) add_linear(h + ".attn.map_gate", C, 1);
    if (find_term<VresTerm>(config) && l > 0) add(h + ".attn.value_mix", {2});               // a, b
    if (find_term<RouterTerm>(config) && l > 0) add(h + ".attn.router", {g * (l + 1) * g});  // (g, l + 1, g)
    if (find_term<SinksTerm>(config)) add(h + ".attn.sinks", {config.num_heads});
    if (relative) {
      add(h + ".attn.relative.weight", {C, C});
      for (const char* bias : {"u", "v"}) add(h + ".attn.relative." + bias, {config.num_heads, hs});
    }
    add_linear(h + ".attn.c_proj", C, C);
    add_gate(h + ".gru_1", C);
    add_norm(h + ".ln_2", C);
    const int64_t H = hidden_units(config);
    add_linear(h + ".mlp.c_fc", C, find_term<SwigluTerm>(config) ? 2 * H : H);
    add_linear(h + ".mlp.c_proj", H, C);
    add_gate(h + ".gru_2", C);
    if (find_term<DenseTerm>(config)) add(h + ".dense", {l + 2});  // of the embeddings and layers 0 to l
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

inline const char* name_of_head(const ModelConfig& config) {
  return find_term<UntiedTerm>(config) ? "lm_head.weight" : "wte.weight";
}

// ----------------------------------------------------------------------------
// Layers, each beside its backward. A backward function returns the gradient of its input (=) and adds to the
// gradients of its parameters (+=).

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
  const bool takes_mean = !find_term<RmsnormTerm>(config);
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
  const bool takes_mean = !find_term<RmsnormTerm>(config);
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

template <class Real>
Real sigmoid_of(Real x) {
  return 1 / (1 + std::exp(-x));
}

// The activation of MLPs: gelu, with `relu2` relu(x)^2, with `silu` x sigmoid(x), and with `swiglu` silu(x) y of (any,
// x | y).
template <class Real>
Array<Real> activation(const ModelConfig& config, const Array<Real>& in) {
  if (find_term<SwigluTerm>(config)) {
    const size_t H = hidden_units(config);
    Array<Real> out(in.size() / 2);
    for (size_t i = 0; i < out.size(); i++) {
      const Real x = in[i / H * 2 * H + i % H], y = in[i / H * 2 * H + H + i % H];
      out[i] = x * sigmoid_of(x) * y;
    }
    return out;
  }
  if (find_term<SiluTerm>(config)) {
    Array<Real> out(in.size());
    for (size_t i = 0; i < in.size(); i++) out[i] = in[i] * sigmoid_of(in[i]);
    return out;
  }
  if (!find_term<Relu2Term>(config)) return gelu(in);
  Array<Real> out(in.size());
  for (size_t i = 0; i < in.size(); i++) out[i] = in[i] > 0 ? in[i] * in[i] : 0;
  return out;
}

template <class Real>
Array<Real> activation_backward(const ModelConfig& config, const Array<Real>& in, const Array<Real>& d_out) {
  if (find_term<SwigluTerm>(config)) {
    const size_t H = hidden_units(config);
    Array<Real> d_in(in.size());
    for (size_t i = 0; i < d_out.size(); i++) {
      const size_t at_x = i / H * 2 * H + i % H, at_y = at_x + H;
      const Real x = in[at_x], s = sigmoid_of(x);
      d_in[at_x] = d_out[i] * in[at_y] * (s + x * s * (1 - s));
      d_in[at_y] = d_out[i] * x * s;
    }
    return d_in;
  }
  if (find_term<SiluTerm>(config)) {
    Array<Real> d_in(in.size());
    for (size_t i = 0; i < in.size(); i++) {
      const Real s = sigmoid_of(in[i]);
      d_in[i] = d_out[i] * (s + in[i] * s * (1 - s));
    }
    return d_in;
  }
  if (!find_term<Relu2Term>(config)) return gelu_backward(in, d_out);
  Array<Real> d_in(in.size());
  for (size_t i = 0; i < in.size(); i++) d_in[i] = in[i] > 0 ? 2 * in[i] * d_out[i] : 0;
  return d_in;
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

template <class Real>
void add_into(Array<Real>& sum, const Array<Real>& term) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] += term[i];
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

// Returns the gradient of the sublayer's output; d_x is the gradient of the stream after the gate, and becomes the
// gradient of the stream before it.
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

// Returns the gradients of the states (cycles): (B, T, C), from d_x, their weighted sum's, and cost times the
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

}  // namespace reference
