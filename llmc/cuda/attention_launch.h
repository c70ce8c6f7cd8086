// Which of attention's kernels on tensor cores are launched: attention_mma.h's, by mma.sync, or on an H100, for plain
// attention over many tokens, attention_wgmma.h's. SLA_ATTENTION chooses one of them (attention_ways) for all lengths
// that it can have.
//
// Kernels are compiled for D, the head size rounded up to one that there are tiles for (for_head_size); for Kind, what
// attention has beside the causal mask (attention_tiles.h); and for Large, tiles for GPUs where a block can have
// Gpu::large_shared_bytes of shared memory.
#pragma once
#include "llmc/ops/attention_args.h"
#include "attention_mma.h"
#include "attention_mma_backward.h"
#include "attention_mma_dr.h"
#include "attention_mma_topk.h"
#include "attention_relative.h"
#include "attention_wgmma.h"
#include "attention_wgmma_producer.h"
#include "device.h"

// ----------------------------------------------------------------------------
// By mma.sync

template <int D, int Kind, bool Large>
void launch_forward_kernel(const AttentionArgs& a) {
  using Tiles = ForwardTilesOf<D, Kind, Large>;
  launch(attention_forward_kernel<D, Kind, Large>, attention_grid(a, a.NH, a.queries(), Tiles::queries),
         attention_threads, Tiles::bytes, a, score_scale(a));
}

template <int D, int Kind, bool Large>
void launch_backward_kernels(const AttentionArgs& a) {
  using Dq = DqTilesOf<D, Kind, Large>;
  using Dkdv = DkdvTilesOf<D, Kind, Large>;
  static_assert(Dq::bytes <= Gpu::large_shared_bytes && Dkdv::bytes <= Gpu::large_shared_bytes);
  // Each block takes 1 KB more than it asks for.
  static_assert(D != 64 || Large || is_relative(Kind) ||
                    (2 * (Dq::bytes + 1024) <= 100 << 10 && 2 * (Dkdv::bytes + 1024) <= 100 << 10),
                "an SM of compute capability 8.6, 8.9 or 12.0 has room for two blocks");
  launch(attention_dq_kernel<D, Kind, Large>, attention_grid(a, a.NH, a.queries(), Dq::queries), Dq::threads, Dq::bytes,
         a, score_scale(a));
  launch(attention_dkdv_kernel<D, Kind, Large>, attention_grid(a, a.num_kv_heads, a.T, Dkdv::keys), Dkdv::threads,
         Dkdv::bytes, a, score_scale(a));
}

// dr =, from the delta of the kernels before.
template <int D, bool Documents>
void launch_dr_kernels(const AttentionArgs& a) {
  using Tiles = DrTiles<D>;
  const dim3 grid(unsigned(a.NH), unsigned(a.B), unsigned(ceil_div(a.relative.distances, Tiles::distances)));
  launch(attention_dr_kernel<D, Documents>, grid, attention_threads, Tiles::bytes, a, score_scale(a));
  launch_sum_of_sequences(a);
}

// ----------------------------------------------------------------------------
// By wgmma

// From so many tokens on wgmma is faster than mma.sync on an H100 or H200 (dev/bench/results/hopper).
struct WgmmaLengths {
  int64_t of_64_channels, of_128_channels;
};
constexpr WgmmaLengths wgmma_forward_from = {4096, 2048}, wgmma_backward_from = {1024, 0};

// Runs f(D) with D, the head size rounded up, as a constant, if there are kernels for it which are to be used. Returns
// whether it has.
template <class F>
bool for_wgmma_head_size(const AttentionArgs& a, WgmmaLengths from, F f) {
  bool is_used = false;
  if (gpu().attention_by != AttentionBy::mma)
    for_head_size(a.HS, [&](auto D) {
      if constexpr (D % 64 == 0) {
        const int64_t first = D == 64 ? from.of_64_channels : from.of_128_channels;
        is_used = wgmma_is_asked_for() || a.T >= first;
        if (is_used) f(D);
      }
    });
  return is_used;
}

// Whether dS goes once through memory. It is one way for each shape of a run, so that its memory can be planned.
inline bool uses_ds(int64_t T, int64_t HS) {
  bool has_kernels = false;
  for_head_size(HS, [&](auto D) { has_kernels = D % 64 == 0; });
  return gpu().attention_by == AttentionBy::candidates_ds && has_kernels && T <= DsMatrices::most_tokens;
}

