// GPT-2 with skip-layer attention, written to be checked by eye: forward, backward and AdamW as loops over indices.
// It is what the trainer is measured against, so it shares nothing with it but ModelConfig, and takes no shortcut:
// nothing is fused, recomputed, tiled or left out. Keys and values are concatenated as the paper's listing does, and
// K/V heads that no head attends to are projected all the same (their gradient comes out as zero by itself).
//
// B batch, T length, C channels, L layers, h heads of size hs = C / h, V vocabulary; shapes in the order of memory.
// An Array is an activation, (B, T, something) unless said otherwise; a Tensor is a parameter, its gradient or its
// optimizer state. Parameters bear their Hugging Face GPT-2 names; a linear layer's weight is (in, out), as in
// GPT-2's Conv1D.
#pragma once
#include <algorithm>           // std::min, std::max
#include <cmath>               // std::exp, std::log, std::sqrt, std::tanh, std::pow
#include <cstdint>             // int64_t
#include <map>                 // std::map
#include <string>              // std::string, std::to_string
#include <vector>              // std::vector
#include "config.h"            // ModelConfig
#include "llmc/utils/error.h"  // CHECK

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
// Parameters: their names and shapes

// Every parameter of the model, filled with zeros; gradients and optimizer state have the same names and shapes.
// Without config.bias the `.bias` tensors do not exist.
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
    if (config.bias) add(name + ".bias", {channels});
  };
  auto add_linear = [&](const std::string& name, int64_t in, int64_t out) {
    add(name + ".weight", {in, out});
    if (config.bias) add(name + ".bias", {out});
  };
  const int64_t C = config.channels;
  add("wte.weight", {config.vocab_size, C});   // token embedding, and the output head: tied
  add("wpe.weight", {config.max_seq_len, C});  // position embedding
  for (int l = 0; l < config.num_layers; l++) {
    const std::string h = "h." + std::to_string(l);
    add_norm(h + ".ln_1", C);
    add_linear(h + ".attn.c_attn", C, 3 * C);  // columns: q | k | v, each head by head
    add_linear(h + ".attn.c_proj", C, C);
    add_norm(h + ".ln_2", C);
    add_linear(h + ".mlp.c_fc", C, 4 * C);
    add_linear(h + ".mlp.c_proj", 4 * C, C);
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

// LayerNorm over the channels, with the biased variance (divided by C).
template <class Real>
Norm<Real> layernorm(const Tensors<Real>& params, const std::string& name, const Array<Real>& x, double eps) {
  const Tensor<Real>& weight = params.at(name + ".weight");
  const Tensor<Real>* bias = find(params, name + ".bias");
  const int64_t C = weight.shape[0], N = x.size() / C;
  Norm<Real> norm = {Array<Real>(N * C), Array<Real>(N), Array<Real>(N * C)};
  for (int64_t n = 0; n < N; n++) {
    Real mean = 0, variance = 0;
    for (int64_t c = 0; c < C; c++) mean += x[n * C + c] / C;
    for (int64_t c = 0; c < C; c++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
    norm.rstd[n] = 1 / std::sqrt(variance + Real(eps));
    for (int64_t c = 0; c < C; c++) {
      norm.xhat[n * C + c] = (x[n * C + c] - mean) * norm.rstd[n];
      norm.out[n * C + c] = norm.xhat[n * C + c] * weight.data[c] + (bias ? bias->data[c] : 0);
    }
  }
  return norm;
}

// With d_xhat = d_out * weight: d_x = rstd * (d_xhat - mean_c(d_xhat) - xhat * mean_c(d_xhat * xhat)).
template <class Real>
Array<Real> layernorm_backward(const Tensors<Real>& params, const std::string& name, const Norm<Real>& norm,
                               const Array<Real>& d_out, Tensors<Real>& grads) {
  const Tensor<Real>& weight = params.at(name + ".weight");
  Tensor<Real>& d_weight = grads.at(name + ".weight");
  Tensor<Real>* d_bias = find(grads, name + ".bias");
  const int64_t C = weight.shape[0], N = d_out.size() / C;
  Array<Real> d_x(N * C);
  for (int64_t n = 0; n < N; n++) {
    Real mean_d_xhat = 0, mean_d_xhat_xhat = 0;
    for (int64_t c = 0; c < C; c++) {
      const Real d_xhat = d_out[n * C + c] * weight.data[c];
      mean_d_xhat += d_xhat / C;
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

// Causal attention, head by head: probs[b,head,t,s] = softmax over s <= t of q[t].k[s] / sqrt(hs), and
// out[t] = sum_s probs[t,s] v[s]. q, k, v, out (B, T, C); probs (B, h, T, T), zero above the diagonal.
template <class Real>
void attention(const Array<Real>& q, const Array<Real>& k, const Array<Real>& v, Array<Real>& probs, Array<Real>& out,
               int64_t B, int64_t T, int64_t num_heads, int64_t hs) {
  const int64_t C = num_heads * hs;
  const Real scale = 1 / std::sqrt(Real(hs));
  probs.assign(B * num_heads * T * T, 0);
  out.assign(B * T * C, 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t head = 0; head < num_heads; head++) {
      for (int64_t t = 0; t < T; t++) {
        const Real* q_t = &q[(b * T + t) * C + head * hs];
        Real* out_t = &out[(b * T + t) * C + head * hs];
        Real* p = &probs[((b * num_heads + head) * T + t) * T];
        for (int64_t s = 0; s <= t; s++) {
          const Real* k_s = &k[(b * T + s) * C + head * hs];
          Real dot = 0;
          for (int64_t i = 0; i < hs; i++) dot += q_t[i] * k_s[i];
          p[s] = dot * scale;
        }
        Real largest = p[0], sum = 0;
        for (int64_t s = 0; s <= t; s++) largest = std::max(largest, p[s]);
        for (int64_t s = 0; s <= t; s++) sum += p[s] = std::exp(p[s] - largest);
        for (int64_t s = 0; s <= t; s++) p[s] /= sum;
        for (int64_t s = 0; s <= t; s++) {
          const Real* v_s = &v[(b * T + s) * C + head * hs];
          for (int64_t i = 0; i < hs; i++) out_t[i] += p[s] * v_s[i];
        }
      }
    }
  }
}

// d_q, d_k, d_v (=), of the q, k and v that attention() was given: d_v[s] = sum_t p[t,s] d_out[t]; with
// d_p[t,s] = d_out[t].v[s], the scores' d_score = p * (d_p - sum_s p d_p), and through them d_q and d_k.
template <class Real>
void attention_backward(const Array<Real>& q, const Array<Real>& k, const Array<Real>& v, const Array<Real>& probs,
                        const Array<Real>& d_out, Array<Real>& d_q, Array<Real>& d_k, Array<Real>& d_v,
                        int64_t B, int64_t T, int64_t num_heads, int64_t hs) {
  const int64_t C = num_heads * hs;
  const Real scale = 1 / std::sqrt(Real(hs));
  d_q.assign(q.size(), 0);
  d_k.assign(k.size(), 0);
  d_v.assign(v.size(), 0);
  Array<Real> d_p(T);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t head = 0; head < num_heads; head++) {
      for (int64_t t = 0; t < T; t++) {
        const int64_t row = (b * T + t) * C + head * hs;
        const Real* p = &probs[((b * num_heads + head) * T + t) * T];
        Real mean_d_p = 0;
        for (int64_t s = 0; s <= t; s++) {
          const int64_t col = (b * T + s) * C + head * hs;
          d_p[s] = 0;
          for (int64_t i = 0; i < hs; i++) d_p[s] += d_out[row + i] * v[col + i];
          for (int64_t i = 0; i < hs; i++) d_v[col + i] += p[s] * d_out[row + i];
          mean_d_p += p[s] * d_p[s];
        }
        for (int64_t s = 0; s <= t; s++) {
          const int64_t col = (b * T + s) * C + head * hs;
          const Real d_score = p[s] * (d_p[s] - mean_d_p);
          for (int64_t i = 0; i < hs; i++) d_q[row + i] += d_score * k[col + i] * scale;
          for (int64_t i = 0; i < hs; i++) d_k[col + i] += d_score * q[row + i] * scale;
        }
      }
    }
  }
}

// One third of qkv (B, T, 3C), `which` = 0, 1 or 2 for q, k or v: (B, T, C).
template <class Real>
Array<Real> take_third(const Array<Real>& qkv, int which, int C) {
  const int64_t N = qkv.size() / (3 * C);
  Array<Real> out(N * C);
  for (int64_t n = 0; n < N; n++)
    for (int c = 0; c < C; c++) out[n * C + c] = qkv[n * 3 * C + which * C + c];
  return out;
}

// Its inverse for all three: (B, T, C) each into (B, T, 3C).
template <class Real>
Array<Real> join_thirds(const Array<Real>& q, const Array<Real>& k, const Array<Real>& v, int C) {
  const int64_t N = q.size() / C;
  Array<Real> qkv(N * 3 * C);
  for (int64_t n = 0; n < N; n++) {
    for (int c = 0; c < C; c++) {
      qkv[n * 3 * C + c] = q[n * C + c];
      qkv[n * 3 * C + C + c] = k[n * C + c];
      qkv[n * 3 * C + 2 * C + c] = v[n * C + c];
    }
  }
  return qkv;
}

// The listing's torch.cat: the first `split` channels of `own`, the others of `skipped`; all (B, T, C).
template <class Real>
Array<Real> concatenate_heads(const Array<Real>& own, const Array<Real>& skipped, int split, int C) {
  Array<Real> out(own.size());
  for (size_t i = 0; i < out.size(); i++) out[i] = int(i % C) < split ? own[i] : skipped[i];
  return out;
}

// Both get their part of the concatenation's gradient: d_own, d_skipped += .
template <class Real>
void concatenate_heads_backward(const Array<Real>& d_out, Array<Real>& d_own, Array<Real>& d_skipped, int split, int C) {
  for (size_t i = 0; i < d_out.size(); i++) (int(i % C) < split ? d_own : d_skipped)[i] += d_out[i];
}

template <class Real>
void add_into(Array<Real>& sum, const Array<Real>& term) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] += term[i];
}

