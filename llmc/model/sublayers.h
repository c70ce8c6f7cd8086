// A model is a list of sublayers, two for each layer: a norm, a branch (attention or the MLP), and how the branch's
// output joins the residual stream. The forward pass walks the list, the backward pass walks it the other way, and the
// list of activations, the arithmetic and the GPU's model walk it too.
//
// Each kind of norm, branch, residual and head is a part, a file in parts/. What a part supplies, besides its struct:
//
//   declare(part, list)                     which activations it keeps: names, shapes, levels of recomputation; a norm
//                                           and a residual are told from which level on their output is dropped
//   bind_PART(part, ...)                    pointers to weights, activations and what others have declared, in memory
//   norm_forward, norm_backward             out = the norm of the stream; dresidual += from dout
//   branch_forward, branch_again,           out = from the norm's output; again in the backward pass, but not K/V;
//   project_out, branch_backward              out alone; din = from dout, and gradients of parameters +=
//   head_forward, head_backward             logits of some rows of the hidden states; din =, gradients +=
//   residual_forward, residual_backward     the stream after the branch, and AddResidual's the norm that follows, in
//                                           one pass; the gradient of the branch's output, and dresidual becomes the
//                                           gradient of the stream before
//   matmul_elements, attention_flops        its cost, if it has any
//
// No part has an empty function: the code that walks the list asks which kind a part is.
#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <variant>
#include <vector>
#include "parts/add_residual.h"
#include "parts/attention_branch.h"
#include "parts/cycle_end.h"
#include "parts/cycle_start.h"
#include "parts/dense_sum.h"
#include "parts/gru_residual.h"
#include "parts/head.h"
#include "parts/kv_route.h"
#include "parts/lsh_branch.h"
#include "parts/mlp_branch.h"
#include "parts/norm.h"
#include "parts/reversible_residual.h"

using Branch = std::variant<AttentionBranch, LshBranch, MlpBranch>;
using Residual = std::variant<AddResidual, GruResidual, ReversibleResidual>;

// What the backward pass computes again before a sublayer, because a later one of the forward pass has overwritten it.
struct Recomputation {
  enum class What {
    norm,        // the sublayer's norm
    branch,      // the outputs of its branch that later operations read; K/V has been kept
    residual,    // the residual stream after it, and the next norm
    activation,  // an MLP's f of the hidden units, which have been kept
    output,      // the branch's output, and with `gru` its relu, which the gate reads
    gates,       // with `gru`: r, z and g
    input,       // with `dense`: the sum after the sublayer, which the next one reads
    stream,      // with `reversible`: what the sublayer's norm read of a stream
    taken_back,  // with `reversible`: the sublayer's stream as it was before the sublayer
  };
  What what;
  int sublayer;
};

struct Sublayer {
  int layer = 0;    // as layers run, from 0
  int weights = 0;  // index of the layer whose parameters it uses: those that files call h.<weights>
  int bucket = 0;   // the gradient bucket of these parameters
  Norm norm;
  Branch branch;
  Residual residual;
  std::optional<CycleEnd> cycle_end;
  std::optional<CycleStart> next_cycle;  // of the cycle of layers that begins after it
  std::optional<DenseSum> dense;         // after a layer's last sublayer
  std::vector<Recomputation> again;      // before the sublayer's backward pass
  std::vector<int> completes;            // gradient buckets that are complete after it
};

// A tensor that is zero when the backward pass begins.
struct ZeroedTensor {
  void* x;
  size_t bytes;
};

// All that follows the embeddings.
struct Sublayers {
  std::vector<Sublayer> list;
  Norm last_norm;  // whose output is the final hidden states
  Head head;
  std::vector<ZeroedTensor> zeroed;       // before the backward pass
  std::optional<CycleStart> first_cycle;  // of layers that repeat
  std::optional<Streams> streams;         // of reversible layers
  std::optional<HeadPlaces> places;       // of `route`, in training: where attention finds all heads
  std::vector<WeightedTensor> dembedded;  // of `dense`: what the gradient of the embeddings has beside layer 0's
  Dropout dropout;                        // of the embeddings
  const float* ponder = nullptr;          // (N): with `act`, cycles a token (halting.h); else null

