// Attention in bf16 on tensor cores (sm_80 and up). Formulas, shapes and limits are in attention.h; what the words in the kernels mean, in
// tile.h.
//
// A block has four warps, a warp 16 M rows of the block's tile, which stay where they are while the tiles of columns pass through two
// buffers: one is multiplied, the next is on its way. Scores and probabilities never leave the registers of their warp.
//
// The backward pass is two kernels, by rows of queries for dq and by rows of keys for dk and dv, each of which computes the scores and
// dp for itself: seven matmuls, 1.4 times the five of a single kernel. That one has to add every tile's part of dq to memory, in an
// order that differs from run to run, or else waiting for its turn, or into buffers for each share of the keys, which are read and
// written once for each of the tiles. Two kernels write every result once, by the one block that owns it: the bits are always
// the same, and there is no buffer but delta.
#pragma once
#include <algorithm>               // std::max
#include <cmath>                   // sqrt, logf
#include "llmc/attention_table.h"  // AttentionTable, AttentionShape, KVHead
#include "device.h"                // gpu
#include "launch.h"                // launch, shared_memory
#include "tile.h"                  // Tile, Accumulator, mma_ABt, mma_AB
#include "vec.h"                   // load8, warp_sum, warp_max

constexpr float log2_e = 1.44269504f;  // exp(x) = exp2(x * log2_e), and exp2 is an instruction
constexpr int attention_warps = 4, attention_threads = attention_warps * warp_size;

// This warp's and this lane's place in the block, and the block's in the grid: x is a head or a pair, y a sequence, z a tile of rows.
// Blocks start in the order of z first, so that those with the longest rows are the first of all heads.
__device__ inline int warp_index() { return int(threadIdx.x) / warp_size; }
__device__ inline bool first_of_row() { return threadIdx.x % 4 == 0; }  // one of the four lanes that have a row

// ----------------------------------------------------------------------------
// Forward

// Of D channels, which are HS rounded up. The more rows a warp has, the more often each fragment of k and v that it loads is used;
// 32 rows of 64 channels are what the registers hold.
template <int D>
struct ForwardTiles {
  static constexpr int M = D <= 64 ? 2 : 1, keys = 64;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * attention_warps;
  static constexpr int blocks_per_sm = 2;
  static constexpr size_t bytes = (queries + 4 * keys) * D * sizeof(bf16);  // D = 64: 48 KB, 128: 80 KB
};

// The probabilities of a warp's queries so far, up to a factor a row.
template <int M>
struct OnlineSoftmax {
  ColumnVector<M> max, sum;  // of the scores; of exp(score - max), each lane's own columns

  __device__ OnlineSoftmax() {
    for (int m = 0; m < M; m++)
      for (int h = 0; h < 2; h++) max.x[m][h] = -INFINITY, sum.x[m][h] = 0;
  }

  // s = exp((s - max) * scale), with the maximum over all columns up to these; what was accumulated with the one before is rescaled.
  // Every query sees key 0, so that from the first tile on the maximum is finite.
  template <int N, int O>
  __device__ void update(Accumulator<M, N>& s, Accumulator<M, O>& acc, float to_exp2) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = max.x[m][h];
        for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s.x[m][n][2 * h], s.x[m][n][2 * h + 1]));
        largest = warp_max<4>(largest);
        const float rescale = exp2_approx((max.x[m][h] - largest) * to_exp2), shift = largest * to_exp2;
        max.x[m][h] = largest;
        sum.x[m][h] *= rescale;
        for (int n = 0; n < O; n++)
          for (int i = 2 * h; i < 2 * h + 2; i++) acc.x[m][n][i] *= rescale;
        for (int n = 0; n < N; n++)
          for (int i = 2 * h; i < 2 * h + 2; i++) {
            s.x[m][n][i] = exp2_approx(s.x[m][n][i] * to_exp2 - shift);
            sum.x[m][h] += s.x[m][n][i];
          }
      }
  }
};