// ----------------------------------------------------------------------------
// The model, forward

template <class Real>
struct LayerCache {
  Norm<Real> ln_1;
  Array<Real> q, k_own, v_own;  // (B, T, C)     what this layer projects, for itself and higher layers
  Array<Real> k, v;             // (B, T, C)     what it attends to: own heads, then those of the source layer
  Array<Real> probs;            // (B, h, T, T)
  Array<Real> heads_out;        // (B, T, C)     attention's output before its projection
  Norm<Real> ln_2;
  Array<Real> fc;               // (B, T, 4C)    before GELU
  Array<Real> fc_gelu;          // (B, T, 4C)
};

template <class Real>
struct Cache {
  int B = 0, T = 0;
  std::vector<int> inputs, targets;       // (B, T)
  std::vector<LayerCache<Real>> layers;   // (L)
  Norm<Real> ln_f;                        // ln_f.out: the last hidden state
  Array<Real> logits;                     // (B, T, V)
  Array<Real> probs;                      // (B, T, V)  softmax of the logits
};

template <class Real>
struct Result {
  double loss = 0;           // mean of token_losses, nats
  Array<Real> token_losses;  // (B, T)  -log p(target)
};

// The layer whose own keys and values the last n_h heads of layer l attend to; l itself where there is none n_l layers below.
inline int source_layer(const ModelConfig& config, int l) {
  const bool skips = config.wiring.num_skip_head > 0 && l >= config.wiring.num_skip_layer;
  return skips ? l - config.wiring.num_skip_layer : l;
}