  int size() const { return int(list.size()); }
  // The norm before sublayer i; i = size(): the one before the output head.
  Norm& norm(int i) { return i < size() ? list[size_t(i)].norm : last_norm; }
  const Norm& norm(int i) const { return i < size() ? list[size_t(i)].norm : last_norm; }
};

inline bool is_mlp(const Sublayer& s) { return std::holds_alternative<MlpBranch>(s.branch); }

// ----------------------------------------------------------------------------
// Which sublayers there are

// The attention branch of a sublayer; null for an MLP and for one that hashes.
inline const AttentionBranch* attention_of(const Sublayer& s) { return std::get_if<AttentionBranch>(&s.branch); }

// Sublayers 2 l and 2 l + 1 belong to layer l.
inline const AttentionBranch& attention_of_layer(const Sublayers& sublayers, int layer) {
  return std::get<AttentionBranch>(sublayers.list[size_t(2 * layer)].branch);
}

// Adds a sublayer of layer l, whose branch is set later.
inline Sublayer& add_sublayer(Sublayers& sublayers, const ModelConfig& c, const AttentionPlan& plan, int l,
                              const char* norm, const char* residual) {
  Sublayer& s = sublayers.list.emplace_back();
  s.layer = l, s.weights = l % plan.table.stored_layers;
  s.norm.name = norm;
  if (plan.table.gru) s.residual = GruResidual{residual, c.channels};
  else if (plan.table.reversible) s.residual.emplace<ReversibleResidual>().C = c.channels;
  else s.residual = AddResidual{residual, c.channels};
  return s;
}

inline int sublayers_of_cycle(const AttentionPlan& plan) { return 2 * plan.table.stored_layers; }

// The sublayers of a model, for training or for generation, without pointers: enough for its arithmetic.
inline Sublayers make_sublayers(const ModelConfig& c, const AttentionPlan& plan, bool is_generation = false) {
  Sublayers sublayers;
  for (int l = 0; l < c.num_layers; l++) {
    Branch& branch = add_sublayer(sublayers, c, plan, l, "ln1", "residual2").branch;
    if (plan.table.lsh_buckets > 0) branch = make_lsh(l, is_generation);
    else branch = make_attention(plan, l, is_generation);
    Sublayer& mlp = add_sublayer(sublayers, c, plan, l, "ln2", "residual3");
    mlp.branch = make_mlp(c, plan.table, l);
    if (plan.table.dense) mlp.dense.emplace().C = c.channels, mlp.dense->layer = l;
  }
  const int of_cycle = sublayers_of_cycle(plan), size = sublayers.size();
  for (int i = of_cycle; plan.table.halting > 0 && i <= size; i += of_cycle)
    sublayers.list[size_t(i - 1)].cycle_end = make_cycle_end(i / of_cycle - 1, size / of_cycle, c.channels);
  for (Sublayer& s : sublayers.list)
    if (auto* r = std::get_if<ReversibleResidual>(&s.residual))
      r->adds_to_first = !is_mlp(s), r->is_last = &s == &sublayers.list.back();
  sublayers.last_norm.name = "lnf", sublayers.head.cap = float(plan.table.softcap);
  for (int i = 0; i <= size; i++) {
    Norm& norm = sublayers.norm(i);
    norm.C = c.channels, norm.eps = float(c.layer_norm_eps), norm.centers = !plan.table.rmsnorm;
  }
  return sublayers;
}

