// What a stage is: an operation on the heads of a layer between the projection and attention. A stage has a file of its
// own and a place in the list of head_stages.h. It derives from HeadStage and supplies:
//
//   Stage::is_in(plan, l, is_generation)   whether layer l has it
//   declare(stage, list)                   its tensors
//   bind_stage(stage, layers, in, out, binding)
//                                          pointers. `in` has the places that the stage before left; in `out`, a copy,
//                                          it sets the places of heads of its layer that it puts elsewhere. `layers`
//                                          has this stage of all layers, null where a layer has none
//   stage_forward(stage, batch, again)     `again`: in the backward pass, which computes again what has not been kept
//   stage_backward(stage, batch)           gradients at the places in `out` become gradients at the places in `in`
#pragma once
#include <vector>
#include "head_places.h"

struct HeadStage {
  int layer = 0;  // counted from 0 in the order in which layers run

  // What most stages are, and others hide. Whether stages of other layers read what layer l projected, so that it may
  // not be overwritten before they have run:
  static bool reads_other_layers(const AttentionPlan&, int) { return false; }
  // Elements of the weights that a token's k or v are multiplied with, and FLOPs of a sequence of T, forward and
  // backward, beside them.
  double matmul_elements(const ModelConfig&, const AttentionPlan&) const { return 0; }
  double flops(const ModelConfig&, const AttentionPlan&, int64_t) const { return 0; }
};

template <class Stage>
using StageOfLayers = std::vector<Stage*>;
