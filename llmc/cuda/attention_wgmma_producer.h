// The forward pass of attention_wgmma.h, warp-specialized as in FlashAttention-3 (Shah et al. 2024): one warpgroup, the
// producer, loads tiles of q, k and v into shared memory; two others, the consumers, multiply and take exponentials,
// and start their products in turns. The grid is persistent: there is a block for each multiprocessor, and it takes one
// work tile, 128 queries of a head, after the other. The producer is already loading the next work tile while the
// consumers finish this one. Barriers in shared memory (mbarriers) say which buffers are full and which are empty, so
// that no consumer waits for copies of its own or computes addresses; the producer hands most of its registers to them.
//
// A work tile's results do not depend on the block that computes it: the bits are the same for any number of blocks.
#pragma once
#include "attention_wgmma.h"

constexpr int producer_block_threads = warpgroup_size + wgmma_threads, producer_warps = warpgroup_size / warp_size,
              consumer_warps = wgmma_threads / warp_size;
// Registers of a thread, from the start of each role on. The launch gives 168: a multiprocessor's 65,536 / 384 threads.
constexpr int producer_registers = 40, consumer_registers = 232;

template <int D>
struct ProducerTiles {
  static constexpr int keys = WgmmaForwardTiles<D>::keys, buffers = 5;
  // The producer signals that a tile has arrived after it has started to load this many more. When the consumers wait
  // for a tile they have released all buffers but one, so that there is always a buffer for the tile that is loaded.
  static constexpr int ahead = buffers - 2;
  using Q = SplitTile<D, wgmma_rows>;
  using KV = SplitTile<D, keys>;
  static constexpr int barriers = 2 * Q::bytes + 2 * buffers * KV::bytes;         // q, what goes to out, k, v
  static constexpr size_t bytes = barriers + (2 * buffers + 1) * mbarrier_bytes;  // D = 64: 192 KB, 128: 224 KB

  __device__ static Q q() { return {0}; }
  __device__ static Q out() { return q().next(1); }
  __device__ static KV k(int buffer) { return KV{2 * Q::bytes}.next(buffer); }
  __device__ static KV v(int buffer) { return k(buffers + buffer); }
  // A phase of `full` ends when k and v of the buffer have arrived; of `empty` and `q_empty` when they have been read.
  __device__ static int full(int buffer) { return barriers + buffer * mbarrier_bytes; }
  __device__ static int empty(int buffer) { return full(buffers + buffer); }
  __device__ static int q_empty() { return full(2 * buffers); }
};

// A place in the ring of buffers, and the parity of the phase of its barriers.
template <int Buffers>
struct RingPlace {
  int buffer = 0;
  unsigned parity = 0;
  __device__ RingPlace after() const {
    return buffer + 1 < Buffers ? RingPlace{buffer + 1, parity} : RingPlace{0, parity ^ 1};
  }
};

// The consumers start their products in turns, so that one takes exponentials while the other multiplies.
__device__ inline void take_turn(int warpgroup) { sync_threads<wgmma_threads>(1 + warpgroup); }
__device__ inline void pass_turn(int warpgroup) { arrive_threads<wgmma_threads>(1 + warpgroup); }

// 128 queries of a head in a sequence, from q0 on. The last queries of every head come first, which have the most keys:
// the blocks end with short work tiles, about together.
struct WorkTile {
  int head, sequence, q0;
  __device__ WorkTile(const AttentionArgs& a, int index, int count) {
    const int heads = int(a.NH), sequences = int(a.B), tiles = count / (heads * sequences);
    head = index % heads, sequence = index / heads % sequences;
    q0 = (tiles - 1 - index / heads / sequences) * wgmma_rows;
  }
};