// What the backward pass of reversible layers computes again before each sublayer: it takes back what the next sublayer
// has added to a stream, and computes everything of the sublayer again. The last layer's sublayers have left everything
// but attention's output and what the layer's last norm read, where the streams' mean is now.
inline void declare_reversible_recomputation(Sublayers& sublayers) {
  using What = Recomputation::What;
  const int size = sublayers.size();
  sublayers.list.back().again = {{What::stream, size - 1}};
  for (int i = size - 2; i >= 0; i--) {
    Sublayer& s = sublayers.list[size_t(i)];
    s.again.push_back({What::taken_back, i + 1});
    if (i < size - 2) s.again.insert(s.again.end(), {{What::norm, i}, {What::branch, i}});
    if (i == size - 2 || is_mlp(s)) s.again.push_back({What::output, i});
  }
}

// What each sublayer's backward pass finds overwritten. The last layer's tensors are still there, because no sublayer
// of the forward pass comes after it.
inline void declare_recomputation(Sublayers& sublayers, Recompute level) {
  using What = Recomputation::What;
  if (std::holds_alternative<ReversibleResidual>(sublayers.list[0].residual))
    return declare_reversible_recomputation(sublayers);
  // With `dense` the last layer's input is computed again, too: after it comes the last norm's input.
  for (int i = 2; i < sublayers.size() && level >= Recompute::norm; i += 2)
    if (sublayers.list[size_t(i - 1)].dense) sublayers.list[size_t(i + 1)].again.push_back({What::input, i - 1});
  for (int i = 0; i + 2 < sublayers.size(); i += 2) {  // the sublayers of a layer: attention, MLP
    std::vector<Recomputation>& again = sublayers.list[size_t(i + 1)].again;
    if (level >= Recompute::norm) again.push_back({What::norm, i});
    if (level >= Recompute::block) {
      again.push_back({What::branch, i});
      again.push_back({What::residual, i});
      again.push_back({What::branch, i + 1});
      continue;
    }
    if (level >= Recompute::norm) again.push_back({What::norm, i + 1});
    if (level >= Recompute::activation) again.push_back({What::activation, i + 1});
  }
  // Sublayers share the tensors of their gates, so that only the last sublayer's gates have not been overwritten.
  for (int i = 0; i + 1 < sublayers.size() && level >= Recompute::activation; i++) {
    Sublayer& s = sublayers.list[size_t(i)];
    if (!std::holds_alternative<GruResidual>(s.residual)) continue;
    if (level >= Recompute::block) s.again.push_back({What::output, i});
    s.again.push_back({What::gates, i});
  }
}

// Declares what each sublayer leaves, and what it needs meanwhile.
inline void declare(Sublayers& sublayers, ActivationList& list) {
  for (Sublayer& s : sublayers.list) {
    declare(s.norm, Recompute::norm, list);
    std::visit([&](auto& branch) { declare(branch, list); }, s.branch);
    // A layer is computed again from the stream after the last sublayer of the layer before.
    const bool ends_layer = &s == &sublayers.list.back() || (&s)[1].layer != s.layer;
    const Recompute dropped_from = ends_layer ? Recompute::above_all_levels : Recompute::block;
    if (s.dense) declare(*s.dense, std::get<AddResidual>(s.residual), list);
    else std::visit([&](auto& residual) { declare(residual, dropped_from, list); }, s.residual);
    if (s.cycle_end) declare(*s.cycle_end, list);
  }
  declare(sublayers.last_norm, Recompute::above_all_levels, list);
  declare(sublayers.head, list);
}

// ----------------------------------------------------------------------------
// Pointers

// Sets what the cycles of layers that repeat begin with: it is added to the embeddings, and after a cycle to the
// stream, or where that is a sum to the branch's output before it joins the stream.
inline void bind_cycle_starts(Sublayers& sublayers, const ModelShape& shape, const Params<floatX>& params,
                              const Params<float>& grads, const Activations& acts) {
  if (params.wse == nullptr) return;
  auto start_of = [&](int cycle) { return bind_cycle_start(cycle, shape.config.channels, params, grads, acts); };
  sublayers.first_cycle = start_of(0);
  sublayers.first_cycle->in = sublayers.first_cycle->out = acts.embedded;
  const int of_cycle = sublayers_of_cycle(shape.attention_plan);
  for (int i = of_cycle; i < sublayers.size(); i += of_cycle) {
    Sublayer& before = sublayers.list[size_t(i - 1)];
    CycleStart& start = before.next_cycle.emplace(start_of(i / of_cycle));
    if (const auto& end = before.cycle_end) start.in = end->in, start.out = end->out;
    else if (const auto* gru = std::get_if<GruResidual>(&before.residual)) start.in = start.out = gru->gates.out;
    else start.in = start.out = std::get<AddResidual>(before.residual).branch_out;
  }
}