// Where, in the C channels of a layer's keys and values, those of another layer begin.
inline int split_channel(const ModelConfig& config) {
  return (config.num_heads - config.wiring.num_skip_head) * config.head_size();
}

// The loss of predicting targets[b,t] from inputs[b,0..t]; both (B, T), T <= max_seq_len. `cache`, where given, is
// overwritten with everything that backward() needs.
template <class Real>
Result<Real> forward(const ModelConfig& config, const Tensors<Real>& params, const std::vector<int>& inputs,
                     const std::vector<int>& targets, int B, int T, Cache<Real>* cache = nullptr) {
  const int L = config.num_layers;
  const int64_t C = config.channels, V = config.vocab_size, N = int64_t(B) * T;
  CHECK(T <= config.max_seq_len && int64_t(inputs.size()) == N && int64_t(targets.size()) == N);
  Cache<Real> local;
  Cache<Real>& acts = cache ? *cache : local;
  acts = {B, T, inputs, targets, std::vector<LayerCache<Real>>(L), {}, Array<Real>(N * V), Array<Real>(N * V)};

  const Tensor<Real>& wte = params.at("wte.weight");
  const Tensor<Real>& wpe = params.at("wpe.weight");
  Array<Real> x(N * C);  // (B, T, C)  the residual stream
  for (int64_t n = 0; n < N; n++) {
    CHECK(inputs[n] >= 0 && inputs[n] < V && targets[n] >= 0 && targets[n] < V);
    for (int64_t c = 0; c < C; c++) x[n * C + c] = wte.data[inputs[n] * C + c] + wpe.data[n % T * C + c];
  }

  for (int l = 0; l < L; l++) {
    const std::string h = "h." + std::to_string(l);
    LayerCache<Real>& layer = acts.layers[l];
    // x += c_proj(attention(ln_1(x)))
    layer.ln_1 = layernorm(params, h + ".ln_1", x, config.layer_norm_eps);
    const Array<Real> qkv = linear(params, h + ".attn.c_attn", layer.ln_1.out);
    layer.q = take_third(qkv, 0, C);
    layer.k_own = take_third(qkv, 1, C);
    layer.v_own = take_third(qkv, 2, C);
    const LayerCache<Real>& source = acts.layers[source_layer(config, l)];
    layer.k = concatenate_heads(layer.k_own, source.k_own, split_channel(config), C);
    layer.v = concatenate_heads(layer.v_own, source.v_own, split_channel(config), C);
    attention(layer.q, layer.k, layer.v, layer.probs, layer.heads_out, B, T, config.num_heads, config.head_size());
    add_into(x, linear(params, h + ".attn.c_proj", layer.heads_out));
    // x += c_proj(gelu(c_fc(ln_2(x))))
    layer.ln_2 = layernorm(params, h + ".ln_2", x, config.layer_norm_eps);
    layer.fc = linear(params, h + ".mlp.c_fc", layer.ln_2.out);
    layer.fc_gelu = gelu(layer.fc);
    add_into(x, linear(params, h + ".mlp.c_proj", layer.fc_gelu));
  }

  acts.ln_f = layernorm(params, "ln_f", x, config.layer_norm_eps);
  Result<Real> result = {0, Array<Real>(N)};
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
    result.token_losses[n] = std::log(sum) + largest - logits[targets[n]];
    result.loss += result.token_losses[n] / N;
  }
  return result;
}

