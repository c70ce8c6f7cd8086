// The stage of generation: k and v of the new tokens, which lie beside their q, go to their rows of the K/V cache,
// where attention finds the whole sequence's.
#pragma once
#include <vector>
#include "head_stage.h"

struct StoreKV : HeadStage {
  floatX* cache = nullptr;  // (slots, capacity, width): k | v of the layer's heads
  int64_t capacity = 0, width = 0;
  std::vector<RowCopy> copies;  // of the new rows

  static bool is_in(const AttentionPlan& plan, int l, bool is_generation) {
    return is_generation && !(plan.projected[Qkv::k][l].empty() && plan.projected[Qkv::v][l].empty());
  }
  floatX* row(int slot, int64_t i) const { return cache + (slot * capacity + i) * width; }
};

inline void declare(StoreKV& store, ActivationList& list) {
  const ModelShape& shape = list.shape;
  store.capacity = shape.generation->capacity(store.layer);
  store.width = shape.kv_width(store.layer);
  list.add(MemoryGroup::kv_cache, "kv", store.cache, {shape.generation->slots, store.capacity, store.width});
}

inline void bind_stage(StoreKV& store, const StageOfLayers<StoreKV>&, const HeadPlaces& in, HeadPlaces& out,
                       const Binding& binding) {
  const KVCachePlan& plan = *binding.shape.generation;
  const int* rows = binding.acts.cache_rows + plan.group_of_layer[store.layer];
  for (Qkv which : {Qkv::k, Qkv::v})
    for (int i : binding.plan().projected[which][store.layer]) {
      const ProjectedHead h = {store.layer, i};
      const HeadPlace from = in(which, h).x, to = kv_place(binding, which, h, store.cache);
      add_copy(store.copies,
               {to.x, to.stride, from.x, from.stride, binding.head_size(), rows, int64_t(plan.groups.size())});
      out(which, h).x = to, out(which, h).slot_stride = store.capacity * store.width;
    }
}

inline void stage_forward(const StoreKV& store, const Batch& batch, bool) {
  for (const RowCopy& copy : store.copies) copy_rows(copy, batch.rows());
}