// Sets the pointers of a sublayer's residual. `in`: the residual stream before. Returns the stream after.
inline const floatX* bind_residual(Sublayer& s, const LayerParams<floatX>& w, const LayerParams<float>& g,
                                   const floatX* in, const Activations& acts) {
  if (auto* gru = std::get_if<GruResidual>(&s.residual))
    gru->w = is_mlp(s) ? w.gru2 : w.gru1, gru->g = is_mlp(s) ? g.gru2 : g.gru1;
  return std::visit([&](auto& residual) { return bind_residual(residual, in, acts); }, s.residual);
}

// With `dense` in training: the gradients of the inputs (N, C) of all layers, and of the last norm. The first layer's
// is the embeddings'.
inline std::vector<floatX*> gradients_of_inputs(const Sublayers& sublayers, const ModelShape& shape,
                                                const Activations& acts) {
  std::vector<floatX*> gradients;
  for (const Sublayer& s : sublayers.list)
    if (s.dense && shape.training) gradients.push_back(s.dense->dout);
  if (!gradients.empty()) gradients.insert(gradients.begin(), acts.dresidual);
  return gradients;
}

// What the backward pass adds to from its first operation on: the gradient of the residual stream, those of learned
// shares of maps, and with `route`, by which any layer may be the last that uses a layer's K/V, those of K/V.
inline std::vector<ZeroedTensor> zeroed_tensors(const Sublayers& sublayers,
                                                const std::vector<AttentionBranch*>& attentions,
                                                const Binding& binding) {
  const ModelShape& shape = binding.shape;
  const size_t N = size_t(shape.rows);
  std::vector<ZeroedTensor> zeroed = {
      {sublayers.last_norm.dresidual, N * size_t(shape.config.channels) * sizeof(floatX)}};
  const auto* attention = attention_of(sublayers.list[0]);
  if (attention != nullptr && attention->mixed_maps && attention->mixed_maps->dmap_gates != nullptr)
    zeroed.push_back({attention->mixed_maps->dmap_gates, N * size_t(shape.config.num_layers) * sizeof(float)});
  if (!sublayers.places) return zeroed;
  const size_t accumulated = size_t(binding.plan().accumulator_heads * binding.head_size()) * sizeof(floatX);
  for (const AttentionBranch* b : attentions)
    if (floatX* accumulator = b->projection.accumulator; accumulator != nullptr)
      zeroed.push_back({accumulator, size_t(shape.key_rows()) * accumulated});
  return zeroed;
}

