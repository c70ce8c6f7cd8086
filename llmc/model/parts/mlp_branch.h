// The MLP: a linear layer to F products, an activation, which makes H hidden units of them, a linear layer back
// (llmc/ops/activation.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/model/activation_list.h"
#include "llmc/operations.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/precision.h"
#include "llmc/model/batch.h"
#include "norm.h"
#include "llmc/model/parameters.h"
#include "llmc/model/binding.h"

struct MlpBranch {
  Activation activation = Activation::gelu;  // f
  int layer = 0;                             // counted from 0 in the order in which layers run
  Dropout dropout;                           // of out
  MlpParams<floatX> w;
  MlpParams<float> g;
  int64_t C = 0, H = 0, F = 0;
  int64_t chunk_rows = 0;                     // how many rows have hidden units at a time
  bool in_chunks = false;                     // fewer than all: the backward pass computes them again, chunk by chunk
  const floatX* in = nullptr;                 // (N, C)
  floatX *fch = nullptr, *fch_act = nullptr;  // (chunk_rows, F), (chunk_rows, H): before and after f
  floatX* out = nullptr;                      // (N, C)
  floatX *din = nullptr, *dfch = nullptr;     // (N, C), (chunk_rows, F)
};

inline MlpBranch make_mlp(const ModelConfig& c, const WiringTable& table, int l) {
  MlpBranch b;
  b.layer = l;
  b.activation = table.activation;
  b.C = c.channels, b.H = table.hidden_size(c.channels), b.F = table.fc_size(c.channels);
  return b;
}

inline void declare(MlpBranch& b, ActivationList& list) {
  const int64_t rows = list.shape.hidden_rows();
  list.of_sublayer(Recompute::block, "fch", b.fch, {rows, b.F});
  list.of_sublayer(Recompute::activation, "fch_act", b.fch_act, {rows, b.H});
  list.in_buffer(buffers::branch_out, b.out, {list.shape.rows, b.C});
  if (!list.shape.training) return;
  list.in_buffer(buffers::dnorm, b.din, {list.shape.rows, b.C});
  list.in_buffer(buffers::dhidden, b.dfch, {rows, b.F});
}

inline void bind_branch(MlpBranch& b, const LayerParams<floatX>& w, const LayerParams<float>& g, const Norm& norm,
                        const Binding& binding) {
  b.w = w.mlp, b.g = g.mlp, b.in = norm.out;
  b.dropout = dropout_of(binding.acts, binding.shape, DropoutSite::mlp_output, b.layer);
  b.chunk_rows = binding.shape.hidden_rows(), b.in_chunks = b.chunk_rows < binding.shape.rows;
}

// Some of the rows, from the first one on.
struct RowRange {
  int64_t first, count;
};

// Calls operation(rows) for one chunk of N rows after the other.
template <class Operation>
void for_each_chunk(const MlpBranch& b, int64_t N, Operation operation) {
  for (int64_t first = 0; first < N; first += b.chunk_rows)
    operation(RowRange{first, std::min(b.chunk_rows, N - first)});
}

// fch (rows, F) = in (rows, C) fcw^T + fcb; fch_act (rows, H) = f(fch).
inline void hidden_forward(const MlpBranch& b, const RowRange& rows) {
  matmul_activation_forward(b.activation, b.fch_act, b.fch, b.in + rows.first * b.C, b.w.fcw, b.w.fcb, rows.count, b.C,
                            b.H);
}

// out (rows, C) = fch_act (rows, H) projw^T + projb.
inline void hidden_project(const MlpBranch& b, const RowRange& rows) {
  matmul_forward(b.out + rows.first * b.C, b.fch_act, b.w.projw, b.w.projb, rows.count, b.H, b.C);
}

// Computes the hidden units, fch (N, F) and fch_act (N, H), again in the backward pass; where they come in chunks,
// branch_backward does so itself.
inline void branch_again(const MlpBranch& b, const Batch& batch) {
  if (!b.in_chunks) hidden_forward(b, {0, batch.rows()});
}

// fch_act (N, H) = f(fch), again in the backward pass.
inline void activation_again(const MlpBranch& b, const Batch& batch) {
  activation_forward(b.activation, b.fch_act, b.fch, batch.rows(), b.H);
}

// out (N, C) = f(in (N, C) fcw^T + fcb) projw^T + projb; also fch, fch_act =, for all rows or for the last chunk.
inline void branch_forward(const MlpBranch& b, const Batch& batch) {
  for_each_chunk(b, batch.rows(), [&](const RowRange& rows) {
    hidden_forward(b, rows);
    hidden_project(b, rows);
  });
  if (batch.drops) drop_elements(b.out, b.out, b.dropout, batch.B, batch.T, b.C);
}

// out (N, C), again in the backward pass, of hidden units that are there unless they come in chunks.
inline void project_out(const MlpBranch& b, const Batch& batch) {
  if (b.in_chunks) return branch_forward(b, batch);
  hidden_project(b, {0, batch.rows()});
  if (batch.drops) drop_elements(b.out, b.out, b.dropout, batch.B, batch.T, b.C);
}

// From dout (N, C), the gradient of out: din (N, C) =, dfch (N, F) =, for all rows or for the last chunk, and g +=.
inline void branch_backward(const MlpBranch& b, const floatX* dout, const Batch& batch) {
  const int64_t C = b.C, H = b.H;
  if (batch.drops) drop_elements(b.out, dout, b.dropout, batch.B, batch.T, C), dout = b.out;
  for_each_chunk(b, batch.rows(), [&](const RowRange& rows) {
    const int64_t first = rows.first * C;
    if (b.in_chunks) hidden_forward(b, rows);
    matmul_activation_backward(b.activation, b.dfch, b.g.projw, b.g.projb, dout + first, b.fch_act, b.fch, b.w.projw,
                               rows.count, H, C);
    matmul_backward(b.din + first, b.g.fcw, b.g.fcb, b.dfch, b.in + first, b.w.fcw, rows.count, C, b.F);
  });
}

// Elements of the weights that a token is multiplied with.
inline double matmul_elements(const MlpBranch& b) { return double(b.F + b.H) * double(b.C); }
