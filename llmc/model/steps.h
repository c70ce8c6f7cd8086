// A model is a list of steps, two for each layer: a LayerNorm, a branch (attention or the MLP), and how the branch's
// output joins the residual stream. The forward pass walks the list, the backward pass walks it the other way, and the
// list of activations, the arithmetic and the GPU's model walk it too. Each kind of branch and of residual is a file
// with its activations, planning, passes and cost; parameters.h has the parameters.
#pragma once
#include <cstdint>
#include <set>
#include <variant>
#include <vector>
#include "add_residual.h"
#include "attention_branch.h"
#include "cycle_end.h"
#include "gru_residual.h"
#include "lsh_branch.h"
#include "mixed_attention_branch.h"
#include "mlp_branch.h"
#include "norm.h"
#include "reversible_residual.h"

using Branch = std::variant<AttentionBranch, MixedAttentionBranch, LshBranch, MlpBranch>;
using Residual = std::variant<AddResidual, GruResidual, ReversibleResidual>;

// What the backward pass computes again before a step, because a later step of the forward pass has overwritten it.
struct Recomputation {
  enum class What {
    norm,        // the step's LayerNorm
    branch,      // what of its branch other operations use; K/V has been kept
    residual,    // the residual stream after it, and the next LayerNorm
    gelu,        // of an MLP: GELU of the hidden units, which have been kept
    output,      // the branch's output, and with `gru` its relu, which the gate reads
    gates,       // with `gru`: r, z and g
    stream,      // with `reversible`: what the step's LayerNorm read of a stream
    taken_back,  // with `reversible`: the step's stream as it was before the step
  };
  What what;
  int step;
};

struct Step {
  int layer = 0;    // as layers run, from 0
  int weights = 0;  // index of the layer whose parameters it uses: those that files call h.<weights>
  int bucket = 0;   // the bucket of these parameters
  Norm norm;
  Branch branch;
  Residual residual;
  std::vector<CycleEnd> cycle_end;   // one or none
  std::vector<Recomputation> again;  // before the step's backward pass
  std::vector<int> completes;        // buckets whose gradients are complete after it
};

// A tensor that is zero when the backward pass begins.
struct ZeroedTensor {
  void* x;
  size_t bytes;
};

// The whole graph between the embeddings and the output head.
struct Steps {
  std::vector<Step> steps;
  Norm last_norm;                       // the LayerNorm whose output is the final hidden states
  std::vector<ZeroedTensor> zeroed;     // before the backward pass
  std::vector<CycleStart> first_cycle;  // of layers that repeat: one or none
  std::vector<Streams> streams;         // of reversible layers: one or none

  int size() const { return int(steps.size()); }
  // The LayerNorm before step i; i = size(): the one before the output head.
  Norm& norm(int i) { return i < size() ? steps[size_t(i)].norm : last_norm; }
  const Norm& norm(int i) const { return i < size() ? steps[size_t(i)].norm : last_norm; }
};

// ----------------------------------------------------------------------------
// Which steps there are

// The attention branch of a step; null for an MLP and for one that hashes.
inline AttentionBranch* attention_of(Step& step) {
  if (auto* mixed = std::get_if<MixedAttentionBranch>(&step.branch)) return mixed;
  return std::get_if<AttentionBranch>(&step.branch);
}
inline const AttentionBranch* attention_of(const Step& step) { return attention_of(const_cast<Step&>(step)); }

inline const AttentionBranch& attention_of_layer(const Steps& graph, int layer) {
  for (const Step& step : graph.steps)
    if (const AttentionBranch* branch = attention_of(step); branch != nullptr && step.layer == layer) return *branch;
  CHECK(!"a layer has attention");
  return *attention_of(graph.steps[0]);
}

// Adds a step of layer l, whose branch is set later.
inline Step& add_step(Steps& graph, const ModelConfig& c, const AttentionPlan& plan, int l, const char* norm,
                      const char* residual) {
  Step& step = graph.steps.emplace_back();
  step.layer = l, step.weights = l % plan.table.stored_layers;
  step.norm.name = norm;
  if (plan.table.gru) step.residual = GruResidual{residual, c.channels};
  else if (plan.table.reversible) step.residual.emplace<ReversibleResidual>().C = c.channels;
  else step.residual = AddResidual{residual, c.channels};
  return step;
}

