// Whether a term changes the sources of keys, of values or of both: a last argument, k or v, limits it to one of them.
#pragma once
#include "term.h"

struct KVPart {
  bool k = true, v = true;

  // Argument i, which may be left out.
  void read(const TermReader& a, int i) {
    if (a.count() <= i) return;
    k = a[i] == "k", v = a[i] == "v";
    if (!k && !v) a.error(a[i] + " is neither k (keys alone) nor v (values alone)");
  }
  std::string text() const { return k && v ? "" : k ? ",k" : ",v"; }
  bool is_one() const { return k != v; }
  void move(std::vector<KVSource>& sources, int layer) const {
    for (KVSource& source : sources) source = {k ? layer : source.k, v ? layer : source.v};
    std::sort(sources.begin(), sources.end());
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  }
};
