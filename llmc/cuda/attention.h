// Attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): a block keeps a tile of rows and loops
// over tiles of columns. One launch serves all heads of a layer, those with K/V from another layer too: each reads k
// and v where they were projected.
//
//   forward    s = q k^T / sqrt(HS), of the keys that the query sees;
//              lse = log sum exp(s);  p = exp(s - lse);  out = p v
//   backward   delta = rowsum(dout * out);  dp = dout v^T;  ds = p (dp - delta)
//              dq = ds k / sqrt(HS);  dk = ds^T q / sqrt(HS);  dv = p^T dout
//
//   with relative positions, where r_d is the row of r for the distance d of a query and a key:
//              s = (q k^T + q' r_d^T) / sqrt(HS)
//              dq' = the sum over keys of ds r_d / sqrt(HS);  dr_d = the sum over pairs d apart of ds q' / sqrt(HS)
//
//   with dropout, where m is 1 / (1 - p) for the pairs that it keeps and 0 for others (llmc/ops/dropout.h):
//              out = (m p) v;  ds = p (m dp - delta);  dv = (m p)^T dout
//
//   with a sink z, a score without a value:
//              lse = log (exp(z) + sum exp(s));  dz = - the sum over queries of exp(z - lse) delta
//
//   attention_forward:  out =, lse =, topk_score =, topk_last =
//   attention_backward: delta =, dq = or +=, dk and dv of each K/V head = or +=, relative.dq =, relative.dr =
//
// A query sees the keys up to its own. That and one K/V head for each query head is plain attention (GPT-2, skip-layer
// attention); the general one has masks, slopes, several K/V heads for a query head, v in rows of another stride, topk,
// in the forward pass sinks and exact outputs, and in the backward pass keys before the first query; relative positions
// are general, too, but have no topk. Both can be kept within documents. General attention without topk can have
// dropout. Each kernel is a template with the parameter `Kind`, so that plain attention pays nothing for the others. In
// general, tiles that a mask hides are neither loaded nor multiplied (attention_tiles.h), and a kernel before the
// forward one finds the topk keys of each query (attention_topk.h). A few queries after a K/V cache have kernels of
// their own, for all of it but topk, in every precision (attention_decode.h).
//
// Shapes: llmc/ops/attention_args.h. Strides and HS are multiples of 8 elements, pointers of 16 bytes, and HS is at
// most 128.
//
// In bf16 and fp16 tensor cores multiply: attention_launch.h chooses between mma and wgmma by GPU, head size and
// length; in fp32 it is FMAs. The same kernels give the same bits.
#pragma once
#include <climits>
#include "llmc/ops/attention_args.h"
#include "llmc/ops/rows.h"
#include "llmc/base/error.h"
#include "attention_decode.h"
#include "vec.h"
#ifdef PRECISION_FP32
#include "attention_fma.h"
#else
#include "attention_launch.h"
#endif

// Blocks own tiles of keys and loop over query heads: nothing is left to be summed. The scratch is for dS, of all query
// heads, where it goes through memory.
#ifdef PRECISION_FP32
inline bool needs_scratch(int64_t) { return false; }
inline int64_t attention_backward_scratch(int64_t, int64_t, int64_t, int64_t) { return 0; }
#else
inline bool needs_scratch(int64_t) { return gpu().attention_by == AttentionBy::candidates_ds; }
inline int64_t attention_backward_scratch(int64_t B, int64_t T, int64_t HS, int64_t query_heads) {
  if (query_heads == 0 || !uses_ds(T, HS)) return 0;
  return DsMatrices::sequences(B, T, query_heads) * DsMatrices::elements_of_sequence(T, query_heads) *
         int64_t(sizeof(floatX)) / int64_t(sizeof(float));
}
#endif

// The term of a wiring that has no kernels on this GPU, or null: a T4's blocks have too little shared memory for some
// kernels of fp16.
inline const char* without_kernels(bool has_topk, bool has_lsh, bool is_relative, int64_t HS) {
  if (!is_fp16 || gpu().shared_bytes > Gpu::least_shared_bytes) return nullptr;
  return has_topk                 ? "topk"
         : has_lsh                ? "lsh"
         : is_relative && HS > 64 ? "relative with heads of more than 64 channels"
                                  : nullptr;
}

inline void check_kv_head(const KVHead& kv_head) {
  CHECK(kv_head.k_stride % 8 == 0 && kv_head.v_stride % 8 == 0 && kv_head.dk_stride % 8 == 0 &&
        kv_head.dv_stride % 8 == 0);
}