inline int steps_of_cycle(const AttentionPlan& plan) { return 2 * plan.table.stored_layers; }

// The steps of a model, without pointers: enough for its arithmetic.
inline Steps make_steps(const ModelConfig& c, const AttentionPlan& plan) {
  Steps graph;
  for (int l = 0; l < c.num_layers; l++) {
    Step& attention = add_step(graph, c, plan, l, "ln1", "residual2");
    if (plan.table.lsh_buckets > 0) attention.branch.emplace<LshBranch>().layer = l;
    else if (plan.table.mix == WiringTable::Mix::none) attention.branch.emplace<AttentionBranch>().layer = l;
    else attention.branch.emplace<MixedAttentionBranch>().layer = l;
    add_step(graph, c, plan, l, "ln2", "residual3").branch.emplace<MlpBranch>().C = c.channels;
  }
  for (int i = steps_of_cycle(plan); plan.table.halting > 0 && i <= graph.size(); i += steps_of_cycle(plan)) {
    CycleEnd& end = graph.steps[size_t(i - 1)].cycle_end.emplace_back();
    end.cycle = i / steps_of_cycle(plan) - 1, end.cycles = graph.size() / steps_of_cycle(plan), end.C = c.channels;
  }
  for (Step& step : graph.steps)
    if (auto* r = std::get_if<ReversibleResidual>(&step.residual))
      r->adds_to_first = !std::holds_alternative<MlpBranch>(step.branch), r->is_last = &step == &graph.steps.back();
  graph.last_norm.name = "lnf";
  for (int i = 0; i <= graph.size(); i++) graph.norm(i).C = c.channels, graph.norm(i).eps = float(c.layer_norm_eps);
  return graph;
}

// What the backward pass of reversible layers computes again before each step: the stream that the next step has added
// to is taken back, and everything of the step is computed again. What the last layer's steps leave is still there, but
// for the streams' mean in place of what the last LayerNorm of a layer read, and the output of attention.
inline void plan_reversible_recomputation(Steps& graph) {
  using What = Recomputation::What;
  const int size = graph.size();
  graph.steps.back().again = {{What::stream, size - 1}};
  for (int i = size - 2; i >= 0; i--) {
    std::vector<Recomputation>& again = graph.steps[size_t(i)].again;
    again.push_back({What::taken_back, i + 1});
    if (i < size - 2) again.insert(again.end(), {{What::norm, i}, {What::branch, i}});
    if (i == size - 2 || std::holds_alternative<MlpBranch>(graph.steps[size_t(i)].branch))
      again.push_back({What::output, i});
  }
}

// What each step's backward pass finds overwritten. The last layer's tensors are still there, because no step of the
// forward pass comes after it.
inline void plan_recomputation(Steps& graph, Recompute level) {
  using What = Recomputation::What;
  if (std::holds_alternative<ReversibleResidual>(graph.steps[0].residual)) return plan_reversible_recomputation(graph);
  for (int i = 0; i + 2 < graph.size(); i += 2) {  // the steps of a layer: attention, MLP
    std::vector<Recomputation>& again = graph.steps[size_t(i + 1)].again;
    if (level >= Recompute::layernorm) again.push_back({What::norm, i});
    if (level >= Recompute::block) {
      again.push_back({What::branch, i});
      again.push_back({What::residual, i});
      again.push_back({What::branch, i + 1});
      continue;
    }
    if (level >= Recompute::layernorm) again.push_back({What::norm, i + 1});
    if (level >= Recompute::gelu) again.push_back({What::gelu, i + 1});
  }
  // Steps share the tensors of their gates, so that those of the last step alone have not been overwritten.
  for (int i = 0; i + 1 < graph.size() && level >= Recompute::gelu; i++) {
    Step& step = graph.steps[size_t(i)];
    if (!std::holds_alternative<GruResidual>(step.residual)) continue;
    if (level >= Recompute::block) step.again.push_back({What::output, i});
    step.again.push_back({What::gates, i});
  }
}

// ----------------------------------------------------------------------------
// Memory

