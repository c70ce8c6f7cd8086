// The path of a layer's heads from the projection to attention: the list of all stages, in the order in which heads
// pass them. A layer has some of them, and gradients come back through the list. Plain GPT-2 has none in training, and
// in generation StoreKV alone.
#pragma once
#include <optional>
#include <tuple>
#include <utility>
#include <vector>
#include "depth_values.h"
#include "head_rotation.h"
#include "kv_router.h"
#include "store_kv.h"
#include "value_residual.h"

template <class... Stage>
using StageList = std::tuple<std::optional<Stage>...>;
using HeadStages = StageList<HeadRotation, ValueResidual, KVRouter, DepthValues, StoreKV>;

// A layer's stage of this kind; null if it has none.
template <class Stage>
const Stage* find_stage(const HeadStages& stages) {
  const std::optional<Stage>& stage = std::get<std::optional<Stage>>(stages);
  return stage ? &*stage : nullptr;
}

// Calls f(stage) of each stage that there is, first to last.
template <class Stages, class F>
void for_each_stage(Stages& stages, F f) {
  std::apply([&](auto&... stage) { (..., (stage ? f(*stage) : void())); }, stages);
}

inline HeadStages make_stages(const AttentionPlan& plan, int l, bool is_generation) {
  HeadStages stages;
  auto make = [&](auto& stage) {
    using Stage = typename std::decay_t<decltype(stage)>::value_type;
    if (Stage::is_in(plan, l, is_generation)) stage.emplace().layer = l;
  };
  std::apply([&](auto&... stage) { (..., make(stage)); }, stages);
  return stages;
}

// Whether a stage of another layer reads what layer l projected.
template <class... Stage>
bool is_read_by_stages(const StageList<Stage...>&, const AttentionPlan& plan, int l) {
  return (... || Stage::reads_other_layers(plan, l));
}

inline void declare(HeadStages& stages, ActivationList& list) {
  for_each_stage(stages, [&](auto& stage) { declare(stage, list); });
}

// Binds the stages of all layers, one kind after the other. `places`: those that the projections left, which become
// those that attention asks for.
template <class... Stage>
void bind_stages(const std::vector<StageList<Stage...>*>& layers, HeadPlaces& places, const Binding& binding) {
  auto bind = [&](const auto& of_layers) {
    const HeadPlaces in = places;
    for (auto* stage : of_layers)
      if (stage != nullptr) bind_stage(*stage, of_layers, in, places, binding);
  };
  auto of_layers = [&](auto of_kind) {
    using Kind = typename decltype(of_kind)::value_type;
    StageOfLayers<Kind> found;
    for (StageList<Stage...>* stages : layers) {
      std::optional<Kind>& stage = std::get<std::optional<Kind>>(*stages);
      found.push_back(stage ? &*stage : nullptr);
    }
    return found;
  };
  (..., bind(of_layers(std::optional<Stage>())));
}

inline void stages_forward(const HeadStages& stages, const Batch& batch, bool again) {
  for_each_stage(stages, [&](const auto& stage) { stage_forward(stage, batch, again); });
}

template <size_t... I>
void stages_backward(const HeadStages& stages, const Batch& batch, std::index_sequence<I...>) {
  constexpr size_t training_stages = sizeof...(I);
  auto back = [&](const auto& stage) {
    if (stage) stage_backward(*stage, batch);
  };
  (..., back(std::get<training_stages - 1 - I>(stages)));
}

// Turns the gradients of the heads that attention found into gradients of the projected heads. The last stage is of
// generation, which has no backward pass.
inline void stages_backward(const HeadStages& stages, const Batch& batch) {
  stages_backward(stages, batch, std::make_index_sequence<std::tuple_size_v<HeadStages> - 1>());
}