// out =, lse =. A block owns a tile of queries of one head in one sequence, a warp 16 M of them: their maxima, sums and rows of out stay in
// its registers while the tiles of keys pass.
template <int D>
__global__ void __launch_bounds__(attention_threads, ForwardTiles<D>::blocks_per_sm)
attention_forward_kernel(bf16* out, float* lse, const bf16* q, int64_t q_stride, const KVHead<bf16>* views, const int* kv_of_head,
                         AttentionShape a, float scale) {
  using Tiles = ForwardTiles<D>;
  constexpr int M = Tiles::M;
  const int T = int(a.T), HS = int(a.HS), head = int(blockIdx.x);
  const int64_t first_row = int64_t(blockIdx.y) * a.T, out_stride = a.NH * a.HS;
  const KVHead<bf16> view = views[kv_of_head[head]];
  const bf16 *k = view.k + first_row * view.stride, *v = view.v + first_row * view.stride;

  const Tile<D> q_tile = {0};
  const Tile<D> k_tiles = q_tile.from_row(Tiles::queries), v_tiles = k_tiles.from_row(2 * Tiles::keys);
  const Tile<D> warp_q = q_tile.from_row(warp_index() * Tiles::warp_queries);
  const int q0 = int(a.first_query) + int(gridDim.z - 1 - blockIdx.z) * Tiles::queries;
  const int query = q0 + warp_index() * Tiles::warp_queries;  // the warp's first
  const int end = min(T, q0 + Tiles::queries);                // of the queries, and of the keys that they see

  auto start_loading = [&](int k0) {
    const int stage = k0 / Tiles::keys % 2 * Tiles::keys;
    load_tile_async<Tiles::keys, attention_threads>(k_tiles.from_row(stage), k, view.stride, k0, end, HS);
    load_tile_async<Tiles::keys, attention_threads>(v_tiles.from_row(stage), v, view.stride, k0, end, HS);
    commit_copies();
  };
  load_tile_async<Tiles::queries, attention_threads>(q_tile, q + first_row * q_stride + head * a.HS, q_stride, q0, end, HS);
  start_loading(0);

  RegisterTile<M, D / 16> q_rows;
  Accumulator<M, D / 8> acc = {};
  OnlineSoftmax<M> softmax;
#pragma unroll 1
  for (int k0 = 0; k0 < end; k0 += Tiles::keys) {
    wait_for_copies();
    __syncthreads();  // this tile is here for everybody, and the one before it has been read
    if (k0 + Tiles::keys < end) start_loading(k0 + Tiles::keys);
    if (k0 == 0) load_left(q_rows, warp_q);
    if (query >= end || k0 >= query + Tiles::warp_queries) continue;  // no such queries, or none that sees these keys

    const int stage = k0 / Tiles::keys % 2 * Tiles::keys;
    Accumulator<M, Tiles::keys / 8> s = {};
    mma_ABt(s, q_rows, k_tiles.from_row(stage));
    if (k0 + Tiles::keys > query + 1)  // on the diagonal only
      mask(s, [&](int row, int column) { return k0 + column > query + row; });
    softmax.update(s, acc, scale * log2_e);
    mma_AB(acc, to_bf16(s), v_tiles.from_row(stage));
  }

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = warp_sum<4>(softmax.sum.x[m][h]), inverse = 1.0f / sum;
      const int row = acc.row(m, 2 * h);
      for (int n = 0; n < D / 8; n++)
        for (int i = 2 * h; i < 2 * h + 2; i++) acc.x[m][n][i] *= inverse;
      if (first_of_row() && query + row < end)
        lse[first_row * a.NH + head * a.T + query + row] = softmax.max.x[m][h] * scale + logf(sum);
    }
  store_rows(out + first_row * out_stride + head * a.HS, out_stride, query, end, HS, /*accumulate=*/false, acc, warp_q);
}

// ----------------------------------------------------------------------------
// Backward

// Columns are multiplied in steps: scores and dp of a step are all that must be in registers beside the results.
template <int D>
struct DqTiles {
  static constexpr int M = D <= 64 ? 2 : 1, keys = D <= 64 ? 64 : 32, step = 32;
  static constexpr int warp_queries = 16 * M, queries = warp_queries * attention_warps;
  static constexpr int blocks_per_sm = 2;
  static constexpr size_t bytes = (2 * queries + 4 * keys) * D * sizeof(bf16);  // D = 64: 64 KB, 128: 64 KB
};

template <int D>
struct DkdvTiles {
  static constexpr int M = D <= 64 ? 2 : 1, queries = D <= 64 ? 64 : 32, step = 32;
  static constexpr int warp_keys = 16 * M, keys = warp_keys * attention_warps;
  static constexpr int blocks_per_sm = 2;
  static constexpr size_t bytes = (2 * keys + 4 * queries) * D * sizeof(bf16) + 4 * queries * sizeof(float);  // 65 and 65 KB
};

// The sum over dout * out of a row, for the four lanes that have it. Both are at the row's first channel.
__device__ inline float row_delta(const bf16* dout, const bf16* out, int HS) {
  float sum = 0;
  for (int channel = int(threadIdx.x) % 4 * 8; channel < HS; channel += 32) {
    float x[8], y[8];
    load8(x, dout + channel);
    load8(y, out + channel);
    for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  }
  return sum;
}