template <class Declare>
void for_each_activation(Steps& graph, ActivationList<Declare>& list) {
  for (Step& step : graph.steps) {
    // The stream after a layer's last step is what the layer is computed again from.
    const bool ends_layer = &step == &graph.steps.back() || (&step)[1].layer != step.layer;
    for_each_activation(step.norm, Recompute::layernorm, list);
    std::visit([&](auto& branch) { for_each_activation(branch, list); }, step.branch);
    const Recompute dropped_from = ends_layer ? Recompute::above_all_levels : Recompute::block;
    std::visit([&](auto& residual) { for_each_activation(residual, dropped_from, list); }, step.residual);
    for (CycleEnd& end : step.cycle_end) for_each_activation(end, list);
  }
  for_each_activation(graph.last_norm, Recompute::above_all_levels, list);
}

// ----------------------------------------------------------------------------
// Pointers

inline void plan_norm(Norm& norm, const NormParams<floatX>& w, const NormParams<float>& g, int bucket, const floatX* in,
                      const Activations& acts) {
  norm.w = w, norm.g = g, norm.bucket = bucket, norm.in = in;
  norm.dresidual = acts.dresidual, norm.dout = acts.dnorm, norm.scratch = acts.layernorm_scratch;
}

// Plans what the cycles of layers that repeat begin with: it is added to the embeddings, and to the output of the
// branch before a cycle. A cycle's end has the next one's start itself.
inline void plan_cycle_starts(Steps& graph, const ModelShape& shape, const Params<floatX>& params,
                              const Params<float>& grads, const Activations& acts) {
  if (params.wse == nullptr) return;
  auto start_of = [&](int cycle) { return plan_cycle_start(cycle, shape.config.channels, params, grads, acts); };
  graph.first_cycle = {start_of(0)};
  graph.first_cycle[0].in = graph.first_cycle[0].out = acts.embedded;
  const int of_cycle = steps_of_cycle(shape.attention_plan);
  for (int i = of_cycle; i < graph.size(); i += of_cycle) {
    Step& before = graph.steps[size_t(i - 1)];
    if (!before.cycle_end.empty()) continue;
    std::visit([&](auto& r) { plan_next_cycle(r, start_of(i / of_cycle)); }, before.residual);
  }
}

// Plans the gradients of the two streams of reversible layers: each LayerNorm's is that of the stream that it read.
inline void plan_streams(Steps& graph, const Activations& acts) {
  for (Step& step : graph.steps)
    if (const auto* r = std::get_if<ReversibleResidual>(&step.residual)) step.norm.dresidual = r->read_dx();
  if (acts.streams[0] != nullptr) graph.streams = {streams_of(acts)};
}

// Sets what the passes look up, when parameters and activations have their pointers. In generation `grads` has no
// layers, and `cache` is not null.
inline void plan_steps(Steps& graph, const ModelShape& shape, const Params<floatX>& params, const Params<float>& grads,
                       const Activations& acts, const KVCache* cache) {
  Planner planner = {shape, acts, cache, {}};
  for (const Step& step : graph.steps)
    if (const AttentionBranch* branch = attention_of(step)) planner.attention_acts.push_back(&branch->acts);
  const LayerParams<float> none;
  const floatX* stream = acts.embedded;
  std::set<int> complete;
  for (Step& step : graph.steps) {
    const LayerParams<floatX>& w = params.layers[size_t(step.weights)];
    const LayerParams<float>& g = grads.layers.empty() ? none : grads.layers[size_t(step.weights)];
    step.bucket = w.bucket;
    // The first step of the forward pass that uses a bucket is the last of the backward pass.
    if (complete.insert(step.bucket).second) step.completes.push_back(step.bucket);
    std::visit(
        [&](auto& branch) {
          plan_norm(step.norm, norm_params(branch, w), norm_params(branch, g), step.bucket, stream, acts);
          plan_branch(branch, w, g, step.norm, planner);
        },
        step.branch);
    std::visit(
        [&](auto& residual, const auto& branch) {
          stream = plan_residual(residual, gru_params(branch, w), gru_params(branch, g), stream, acts);
        },
        step.residual, step.branch);
    for (CycleEnd& end : step.cycle_end) stream = plan_cycle_end(end, stream, shape, params, grads, acts);
  }
  plan_norm(graph.last_norm, params.lnf, grads.lnf, params.lnf_bucket, stream, acts);
  if (acts.dhalted != nullptr) graph.last_norm.dresidual = acts.dhalted;  // which every cycle's end reads
  plan_cycle_starts(graph, shape, params, grads, acts);
  plan_streams(graph, acts);
  const size_t N = size_t(shape.rows);
  graph.zeroed = {{graph.last_norm.dresidual, N * size_t(shape.config.channels) * sizeof(floatX)}};
  if (acts.dmap_gates != nullptr)
    graph.zeroed.push_back({acts.dmap_gates, N * size_t(shape.config.num_layers) * sizeof(float)});
}

