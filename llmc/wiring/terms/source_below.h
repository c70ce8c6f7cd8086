// What `sla` and `also` have in common: some heads, and the layer so far below theirs.
#pragma once
#include "term.h"

struct SourceBelow : Term {
  static constexpr bool may_be_repeated = true;
  int distance = 1;
  int last_heads = 0;                // how many heads, the last ones; 0 if it is a range:
  int first_head = 0, end_head = 0;  //   first_head and after the last one

  void read(const TermReader& a) {
    distance = a.whole(a[0], 1);
    const std::string& heads = a[1];
    const size_t colon = heads.find(':');
    if (colon == std::string::npos) {
      last_heads = a.whole(heads, 1);
      return;
    }
    first_head = a.whole(heads.substr(0, colon), 0), end_head = a.whole(heads.substr(colon + 1), 1);
    if (first_head >= end_head)
      a.error(format("%d:%d holds no head; a range begins with its first head and ends before its second number",
                     first_head, end_head));
  }
  std::string arguments() const {
    return last_heads > 0 ? format("%d,%d", distance, last_heads) : format("%d,%d:%d", distance, first_head, end_head);
  }
  std::string misfit(int L, int h) const {
    if (L == 1) return "a model of 1 layer has no other layer's K/V; plain is what it can be";
    if (distance > L - 1) return format("of %d layers the source can lie 1 to %d layers below", L, L - 1);
    if (last_heads > h) return format("the model has %d heads; it can be 1 to %d of them", h, h);
    if (end_head > h) return format("the model has %d heads; a range can end at %d", h, h);
    return "";
  }

 protected:
  // Calls visit(sources, layer) for the heads that are meant, with the layer below.
  template <class Visit>
  void for_each_head(WiringTable& t, Visit visit) const {
    const int first = last_heads > 0 ? t.num_heads - last_heads : first_head;
    const int end = last_heads > 0 ? t.num_heads : end_head;
    for (int l = distance; l < t.num_layers; l++)
      for (int i = first; i < end; i++) visit(t.sources(l, i), l - distance);
  }
};