// Returns whether kernels by wgmma are there for these arguments, and have been launched.
inline bool launch_wgmma_forward(const AttentionArgs& a) {
  if (is_general_forward(a)) return false;
  return for_wgmma_head_size(a, wgmma_forward_from, [&](auto D) {
    if (gpu().attention_by >= AttentionBy::candidates) {
      const int64_t work_tiles = ceil_div(a.queries(), wgmma_rows) * a.NH * a.B;
      CHECK(work_tiles <= INT_MAX);
      launch(attention_forward_producer_wgmma_kernel<D>, unsigned(std::min<int64_t>(work_tiles, gpu().multiprocessors)),
             producer_block_threads, ProducerTiles<D>::bytes, a, score_scale(a), int(work_tiles));
      return;
    }
    launch(attention_forward_wgmma_kernel<D>, attention_grid(a, a.NH, a.queries(), wgmma_rows), wgmma_threads,
           WgmmaForwardTiles<D>::bytes, a, score_scale(a));
  });
}

// dS once through memory, in chunks of sequences.
template <int D>
void launch_ds_backward(const AttentionArgs& a) {
  CHECK(a.scratch != nullptr);
  launch(attention_delta_kernel, blocks_of(a.B * a.T * a.NH, delta_threads / 4), delta_threads, 0, a);
  DsMatrices ds = {reinterpret_cast<floatX*>(a.scratch), 0, a.NH, DsMatrices::rows_of(a.T)};
  const int64_t sequences = DsMatrices::sequences(a.B, a.T, a.NH);
  for (int64_t first = 0; first < a.B; first += sequences) {
    ds.first_sequence = int(first);
    dim3 grid = attention_grid(a, a.num_kv_heads, a.T, wgmma_rows);
    grid.y = unsigned(std::min(sequences, a.B - first));
    launch(attention_dkdv_wgmma_kernel<D, false, true>, grid, wgmma_threads, WgmmaDkdvTiles<D>::bytes_with_ds, a,
           score_scale(a), ds);
    grid.x = unsigned(a.NH);
    launch(attention_dq_from_ds_wgmma_kernel<D>, grid, attention_threads, DsDqTiles<D>::bytes, a, ds, score_scale(a));
  }
}

inline bool launch_wgmma_backward(const AttentionArgs& a) {
  if (is_general_backward(a)) return false;
  return for_wgmma_head_size(a, wgmma_backward_from, [&](auto D) {
    if (uses_ds(a.T, a.HS)) return launch_ds_backward<D>(a);
    launch(attention_dq_wgmma_kernel<D>, attention_grid(a, a.NH, a.T, wgmma_rows), wgmma_threads,
           WgmmaDqTiles<D>::bytes, a, score_scale(a));
    const auto launch_dkdv = [&](auto kernel) {
      launch(kernel, attention_grid(a, a.num_kv_heads, a.T, wgmma_rows), wgmma_threads, WgmmaDkdvTiles<D>::bytes, a,
             score_scale(a), DsMatrices());
    };
    if (D == 64 && gpu().attention_by == AttentionBy::candidates)
      launch_dkdv(attention_dkdv_wgmma_kernel<D, D == 64, false>);
    else launch_dkdv(attention_dkdv_wgmma_kernel<D, false, false>);
  });
}

// ----------------------------------------------------------------------------
// Either

inline void launch_attention_forward(const AttentionArgs& a) {
  if (launch_wgmma_forward(a)) return;
  for_head_size(a.HS, [&](auto D) {
    for_kind(a, is_general_forward(a), [&](auto Kind) {
      constexpr bool has_two_shapes = Kind == plain_attention && D <= 64;  // others and more channels have one
      if (a.topk > 0)
        launch(attention_topk_kernel<D, has_documents(Kind)>,
               attention_grid(a, a.NH, a.queries(), TopKTiles<D>::queries), attention_threads, TopKTiles<D>::bytes, a);
      if (gpu().has_large_shared_memory) launch_forward_kernel<D, Kind, has_two_shapes>(a);
      else launch_forward_kernel<D, Kind, false>(a);
    });
  });
}

inline void launch_attention_backward(const AttentionArgs& a) {
  if (launch_wgmma_backward(a)) return;
  for_head_size(a.HS, [&](auto D) {
    for_kind(a, is_general_backward(a), [&](auto Kind) {
      constexpr bool has_two_shapes = Kind == plain_attention ? D >= 64 : D == 64 && has_topk(Kind);
      if (gpu().has_large_shared_memory) launch_backward_kernels<D, Kind, has_two_shapes>(a);
      else launch_backward_kernels<D, Kind, false>(a);
      if constexpr (is_relative(Kind)) launch_dr_kernels<D, has_documents(Kind)>(a);
    });
  });
}