inline void check_attention(const AttentionArgs& a) {
  CHECK(0 < a.HS && a.HS <= largest_head_size && a.HS % head_size_multiple == 0 && a.q_stride % 8 == 0);
  CHECK(0 < a.T && a.B * a.T <= largest_rows && 0 <= a.first_query && a.first_query < a.T);
  // 65,535 is the largest y and z of a grid.
  CHECK(a.B <= largest_batch && a.NH <= 65535 && most_tiles(a.T, 32, a.T, a.largest_stride) <= 65535);
  const RelativePositions& relative = a.relative;
  CHECK(relative.q == nullptr || (relative.r != nullptr && 0 < relative.distances && relative.distances <= 65535 * 32 &&
                                  a.topk == 0 && a.largest_stride == 1));
  CHECK(a.dropout.keys == nullptr ||
        (a.topk == 0 && relative.q == nullptr && a.partials == nullptr && a.first_query == 0));
  CHECK(a.topk == 0 ||
        (a.topk > 0 && a.topk_score != nullptr && a.topk_last != nullptr && a.T * a.kv_per_head <= INT_MAX));
}

// out = softmax(q k^T / sqrt(HS)) v, over the keys that each query sees; lse =.
inline void attention_forward(const AttentionArgs& a) {
  check_attention(a);
  if (has_few_queries(a))
    return a.first_keys != nullptr ? launch_attention_decode<true>(a) : launch_attention_decode<false>(a);
  CHECK(a.sequences == nullptr);
  launch_attention_forward(a);
}

// The gradients of the sinks +=, from lse and delta. A block owns a query head, a thread every 512th of its queries.
constexpr int sinks_threads = 512;
static __global__ void __launch_bounds__(sinks_threads) sinks_backward_kernel(AttentionArgs a) {
  const int64_t head = blockIdx.x, Q = a.queries();
  const float sink = to_float(a.sinks.scores[head]);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < a.B * Q; i += sinks_threads) {
    const int64_t at = (i / Q * a.NH + head) * Q + i % Q;
    sum += expf(sink - a.lse[at]) * a.delta[at];
  }
  sum = block_sum(sum, reinterpret_cast<float*>(shared_memory));
  if (threadIdx.x == 0) a.sinks.gradients[head] -= sum;
}

// delta =; dq, dk and dv = or += as the arguments say, the gradients of sinks +=.
inline void attention_backward(const AttentionArgs& a) {
  check_attention(a);
  CHECK(a.dq_stride % 8 == 0 && a.sequences == nullptr);
  CHECK(a.relative.q == nullptr ||
        (a.relative.dq != nullptr && a.relative.dr != nullptr && a.relative.dr_of_sequences != nullptr));
  launch_attention_backward(a);
  if (a.sinks.scores != nullptr)
    launch(sinks_backward_kernel, unsigned(a.NH), sinks_threads, sinks_threads / warp_size * sizeof(float), a);
}

// ----------------------------------------------------------------------------
// Copies of rows

// A block has blockDim.y rows, threads with the same threadIdx.y one of them, and neighbouring threads copy
// neighbouring 16 bytes, so that a warp's accesses are coalesced. Of long rows each block with the same blockIdx.x
// copies a part.
static __global__ void copy_rows_kernel(RowCopy copy, int64_t rows, int pieces) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  uint4* to = reinterpret_cast<uint4*>(copy.to(row));
  const uint4* from = copy.src != nullptr ? reinterpret_cast<const uint4*>(copy.src + row * copy.src_stride) : nullptr;
  const int stride = int(gridDim.y * blockDim.x);
  for (int i = int(blockIdx.y * blockDim.x + threadIdx.x); i < pieces; i += stride)
    to[i] = from != nullptr ? from[i] : make_uint4(0, 0, 0, 0);
}

// Width and strides are multiples of 8.
inline void copy_rows(const RowCopy& copy, int64_t rows) {
  CHECK(copy.width % 8 == 0 && copy.dst_stride % 8 == 0 && copy.src_stride % 8 == 0);
  if (rows == 0 || copy.width == 0) return;
  const int pieces = int(copy.width * int64_t(sizeof(floatX)) / int64_t(sizeof(uint4)));
  const dim3 block(unsigned(pieces < 256 ? pieces : 256), unsigned(pieces < 256 ? 256 / pieces : 1));
  constexpr int pieces_of_thread = 4;
  const dim3 grid(unsigned(ceil_div(rows, block.y)), unsigned(ceil_div(pieces, block.x * pieces_of_thread)));
  CHECK(grid.y <= 65535);
  launch(copy_rows_kernel, grid, block, 0, copy, rows, pieces);
}
