// Causal attention without a T*T buffer, in the manner of FlashAttention-2 (Dao 2023): a block keeps a tile of rows and lets tiles of
// columns pass by. Every head reads the k and v that the table points it to, where they were projected: its own layer's and
// those that it borrows, in one launch.
//
//   forward    s = q k^T / sqrt(HS), masked to key <= query;  lse = log sum exp(s);  p = exp(s - lse);  out = p v
//   backward   delta = rowsum(dout * out);  dp = dout v^T;  ds = p (dp - delta)
//              dq = ds k / sqrt(HS);  dk = ds^T q / sqrt(HS);  dv = p^T dout
//
// Shapes: q, out and their gradients have row (b, t) of head i at `(b * T + t) * stride + i * HS`, k, v and theirs as KVHead
// says. lse and delta are (B, NH, T). Strides and HS are multiples of 8 elements, pointers of 16 bytes, and HS is at most
// 128.
//
// The kernels are those of floatX: on tensor cores in bf16, with FMAs in fp32. The results' bits are always the same in both.
#pragma once
#include <climits>                 // INT_MAX
#include "llmc/attention_table.h"  // AttentionTable, AttentionShape, KVHead
#include "llmc/utils/error.h"      // CHECK
#include "device.h"                // gpu
#include "launch.h"                // launch
#include "vec.h"                   // ceil_div
#ifdef PRECISION_BF16
#include "attention_bf16.h"  // launch_attention_forward, launch_attention_backward
#else
#include "attention_fp32.h"  // the same
#endif

inline void check_attention(const AttentionTable<floatX>& table, const AttentionShape& a, int64_t q_stride) {
  CHECK(0 < a.HS && a.HS <= largest_head_size && a.HS % head_size_multiple == 0 && q_stride % 8 == 0);
  CHECK(0 < a.T && a.T <= INT_MAX - 128 && a.first_query < a.T && (a.first_query == 0 || a.B == 1));
  CHECK(a.B <= 65535 && a.NH <= 65535 && ceil_div(a.T, 32) <= 65535);  // a grid's y and z are as large as that
  CHECK(int64_t(table.readers.size()) == a.NH);
  for (const KVHead<floatX>& view : table.views) CHECK(view.stride % 8 == 0 && view.dstride % 8 == 0);
}

// out = softmax(q k^T / sqrt(HS) + causal mask) v; lse =. Of the positions before a.first_query neither is touched.
inline void attention_forward(floatX* out, float* lse, const floatX* q, int64_t q_stride,
                              const AttentionTable<floatX>& table, const AttentionShape& a) {
  check_attention(table, a, q_stride);
  launch_attention_forward(out, lse, q, q_stride, table, a);
}

// dq =, delta =; dk, dv = or += as the table says.
inline void attention_backward(floatX* dq, int64_t dq_stride, float* delta, const floatX* dout, const floatX* out,
                               const float* lse, const floatX* q, int64_t q_stride, const AttentionTable<floatX>& table,
                               const AttentionShape& a) {
  check_attention(table, a, q_stride);
  CHECK(dq_stride % 8 == 0 && a.first_query == 0);
  launch_attention_backward(dq, dq_stride, delta, dout, out, lse, q, q_stride, table, a);
}

// ----------------------------------------------------------------------------
// Rows from one place to another

// dst = src, or zeros if src is null. A block owns blockDim.y rows; neighbouring threads copy neighbouring 16 bytes.
static __global__ void copy_rows_kernel(floatX* dst, int64_t dst_stride, const floatX* src, int64_t src_stride, int64_t rows,
                                        int pieces) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  uint4* to = reinterpret_cast<uint4*>(dst + row * dst_stride);
  const uint4* from = src != nullptr ? reinterpret_cast<const uint4*>(src + row * src_stride) : nullptr;
  for (int i = int(threadIdx.x); i < pieces; i += int(blockDim.x))
    to[i] = from != nullptr ? from[i] : make_uint4(0, 0, 0, 0);
}

// dst (rows, width) = src (rows, width), or zeros if src is null. Width and strides are multiples of 8.
inline void copy_rows(floatX* dst, int64_t dst_stride, const floatX* src, int64_t src_stride, int64_t rows, int64_t width) {
  CHECK(width % 8 == 0 && dst_stride % 8 == 0 && src_stride % 8 == 0);
  if (rows == 0 || width == 0) return;
  const int pieces = int(width * int64_t(sizeof(floatX)) / int64_t(sizeof(uint4)));
  const dim3 block(unsigned(pieces < 256 ? pieces : 256), unsigned(pieces < 256 ? 256 / pieces : 1));
  launch(copy_rows_kernel, dim3(unsigned(ceil_div(rows, block.y))), block, 0, gpu().stream, dst, dst_stride, src, src_stride,
         rows, pieces);
}