// ----------------------------------------------------------------------------
// The model, backward

// grads += scale * d(mean loss)/d(params), of the forward() that filled `cache` with the same parameters. With
// gradient accumulation each micro-batch has scale 1 / grad_accum_steps.
template <class Real>
void backward(const ModelConfig& config, const Tensors<Real>& params, const Cache<Real>& cache, Tensors<Real>& grads,
              double scale = 1) {
  const int B = cache.B, T = cache.T, L = config.num_layers;
  const int64_t C = config.channels, V = config.vocab_size, N = int64_t(B) * T;
  const Tensor<Real>& wte = params.at("wte.weight");
  Tensor<Real>& d_wte = grads.at("wte.weight");
  Tensor<Real>& d_wpe = grads.at("wpe.weight");

  Array<Real> d_hidden(N * C);  // of ln_f's output
  for (int64_t n = 0; n < N; n++) {
    for (int64_t token = 0; token < V; token++) {
      const Real d_logit = (cache.probs[n * V + token] - (token == cache.targets[n])) * Real(scale) / N;
      for (int64_t c = 0; c < C; c++) {
        d_hidden[n * C + c] += d_logit * wte.data[token * C + c];
        d_wte.data[token * C + c] += d_logit * cache.ln_f.out[n * C + c];
      }
    }
  }
  Array<Real> d_x = layernorm_backward(params, "ln_f", cache.ln_f, d_hidden, grads);  // of the residual stream

  // Gradients of what each layer projected, collected from every layer that attends to it. That layer, l + n_l, comes
  // first on the way down, so they are complete once layer l has added its own.
  std::vector<Array<Real>> d_k_own(L, Array<Real>(N * C)), d_v_own(L, Array<Real>(N * C));
  for (int l = L - 1; l >= 0; l--) {
    const std::string h = "h." + std::to_string(l);
    const LayerCache<Real>& layer = cache.layers[l];
    const Array<Real> d_gelu = linear_backward(params, h + ".mlp.c_proj", layer.fc_gelu, d_x, grads);
    const Array<Real> d_fc = gelu_backward(layer.fc, d_gelu);
    const Array<Real> d_ln_2 = linear_backward(params, h + ".mlp.c_fc", layer.ln_2.out, d_fc, grads);
    add_into(d_x, layernorm_backward(params, h + ".ln_2", layer.ln_2, d_ln_2, grads));

    const Array<Real> d_heads_out = linear_backward(params, h + ".attn.c_proj", layer.heads_out, d_x, grads);
    Array<Real> d_q, d_k, d_v;
    attention_backward(layer.q, layer.k, layer.v, layer.probs, d_heads_out, d_q, d_k, d_v, B, T, config.num_heads,
                       config.head_size());
    const int from = source_layer(config, l);
    concatenate_heads_backward(d_k, d_k_own[l], d_k_own[from], split_channel(config), C);
    concatenate_heads_backward(d_v, d_v_own[l], d_v_own[from], split_channel(config), C);
    const Array<Real> d_qkv = join_thirds(d_q, d_k_own[l], d_v_own[l], C);
    const Array<Real> d_ln_1 = linear_backward(params, h + ".attn.c_attn", layer.ln_1.out, d_qkv, grads);
    add_into(d_x, layernorm_backward(params, h + ".ln_1", layer.ln_1, d_ln_1, grads));
  }

  for (int64_t n = 0; n < N; n++) {
    for (int64_t c = 0; c < C; c++) {
      d_wte.data[cache.inputs[n] * C + c] += d_x[n * C + c];
      d_wpe.data[n % T * C + c] += d_x[n * C + c];
    }
  }
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
template <class Real>
double adamw(Tensors<Real>& params, const Tensors<Real>& grads, Tensors<Real>& m, Tensors<Real>& v, int step,
             const AdamWOptions& o) {
  const double norm = global_norm(grads);
  const double clip = std::min(1.0, o.grad_clip / (norm + 1e-6));
  const Real step_size = Real(o.learning_rate / (1 - std::pow(o.beta1, step)));
  const Real sqrt_correction2 = Real(std::sqrt(1 - std::pow(o.beta2, step)));
  for (auto& [name, param] : params) {
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

}  // namespace reference