// Sets what the passes look up, when parameters and activations have their pointers. In generation `grads` has null
// pointers, and `cache` is not null.
inline void bind_sublayers(Sublayers& sublayers, const ModelShape& shape, const Params<floatX>& params,
                           const Params<float>& grads, const Activations& acts, const KVCache* cache) {
  const Binding binding = {shape, acts, cache, params, grads};
  std::vector<AttentionBranch*> attentions;
  const floatX* stream = acts.embedded;
  std::vector<const floatX*> outputs = {stream};  // of layers, for `dense`
  const std::vector<floatX*> dinputs = gradients_of_inputs(sublayers, shape, acts);
  std::set<int> complete;
  for (Sublayer& s : sublayers.list) {
    const LayerParams<floatX>& w = params.layers[size_t(s.weights)];
    const LayerParams<float>& g = grads.layers[size_t(s.weights)];
    s.bucket = w.bucket;
    // The first sublayer of the forward pass that uses a bucket is the last of the backward pass.
    if (complete.insert(s.bucket).second) s.completes.push_back(s.bucket);
    bind_norm(s.norm, is_mlp(s) ? w.ln2 : w.ln1, is_mlp(s) ? g.ln2 : g.ln1, s.bucket, stream, acts);
    std::visit([&](auto& branch) { bind_branch(branch, w, g, s.norm, binding); }, s.branch);
    if (auto* attention = std::get_if<AttentionBranch>(&s.branch)) attentions.push_back(attention);
    stream = bind_residual(s, w, g, stream, acts);
    if (s.cycle_end) stream = bind_cycle_end(*s.cycle_end, stream, shape, params, grads, acts);
    if (s.dense) {
      outputs.push_back(stream);
      stream = bind_dense(*s.dense, outputs, params, g.dense, dinputs);
    }
    if (!dinputs.empty()) s.norm.dresidual = std::get<AddResidual>(s.residual).dresidual = dinputs[size_t(s.layer)];
    // With two streams each norm adds to the gradient of the stream that it reads.
    if (const auto* r = std::get_if<ReversibleResidual>(&s.residual)) s.norm.dresidual = r->read_dx();
  }
  const HeadPlaces places = bind_heads(attentions, binding);
  if (binding.plan().table.route > 0 && shape.training) sublayers.places = places;
  bind_norm(sublayers.last_norm, params.lnf, grads.lnf, params.lnf_bucket, stream, acts);
  bind_head(sublayers.head, sublayers.last_norm.out, shape.config.channels, shape.logit_stride, params, grads, acts);
  if (!dinputs.empty()) {
    sublayers.last_norm.dresidual = dinputs.back();
    sublayers.dembedded = gradients_of_output(0, params, dinputs);
  }
  const Sublayer& last = sublayers.list.back();
  if (last.cycle_end) {
    sublayers.ponder = last.cycle_end->forward.ponder;
    if (shape.training) sublayers.last_norm.dresidual = last.cycle_end->backward.dout;  // every cycle's end reads it
  }
  bind_cycle_starts(sublayers, shape, params, grads, acts);
  sublayers.dropout = dropout_of(acts, shape, DropoutSite::embeddings, 0);
  if (const auto* r = std::get_if<ReversibleResidual>(&last.residual)) sublayers.streams = r->streams;
  sublayers.zeroed = zeroed_tensors(sublayers, attentions, binding);
}

// ----------------------------------------------------------------------------
// The passes

// With `route`: from the next pass on layers use the K/V that a draw says, or with null their own.
inline void route_heads(Sublayers& sublayers, const AttentionPlan& plan, const UpdateDraw* draw) {
  if (!sublayers.places) return;
  for (Sublayer& s : sublayers.list)
    if (auto* b = std::get_if<AttentionBranch>(&s.branch))
      use_kv_of(*b, draw ? drawn_source(plan.table.route, draw->seed, draw->update, b->layer) : b->layer,
                *sublayers.places, plan);
}

// Appends N + R of the first `count` rows of the last pass to `ponder`; nothing without `act`. Waits for the device.
inline void append_ponder(std::vector<float>& ponder, const Sublayers& sublayers, int64_t count) {
  if (sublayers.ponder == nullptr) return;
  const size_t before = ponder.size();
  ponder.resize(before + size_t(count));
  copy_to_host(ponder.data() + before, sublayers.ponder, size_t(count) * sizeof(float));
}

// acts.embedded = wte[tokens] + wpe[positions]; where wpe is null, without the latter, and where layers repeat, the
// first cycle's start has it; then dropout.
inline void embed(const Sublayers& sublayers, const Params<floatX>& params, const Activations& acts,
                  const Batch& batch) {
  const int64_t C = sublayers.last_norm.C;
  const floatX* wpe = sublayers.first_cycle ? nullptr : params.wpe;
  embedding_forward(acts.embedded, acts.tokens, batch.positions(), params.wte, wpe, batch.rows(), C);
  if (sublayers.first_cycle) cycle_start_forward(*sublayers.first_cycle, batch);
  if (batch.drops) drop_elements(acts.embedded, acts.embedded, sublayers.dropout, batch.B, batch.T, C);
  if (const auto& s = sublayers.streams) streams_begin(s->x1, s->x2, s->rounded, batch.rows() * C);
}