// dq =, delta =. A block owns a tile of queries of one head in one sequence, a warp 16 M of them: q, dout and dq of its rows stay in its
// registers while the tiles of k and v pass. First it sums their delta, straight from memory.
template <int D>
__global__ void __launch_bounds__(attention_threads, DqTiles<D>::blocks_per_sm)
attention_dq_kernel(bf16* dq, int64_t dq_stride, float* delta, const bf16* dout, const bf16* out, const float* lse, const bf16* q,
                    int64_t q_stride, const KVHead<bf16>* views, const int* kv_of_head, AttentionShape a, float scale) {
  using Tiles = DqTiles<D>;
  constexpr int M = Tiles::M, N = Tiles::step / 8;
  const int T = int(a.T), HS = int(a.HS), head = int(blockIdx.x);
  const int64_t first_row = int64_t(blockIdx.y) * a.T, out_stride = a.NH * a.HS;
  const KVHead<bf16> view = views[kv_of_head[head]];
  const bf16 *k = view.k + first_row * view.stride, *v = view.v + first_row * view.stride;
  dout += first_row * out_stride + head * a.HS;
  out += first_row * out_stride + head * a.HS;
  lse += first_row * a.NH + head * a.T;
  delta += first_row * a.NH + head * a.T;

  const Tile<D> q_tile = {0};
  const Tile<D> dout_tile = q_tile.from_row(Tiles::queries), k_tiles = dout_tile.from_row(Tiles::queries);
  const Tile<D> v_tiles = k_tiles.from_row(2 * Tiles::keys);
  const Tile<D> warp_q = q_tile.from_row(warp_index() * Tiles::warp_queries);
  const Tile<D> warp_dout = dout_tile.from_row(warp_index() * Tiles::warp_queries);
  const int q0 = int(gridDim.z - 1 - blockIdx.z) * Tiles::queries, end = min(T, q0 + Tiles::queries);
  const int query = q0 + warp_index() * Tiles::warp_queries;

  auto start_loading = [&](int k0) {
    const int stage = k0 / Tiles::keys % 2 * Tiles::keys;
    load_tile_async<Tiles::keys, attention_threads>(k_tiles.from_row(stage), k, view.stride, k0, end, HS);
    load_tile_async<Tiles::keys, attention_threads>(v_tiles.from_row(stage), v, view.stride, k0, end, HS);
    commit_copies();
  };
  load_tile_async<Tiles::queries, attention_threads>(q_tile, q + first_row * q_stride + head * a.HS, q_stride, q0, end, HS);
  load_tile_async<Tiles::queries, attention_threads>(dout_tile, dout, out_stride, q0, end, HS);
  start_loading(0);

  RegisterTile<M, D / 16> q_rows, dout_rows;
  Accumulator<M, D / 8> acc = {};
  ColumnVector<M> log2_sum, row_sum;  // lse in powers of 2; delta
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = query + acc.row(m, 2 * h);
      const bool exists = row < end;
      log2_sum.x[m][h] = exists ? lse[row] * log2_e : INFINITY;  // no probability beyond the end
      row_sum.x[m][h] = warp_sum<4>(exists ? row_delta(dout + row * out_stride, out + row * out_stride, HS) : 0.0f);
      if (exists && first_of_row()) delta[row] = row_sum.x[m][h];
    }

  const float to_exp2 = scale * log2_e;
#pragma unroll 1
  for (int k0 = 0; k0 < end; k0 += Tiles::keys) {
    wait_for_copies();
    __syncthreads();  // this tile is here for everybody, and the one before it has been read
    if (k0 + Tiles::keys < end) start_loading(k0 + Tiles::keys);
    if (k0 == 0) load_left(q_rows, warp_q), load_left(dout_rows, warp_dout);
    if (query >= end) continue;
#pragma unroll 1
    for (int first = k0; first < k0 + Tiles::keys && first < query + Tiles::warp_queries; first += Tiles::step) {
      const int row = first - k0 + k0 / Tiles::keys % 2 * Tiles::keys;
      Accumulator<M, N> s = {}, dp = {};
      mma_ABt(s, q_rows, k_tiles.from_row(row));
      mma_ABt(dp, dout_rows, v_tiles.from_row(row));
      if (first + Tiles::step > query + 1)
        mask(s, [&](int row, int column) { return first + column > query + row; });
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
          for (int i = 0; i < 4; i++) {
            const float p = exp2_approx(s.x[m][n][i] * to_exp2 - log2_sum.x[m][i / 2]);
            s.x[m][n][i] = p * (dp.x[m][n][i] - row_sum.x[m][i / 2]);  // ds
          }
      mma_AB(acc, to_bf16(s), k_tiles.from_row(row));
    }
  }
  ::scale(acc, scale);
  store_rows(dq + first_row * dq_stride + head * a.HS, dq_stride, query, end, HS, /*accumulate=*/false, acc, warp_q);
}

