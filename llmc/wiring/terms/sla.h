// "Skip-Layer Attention: Bridging Abstract and Detailed Dependencies in Transformers": head i of layer l attends to the
// K/V of head i of layer l - distance if l >= distance and it is one of the last `heads`, or a <= i < b for a range
// a:b. Other heads stay as they were, so several such terms make several distances. With k or v only the keys or the
// values are of the other layer (values alone: SkipV1Former, FusedKV).
#pragma once
#include "kv_part.h"
#include "source_below.h"

struct SlaTerm : SourceBelow {
  static constexpr TermSyntax syntax = {"sla(distance, heads[, k|v])",
                                        "sla(9, 9) or sla(9, 3:12) or sla(9, 9, k) or sla(9, 9, v)", 2, 3};
  static constexpr const char* help = "the last heads, or heads a:b, use K/V, k or v of the layer that far below";
  static constexpr TermFeatures features = {sources};
  KVPart part;

  void read(const TermReader& a) { SourceBelow::read(a), part.read(a, 2); }
  std::string arguments() const { return SourceBelow::arguments() + part.text(); }
  bool moves_one_part() const { return part.is_one(); }
  void apply(WiringTable& t) const {
    for_each_head(t, [this](std::vector<KVSource>& sources, int layer) { part.move(sources, layer); });
  }
};