// The gradients of the embeddings +=, from acts.dresidual.
inline void embed_backward(const Sublayers& sublayers, const Params<float>& grads, const Activations& acts,
                           const Batch& batch) {
  const int64_t C = sublayers.last_norm.C;
  if (const auto& terms = sublayers.dembedded; !terms.empty())
    weighted_sum(acts.dresidual, terms, batch.rows() * C, /*accumulate=*/true);
  if (batch.drops) drop_elements(acts.dresidual, acts.dresidual, sublayers.dropout, batch.B, batch.T, C);
  if (sublayers.first_cycle) cycle_start_backward(*sublayers.first_cycle, batch);
  if (const auto& s = sublayers.streams) residual_sum(s->dx1, s->dx1, s->dx2, batch.rows() * C);
  float* dwpe = sublayers.first_cycle ? nullptr : grads.wpe;
  embedding_backward(grads.wte, dwpe, acts.dresidual, acts.tokens, batch.B, batch.T, C);
}

// Computes the residual stream after the sublayer, and the norm that follows.
inline void residual_and_norm_forward(const Sublayer& s, const Norm& next, const Batch& batch) {
  const auto* sum = std::get_if<AddResidual>(&s.residual);
  const bool is_fused = sum != nullptr && !s.cycle_end && !s.dense;
  if (is_fused && s.next_cycle) cycle_start_forward(*s.next_cycle, batch);
  if (is_fused) return residual_forward(*sum, next, batch);
  std::visit([&](const auto& residual) { residual_forward(residual, batch); }, s.residual);
  if (s.cycle_end) cycle_end_forward(*s.cycle_end, batch);
  if (s.next_cycle) cycle_start_forward(*s.next_cycle, batch);
  if (s.dense) dense_forward(*s.dense, batch);
  norm_forward(next, batch.rows());
}

// The backward pass of a sublayer without its norm. From the gradient of the stream after the sublayer: the branch's
// din (buffers::dnorm) = the gradient of the norm's output; the stream's gradient becomes that of the stream before,
// still without what comes through the norm, which norm_backward adds.
inline void sublayer_backward(const Sublayer& s, const Batch& batch) {
  if (s.dense) dense_backward(*s.dense, batch);
  if (s.next_cycle) cycle_start_backward(*s.next_cycle, batch);
  if (s.cycle_end) cycle_end_backward(*s.cycle_end, batch);
  const floatX* dbranch =
      std::visit([&](const auto& residual) { return residual_backward(residual, batch); }, s.residual);
  std::visit([&](const auto& branch) { branch_backward(branch, dbranch, batch); }, s.branch);
}

inline void compute_again(const Sublayers& sublayers, const Recomputation& r, const Batch& batch) {
  using What = Recomputation::What;
  const Sublayer& s = sublayers.list[size_t(r.sublayer)];
  switch (r.what) {
    case What::norm: norm_forward(s.norm, batch.rows()); break;
    case What::branch: std::visit([&](const auto& branch) { branch_again(branch, batch); }, s.branch); break;
    case What::residual: residual_and_norm_forward(s, sublayers.norm(r.sublayer + 1), batch); break;
    case What::activation: activation_again(std::get<MlpBranch>(s.branch), batch); break;
    case What::output:
      std::visit([&](const auto& branch) { project_out(branch, batch); }, s.branch);
      if (const auto* gru = std::get_if<GruResidual>(&s.residual)) branch_relu(*gru, batch);
      break;
    case What::input: dense_forward(*s.dense, batch); break;
    case What::gates: gates_forward(std::get<GruResidual>(s.residual), batch); break;
    case What::stream: round_stream(std::get<ReversibleResidual>(s.residual), batch); break;
    case What::taken_back: take_back(std::get<ReversibleResidual>(s.residual), batch); break;
  }
}