// dk, dv = or +=. A block owns a tile of keys of one pair in one sequence, a warp 16 M of them: dk and dv of its rows stay in its registers
// while q and dout pass, of every head that reads the pair, from the block's own keys on. The mirror of the kernel above: scores
// are transposed, with a row a key, so that they are the left operands of dk and dv.
template <int D>
__global__ void __launch_bounds__(attention_threads, DkdvTiles<D>::blocks_per_sm)
attention_dkdv_kernel(const bf16* dout, const float* lse, const float* delta, const bf16* q, int64_t q_stride,
                      const KVHead<bf16>* views, const int* readers, AttentionShape a, float scale) {
  using Tiles = DkdvTiles<D>;
  constexpr int M = Tiles::M, N = Tiles::step / 8;
  const int T = int(a.T), HS = int(a.HS);
  const int64_t first_row = int64_t(blockIdx.y) * a.T, out_stride = a.NH * a.HS;
  const KVHead<bf16>& view = views[blockIdx.x];  // not a copy: where dk and dv go need not wait in registers
  const int num_query_heads = view.num_query_heads, *heads = readers + view.first_query_head;
  dout += first_row * out_stride;
  lse += first_row * a.NH;
  delta += first_row * a.NH;
  q += first_row * q_stride;

  const Tile<D> k_tile = {0};
  const Tile<D> v_tile = k_tile.from_row(Tiles::keys), q_tiles = v_tile.from_row(Tiles::keys);
  const Tile<D> dout_tiles = q_tiles.from_row(2 * Tiles::queries);
  const int lse_tiles = dout_tiles.from_row(2 * Tiles::queries).place, delta_tiles = lse_tiles + 2 * Tiles::queries * int(sizeof(float));
  const Tile<D> warp_k = k_tile.from_row(warp_index() * Tiles::warp_keys);
  const Tile<D> warp_v = v_tile.from_row(warp_index() * Tiles::warp_keys);
  const int k0 = int(blockIdx.z) * Tiles::keys, end = min(T, k0 + Tiles::keys);
  const int key = k0 + warp_index() * Tiles::warp_keys;

  // The passing tiles: those of one reader, then those of the next.
  const int tiles = (T - k0 + Tiles::queries - 1) / Tiles::queries, passes = tiles * num_query_heads;
  auto start_loading = [&](int pass) {
    const int head = heads[pass / tiles], q0 = k0 + pass % tiles * Tiles::queries;
    const int stage = pass % 2 * Tiles::queries;
    load_tile_async<Tiles::queries, attention_threads>(q_tiles.from_row(stage), q + head * HS, q_stride, q0, T, HS);
    load_tile_async<Tiles::queries, attention_threads>(dout_tiles.from_row(stage), dout + head * HS, out_stride, q0, T, HS);
    load_vector_async<Tiles::queries>(lse_tiles + stage * int(sizeof(float)), lse + head * a.T, q0, T);
    load_vector_async<Tiles::queries>(delta_tiles + stage * int(sizeof(float)), delta + head * a.T, q0, T);
    commit_copies();
  };
  load_tile_async<Tiles::keys, attention_threads>(k_tile, view.k + first_row * view.stride, view.stride, k0, end, HS);
  load_tile_async<Tiles::keys, attention_threads>(v_tile, view.v + first_row * view.stride, view.stride, k0, end, HS);
  start_loading(0);

  const float to_exp2 = scale * log2_e;
  Accumulator<M, D / 8> dk = {}, dv = {};
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    wait_for_copies();
    __syncthreads();  // this tile is here for everybody, and the one before it has been read
    if (pass + 1 < passes) start_loading(pass + 1);
    if (key >= end) continue;
    const int q0 = k0 + pass % tiles * Tiles::queries;
#pragma unroll 1
    for (int first = q0; first < q0 + Tiles::queries; first += Tiles::step) {
      if (first + Tiles::step <= key) continue;  // none of these queries sees the warp's keys
      const int row = first - q0 + pass % 2 * Tiles::queries;
      Accumulator<M, N> s = {}, dp = {};
      mma_ABt(s, warp_k, q_tiles.from_row(row));
      mma_ABt(dp, warp_v, dout_tiles.from_row(row));
      if (first < key + Tiles::warp_keys - 1)
        mask(s, [&](int row, int column) { return key + row > first + column; });
      // Beyond the end q, dout, lse and delta are zeros: those probabilities are 1, of gradients that are 0.
      for (int n = 0; n < N; n++)
        for (int i = 0; i < 2; i++) {
          const int column = (row + s.column(n, i)) * int(sizeof(float));
          const float log2_sum = shared_float(lse_tiles + column) * log2_e, column_delta = shared_float(delta_tiles + column);
          for (int m = 0; m < M; m++)
            for (int h = 0; h < 2; h++) {
              float &x = s.x[m][n][2 * h + i], &y = dp.x[m][n][2 * h + i];
              x = exp2_approx(x * to_exp2 - log2_sum);
              y = x * (y - column_delta);  // ds
            }
        }
      mma_AB(dv, to_bf16(s), dout_tiles.from_row(row));
      mma_AB(dk, to_bf16(dp), q_tiles.from_row(row));
    }
  }
  ::scale(dk, scale);
  const int64_t first = first_row * view.dstride;
  store_rows(view.dk + first, view.dstride, key, end, HS, view.accumulate, dk, warp_k);
  store_rows(view.dv + first, view.dstride, key, end, HS, view.accumulate, dv, warp_v);
}

