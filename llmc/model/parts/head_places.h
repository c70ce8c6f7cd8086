// Where the heads of q, k and v are. The projection puts them into tensors; between it and attention they pass stages
// (head_stages.h), and each stage may put them elsewhere; attention asks for the places that the last stage left.
// Gradients go the other way, so that each place has one for the gradient beside it.
#pragma once
#include <cstdint>
#include <vector>
#include "llmc/model/binding.h"
#include "llmc/ops/rows.h"

// A head, or its gradient: the first element of its first row, and how far rows are apart.
struct HeadPlace {
  floatX* x = nullptr;
  int64_t stride = 0;
};

// In generation there are no gradients, and x has the rows of the new tokens; but after the K/V cache k and v have
// the rows of the sequence in slot 0, and slot_stride elements on the next sequence's.
struct PlacedHead {
  HeadPlace x;
  int64_t slot_stride = 0;
  HeadPlace dx;            // what the layer that projected the head adds to
  HeadPlace dx_of_others;  // what other layers add to: the accumulator of a shared head

  HeadPlace in_slot(int slot) const { return {x.x + slot * slot_stride, x.stride}; }
};

// The places of all heads of all layers.
class HeadPlaces {
 public:
  explicit HeadPlaces(const AttentionPlan& plan)
      : num_heads_(plan.num_heads), num_layers_(plan.num_layers),
        heads_(size_t(std::size(all_qkv)) * size_t(plan.num_layers * plan.num_heads)) {}

  PlacedHead& operator()(Qkv which, const ProjectedHead& h) { return heads_[index(which, h)]; }
  const PlacedHead& operator()(Qkv which, const ProjectedHead& h) const { return heads_[index(which, h)]; }
  // Where an operation of layer l writes the gradient of a head.
  HeadPlace gradient(int l, Qkv which, const ProjectedHead& h) const {
    const PlacedHead& head = (*this)(which, h);
    return h.layer == l ? head.dx : head.dx_of_others;
  }

 private:
  int num_heads_, num_layers_;
  std::vector<PlacedHead> heads_;

  size_t index(Qkv which, const ProjectedHead& h) const {
    return size_t((int(which) * num_layers_ + h.layer) * num_heads_ + h.head);
  }
};

// The column of a projected head in a tensor of its layer: q | k | v, or k | v.
inline int64_t qkv_column(const Binding& binding, Qkv which, const ProjectedHead& h) {
  return binding.plan().projected_index(which, h) * binding.head_size();
}
inline int64_t kv_column(const Binding& binding, Qkv which, const ProjectedHead& h) {
  return qkv_column(binding, which, h) - binding.shape.width(Qkv::q, h.layer);
}
// The place of a projected head in a tensor k | v of its layer.
inline HeadPlace kv_place(const Binding& binding, Qkv which, const ProjectedHead& h, floatX* kv) {
  return {kv + kv_column(binding, which, h), binding.shape.kv_width(h.layer)};
}

// Adds a copy to a list: heads that are neighbours in both of their tensors are one copy.
inline void add_copy(std::vector<RowCopy>& copies, const RowCopy& copy) {
  RowCopy* last = copies.empty() ? nullptr : &copies.back();
  const bool has_source = copy.src != nullptr;
  const bool continues = last != nullptr && (last->src != nullptr) == has_source &&
                         copy.dst == last->dst + last->width && copy.dst_stride == last->dst_stride &&
                         (!has_source || (copy.src == last->src + last->width && copy.src_stride == last->src_stride));
  if (continues) last->width += copy.width;
  else copies.push_back(copy);
}
