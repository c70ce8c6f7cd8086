// The backward pass of plain attention with dS once through memory: the kernel of dk and dv, which computes
// ds = p (dp - delta), writes it to memory, and another kernel reads it and multiplies: dq = ds k. So there are five
// products of T x T in place of seven, and about half of T x T elements per head are written and read once. That pays
// for short sequences. They are taken in chunks whose dS fits into DsMatrices::most_bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include "attention_mma_backward.h"
#include "llmc/ops/attention_args.h"
#include "tile_wgmma.h"

// dS^T of the sequences of a chunk: element (sequence, head, key, query). Blocks of 128 keys that are all after a block
// of 128 queries have not been written, and are not read.
struct DsMatrices {
  static constexpr int64_t most_tokens = 4096;
  static inline int64_t most_bytes = 256 << 20;  // of a chunk with more than one sequence

  floatX* data = nullptr;  // (sequences, heads, rows, rows)
  int first_sequence = 0;
  int64_t heads = 0, rows = 0;

  static int64_t rows_of(int64_t T) { return ceil_div(T, 128) * 128; }
  static int64_t elements_of_sequence(int64_t T, int64_t heads) { return heads * rows_of(T) * rows_of(T); }
  // How many of B sequences a chunk has: as few chunks as may be, and as equal ones.
  static int64_t sequences(int64_t B, int64_t T, int64_t heads) {
    const int64_t bytes = elements_of_sequence(T, heads) * int64_t(sizeof(floatX));
    const int64_t chunks = ceil_div(B, std::max<int64_t>(1, most_bytes / bytes));
    return ceil_div(B, chunks);
  }
  // The row of a key, from the query 0 on. `sequence`: counted from the chunk's first.
  __device__ floatX* row(int sequence, int head, int key) const {
    return data + ((sequence * heads + head) * rows + key) * rows;
  }
};

constexpr int delta_threads = 256;

// delta =. Four lanes own a row of one head; a warp's rows are neighbours in memory.
__global__ void __launch_bounds__(delta_threads) attention_delta_kernel(AttentionArgs a) {
  const int64_t row = (int64_t(blockIdx.x) * delta_threads + threadIdx.x) / 4;  // of (B, T, NH)
  const bool exists = row < a.B * a.T * a.NH;
  const float sum = warp_sum<4>(exists ? row_delta(a.dout + row * a.HS, a.out + row * a.HS, int(a.HS)) : 0.0f);
  if (!exists || !first_of_row()) return;
  const int64_t head = row % a.NH, t = row / a.NH % a.T, b = row / a.NH / a.T;
  a.delta[(b * a.NH + head) * a.T + t] = sum;
}

template <int D>
struct DsDqTiles {
  static constexpr int queries = 128, keys = 64, buffers = 3;
  static constexpr int ds_bytes = keys * queries * int(sizeof(floatX)), k_bytes = keys * D * int(sizeof(floatX));
  static constexpr size_t bytes = buffers * (ds_bytes + k_bytes);  // D = 64: 72 KB, 128: 96 KB
};

// Rows of an A operand that are columns of tiles: column 16 m of `tile` on, of 64 rows.
struct TransposedRows {
  static constexpr int columns = 64;
  Tile<64> tile;
  int first;  // column, a multiple of 16
};
__device__ inline void a_fragment(unsigned (&x)[4], TransposedRows a, int m, int k) {
  const int lane = int(threadIdx.x) % warp_size;
  ldmatrix<true>(x, a.tile.at(16 * k + lane / 16 * 8 + lane % 8, (a.first + 16 * m) / 8 + lane / 8 % 2));
}

// dq = or +=, of the sequences whose dS is there. A block owns 128 queries of one head in one sequence, a warp 32 of
// them, a thread its elements of the warp's fragments. Two tiles of dS and of k are on their way while one is used: it
// is memory that bounds this.
template <int D>
__global__ void __launch_bounds__(attention_threads, 2)
    attention_dq_from_ds_wgmma_kernel(AttentionArgs a, DsMatrices ds, float scale) {
  if (!compiled_for_wgmma) return trap();  // no kernel by mma.sync stores dS
  using Tiles = DsDqTiles<D>;
  const int HS = int(a.HS), T = int(a.T), head = int(blockIdx.x), first_row = (ds.first_sequence + int(blockIdx.y)) * T;
  const int q0 = int(gridDim.z - 1 - blockIdx.z) * Tiles::queries, end = min(T, q0 + Tiles::queries);
  const int warp_query = warp_index() * 32;
  const KeyTiles<Tiles::keys, plain_attention> tiles(a, head, first_row, {}, q0, end);
  using KeyTile = decltype(tiles.first());
  const floatX* const from = ds.row(int(blockIdx.y), head, 0) + q0;
  auto ds_tile = [](int buffer, int part) { return Tile<64>{buffer * Tiles::ds_bytes + part * Tiles::ds_bytes / 2}; };
  auto k_tile = [](int buffer) { return Tile<D>{Tiles::buffers * Tiles::ds_bytes + buffer * Tiles::k_bytes}; };
  auto start_loading = [&](KeyTile tile, int buffer) {
    if (tiles.contains(tile)) {
      const KVRows kv = tiles.rows(tile);
      for (int part = 0; part < 2; part++)
        load_tile_async<Tiles::keys, attention_threads>(ds_tile(buffer, part), from + 64 * part, ds.rows, tile.k0,
                                                        tile.k0 + Tiles::keys, 64);
      load_tile_async<Tiles::keys, attention_threads>(k_tile(buffer), kv.k, kv.k_stride, tile.k0, end, HS);
    }
    commit_copies();  // also if there are none: wait_for_copies counts them
  };

  Accumulator<2, D / 8> acc = {};
  KeyTile tile = tiles.first(), to_load = tiles.after(tiles.after(tile));
  start_loading(tile, 0);
  start_loading(tiles.after(tile), 1);
#pragma unroll 1
  for (int buffer = 0; tiles.contains(tile); tile = tiles.after(tile), to_load = tiles.after(to_load)) {
    wait_for_copies<1>();
    __syncthreads();  // all threads' copies of this tile have arrived, and all warps have read the one before it
    start_loading(to_load, buffer == 0 ? 2 : buffer - 1);
    mma_AB(acc, TransposedRows{ds_tile(buffer, warp_query / 64), warp_query % 64}, k_tile(buffer));
    buffer = buffer == 2 ? 0 : buffer + 1;
  }
  finish_copies();
  __syncthreads();  // all warps have read, and the results go to memory by way of what they have read
  ::scale(acc, scale);
  store_rows({a.dq + first_row * a.dq_stride + head * HS, a.dq_stride, q0 + warp_query, end, HS, a.dq_accumulate}, acc,
             Tile<D>{0}.from_row(warp_query));
}