// ----------------------------------------------------------------------------
// Launchers

template <int D>
void launch_forward(bf16* out, float* lse, const bf16* q, int64_t q_stride, const AttentionTable<bf16>& table,
                    const AttentionShape& a) {
  using Tiles = ForwardTiles<D>;
  const dim3 grid(unsigned(a.NH), unsigned(a.B), unsigned(ceil_div(a.T - a.first_query, Tiles::queries)));
  launch(attention_forward_kernel<D>, grid, attention_threads, Tiles::bytes, gpu().stream, out, lse, q, q_stride,
         table.device_kv_heads.data, table.device_kv_of_head.data, a, float(1 / sqrt(double(a.HS))));
}

template <int D>
void launch_backward(bf16* dq, int64_t dq_stride, float* delta, const bf16* dout, const bf16* out, const float* lse, const bf16* q,
                     int64_t q_stride, const AttentionTable<bf16>& table, const AttentionShape& a) {
  const float scale = float(1 / sqrt(double(a.HS)));
  const unsigned query_tiles = unsigned(ceil_div(a.T, DqTiles<D>::queries)), key_tiles = unsigned(ceil_div(a.T, DkdvTiles<D>::keys));
  launch(attention_dq_kernel<D>, dim3(unsigned(a.NH), unsigned(a.B), query_tiles), attention_threads, DqTiles<D>::bytes,
         gpu().stream, dq, dq_stride, delta, dout, out, lse, q, q_stride, table.device_kv_heads.data, table.device_kv_of_head.data, a,
         scale);
  launch(attention_dkdv_kernel<D>, dim3(unsigned(table.views.size()), unsigned(a.B), key_tiles), attention_threads,
         DkdvTiles<D>::bytes, gpu().stream, dout, lse, delta, q, q_stride, table.device_kv_heads.data, table.device_query_heads.data, a,
         scale);
}

// Runs f(D) with D, the head size rounded up, as a constant.
template <class F>
void for_head_size(int64_t HS, F f) {
  if (HS <= 32) f(std::integral_constant<int, 32>());
  else if (HS <= 64) f(std::integral_constant<int, 64>());
  else if (HS <= 96) f(std::integral_constant<int, 96>());
  else f(std::integral_constant<int, 128>());
}

inline void launch_attention_forward(bf16* out, float* lse, const bf16* q, int64_t q_stride, const AttentionTable<bf16>& table,
                                     const AttentionShape& a) {
  for_head_size(a.HS, [&](auto D) { launch_forward<D>(out, lse, q, q_stride, table, a); });
}

inline void launch_attention_backward(bf16* dq, int64_t dq_stride, float* delta, const bf16* dout, const bf16* out,
                                      const float* lse, const bf16* q, int64_t q_stride, const AttentionTable<bf16>& table,
                                      const AttentionShape& a) {
  for_head_size(a.HS, [&](auto D) { launch_backward<D>(dq, dq_stride, delta, dout, out, lse, q, q_stride, table, a); });
}
