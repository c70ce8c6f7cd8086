// Masks in the words of the Sparse Transformer (Child et al. 2019), to compare llmc/ops/attention_mask.h with.
#pragma once
#include <cstdint>
#include <ostream>
#include "llmc/ops/attention_mask.h"

enum class MaskPattern : int {
  all,
  stride,            // (t - j) % s == 0
  local_or_stride,   // t - j <= s, or stride
  block,             // j / s == t / s
  block_and_before,  // block, or one of the c keys before it
  column,            // j % s >= s - c
  block_or_column
};

struct MaskTerm {
  MaskPattern pattern = MaskPattern::all;
  int s = 1, c = 0;
};

// What a window and one or two patterns all show.
struct MaskCase {
  int window = 0;  // 0: none
  MaskPattern pattern = MaskPattern::all;
  int s = 1, c = 0;
  MaskTerm second = {};
};

inline std::ostream& operator<<(std::ostream& out, const MaskCase& m) {
  return out << "window " << m.window << ", pattern " << int(m.pattern) << ", s " << m.s << ", c " << m.c
             << ", and pattern " << int(m.second.pattern) << ", s " << m.second.s << ", c " << m.second.c;
}

// Whether the query at t sees the key at j <= t.
inline bool sees(const MaskTerm& m, int64_t t, int64_t j) {
  const bool local = t - j <= m.s, stride = (t - j) % m.s == 0, block = j / m.s == t / m.s,
             column = j % m.s >= m.s - m.c;
  switch (m.pattern) {
    case MaskPattern::all: return true;
    case MaskPattern::stride: return stride;
    case MaskPattern::local_or_stride: return local || stride;
    case MaskPattern::block: return block;
    case MaskPattern::block_and_before: return j >= t / m.s * m.s - m.c;
    case MaskPattern::column: return column;
    case MaskPattern::block_or_column: return block || column;
  }
  return false;
}
inline bool sees(const MaskCase& m, int64_t t, int64_t j) {
  const bool near = m.window == 0 || t - j < m.window;
  return near && sees(MaskTerm{m.pattern, m.s, m.c}, t, j) && sees(m.second, t, j);
}

inline AttentionMask attention_mask(const MaskCase& m) {
  AttentionMask mask;
  if (m.window > 0) mask.window = m.window;
  for (const MaskTerm& term : {MaskTerm{m.pattern, m.s, m.c}, m.second}) {
    auto is_one_of = [&](MaskPattern a, MaskPattern b) { return term.pattern == a || term.pattern == b; };
    MaskClause clause;
    clause.s = term.s;
    if (term.pattern == MaskPattern::local_or_stride) clause.last = term.s + 1;
    clause.residue = is_one_of(MaskPattern::stride, MaskPattern::local_or_stride);
    clause.block = is_one_of(MaskPattern::block, MaskPattern::block_or_column);
    if (term.pattern == MaskPattern::block_and_before) clause.block = true, clause.before = term.c;
    if (is_one_of(MaskPattern::column, MaskPattern::block_or_column)) clause.columns = term.c;
    if (term.pattern != MaskPattern::all) mask.add(clause);
  }
  return mask;
}