// ----------------------------------------------------------------------------
// The passes

// acts.embedded = wte[tokens] + wpe[positions]; where wpe is null, without the latter, and where layers repeat, the
// first cycle's start has it.
inline void embed(const Steps& graph, const Params<floatX>& params, const Activations& acts, const Batch& batch) {
  const floatX* wpe = graph.first_cycle.empty() ? params.wpe : nullptr;
  embedding_forward(acts.embedded, acts.tokens, batch.positions(), params.wte, wpe, batch.rows(), graph.last_norm.C);
  for (const CycleStart& start : graph.first_cycle) cycle_start_forward(start, batch);
  for (const Streams& s : graph.streams) streams_begin(s.x1, s.x2, s.rounded, batch.rows() * graph.last_norm.C);
}

// The gradients of the embeddings +=, from acts.dresidual.
inline void embed_backward(const Steps& graph, const Params<float>& grads, const Activations& acts,
                           const Batch& batch) {
  for (const CycleStart& start : graph.first_cycle) cycle_start_backward(start, batch);
  for (const Streams& s : graph.streams) residual_sum(s.dx1, s.dx1, s.dx2, batch.rows() * graph.last_norm.C);
  float* dwpe = graph.first_cycle.empty() ? grads.wpe : nullptr;
  embedding_backward(grads.wte, dwpe, acts.dresidual, acts.tokens, batch.B, batch.T, graph.last_norm.C);
}

inline void branch_forward(const Step& step, const Batch& batch) {
  std::visit([&](const auto& branch) { branch_forward(branch, batch); }, step.branch);
}

// Computes the residual stream after the step, and the LayerNorm that follows.
inline void residual_forward(const Step& step, const Norm& next, const Batch& batch) {
  if (step.cycle_end.empty())
    return std::visit([&](const auto& residual) { residual_forward(residual, next, batch); }, step.residual);
  std::visit([&](const auto& residual) { residual_forward(residual, batch); }, step.residual);
  for (const CycleEnd& end : step.cycle_end) cycle_end_forward(end, batch);
  norm_forward(next, batch.rows());
}

// The backward pass of a step without its LayerNorm. From the gradient of the residual stream after the step: that of
// the stream before it, without the part that comes through the LayerNorm, and dnorm, that of the LayerNorm's output.
inline void step_backward(const Step& step, const Batch& batch) {
  for (const CycleEnd& end : step.cycle_end) cycle_end_backward(end, batch);
  const floatX* dbranch =
      std::visit([&](const auto& residual) { return residual_backward(residual, batch); }, step.residual);
  std::visit([&](const auto& branch) { branch_backward(branch, dbranch, batch); }, step.branch);
}

inline void compute_again(const Steps& graph, const Recomputation& r, const Batch& batch) {
  using What = Recomputation::What;
  const Step& step = graph.steps[size_t(r.step)];
  switch (r.what) {
    case What::norm: norm_forward(step.norm, batch.rows()); break;
    case What::branch: std::visit([&](const auto& branch) { branch_again(branch, batch); }, step.branch); break;
    case What::residual: residual_forward(step, graph.norm(r.step + 1), batch); break;
    case What::gelu: gelu_again(std::get<MlpBranch>(step.branch), batch); break;
    case What::output:
      std::visit([&](const auto& branch) { project_out(branch, batch); }, step.branch);
      if (const auto* gru = std::get_if<GruResidual>(&step.residual)) branch_relu(*gru, batch);
      break;
    case What::gates: gates_forward(std::get<GruResidual>(step.residual), batch); break;
    case What::stream: round_stream(std::get<ReversibleResidual>(step.residual), batch); break;
    case What::taken_back: take_back(std::get<ReversibleResidual>(step.residual), batch); break;
  }
}