// out =, lse =. A block owns every gridDim.x-th work tile, a consumer warp 16 queries of it, a thread its elements of
// the warp's fragments.
template <int D>
__global__ void __launch_bounds__(producer_block_threads, 1)
    attention_forward_producer_wgmma_kernel(AttentionArgs a, float scale, int work_tiles) {
  if (!compiled_for_wgmma) return trap();
  using Tiles = ProducerTiles<D>;
  using Place = RingPlace<Tiles::buffers>;
  using Scores = Accumulator<1, Tiles::keys / 8>;
  using Keys = KeyTiles<Tiles::keys, plain_attention>;
  using KeyTile = decltype(std::declval<Keys>().first());
  const int HS = int(a.HS), T = int(a.T), first_query = int(a.first_query), queries = T - first_query;
  // The end of a work tile's queries, a position like its keys.
  auto end_of = [&](const WorkTile& w) { return first_query + min(queries, w.q0 + wgmma_rows); };
  auto keys_of = [&](const WorkTile& w) { return Keys(a, w.head, w.sequence * T, {}, first_query + w.q0, end_of(w)); };

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Tiles::buffers; buffer++)
      mbarrier_init(Tiles::full(buffer), producer_warps), mbarrier_init(Tiles::empty(buffer), consumer_warps);
    mbarrier_init(Tiles::q_empty(), consumer_warps);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    give_back_registers<producer_registers>();
    Place place, next_full;  // of the next tile to load, and to signal
    int loading = 0;         // tiles between them
    unsigned q_parity = 0;
    auto signal_full = [&] {
      copies_for_wgmma();
      arrive(Tiles::full(next_full.buffer));
      next_full = next_full.after(), loading--;
    };
    auto finish_loading = [&] {
      wait_for_copies();
      while (loading > 0) signal_full();
    };
    for (int i = int(blockIdx.x); i < work_tiles; i += int(gridDim.x)) {
      const WorkTile w(a, i, work_tiles);
      const Keys tiles = keys_of(w);
      const int end = end_of(w);
      finish_loading();  // else the consumers might wait for the last work tile's keys, and this for them to read q
      wait_for_phase(Tiles::q_empty(), q_parity ^ 1);
      q_parity ^= 1;
      load_tile_async<warpgroup_size>(Tiles::q(), a.q + w.sequence * queries * a.q_stride + w.head * HS, a.q_stride,
                                      w.q0, queries, HS);
      for (KeyTile tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
        wait_for_phase(Tiles::empty(place.buffer), place.parity ^ 1);
        const KVRows kv = tiles.rows(tile);
        load_tile_async<warpgroup_size>(Tiles::k(place.buffer), kv.k, kv.k_stride, tile.k0, end, HS);
        load_tile_async<warpgroup_size>(Tiles::v(place.buffer), kv.v, kv.v_stride, tile.k0, end, HS);
        commit_copies();
        place = place.after();
        if (++loading > Tiles::ahead) wait_for_copies<Tiles::ahead>(), signal_full();
      }
    }
    return finish_loading();
  }

  take_registers<consumer_registers>();
  const int warp = warp_index() - producer_warps, warpgroup = warpgroup_index() - 1;
  if (warpgroup == 1) pass_turn(0);
  Place place;  // of the tile whose probabilities are multiplied next
  for (int i = int(blockIdx.x); i < work_tiles; i += int(gridDim.x)) {
    const WorkTile w(a, i, work_tiles);
    const Keys tiles = keys_of(w);
    const int query = first_query + w.q0 + warp * 16, end = end_of(w);
    RegisterTile<1, D / 16> q_rows;
    Scores s;
    RegisterTile<1, Tiles::keys / 16> p;
    Accumulator<1, D / 8> acc = {};
    OnlineSoftmax<1, false> softmax;
    auto mask_scores = [&](KeyTile tile) {
      if (!tiles.keeps_all(query, query + 16, tile.k0, tile.k0 + Tiles::keys))
        mask(s, [&](int row, int column) { return tile.k0 + column > query + row; });
    };

    KeyTile tile = tiles.first();
    wait_for_phase(Tiles::full(place.buffer), place.parity);
    load_register_tile(q_rows, Tiles::q().from_row(warp * 16));
    arrive(Tiles::q_empty());
    take_turn(warpgroup);
    start_ABt(s, q_rows, Tiles::k(place.buffer));
    commit_products();
    pass_turn(1 - warpgroup);
    wait_for_products<0>(s);
    mask_scores(tile);
    softmax.raise_max(s);
    softmax.exponentials(s, scale * log2_e);
    p = to_floatX(s);
#pragma unroll 1
    for (tile = tiles.after(tile); tiles.contains(tile); tile = tiles.after(tile)) {
      const Place next = place.after();
      wait_for_phase(Tiles::full(next.buffer), next.parity);
      take_turn(warpgroup);
      start_ABt(s, q_rows, Tiles::k(next.buffer));
      commit_products();
      start_AB(acc, p, Tiles::v(place.buffer));
      commit_products();
      pass_turn(1 - warpgroup);
      wait_for_products<1>(s);  // all but the results
      mask_scores(tile);
      const ColumnVector<1> before = softmax.max;
      const bool grew = softmax.raise_max(s);
      if (grew) softmax.rescale_sums(before, scale * log2_e);
      softmax.exponentials(s, scale * log2_e);
      keep_here(s);
      wait_for_products<0>(acc, p);
      arrive(Tiles::empty(place.buffer));
      if (grew) softmax.rescale_rows(acc, before, scale * log2_e);
      p = to_floatX(s);
      place = next;
    }
    take_turn(warpgroup);
    start_AB(acc, p, Tiles::v(place.buffer));
    commit_products();
    pass_turn(1 - warpgroup);
    wait_for_products<0>(acc, p);
    arrive(Tiles::empty(place.buffer));
    place = place.after();
    store_outputs(a, scale, w.head, w.sequence, query, end, softmax, acc, Tiles::out().from_row(warp * 16));
  }
}
