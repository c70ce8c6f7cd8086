// The forward pass of attention_wgmma.h with a warpgroup that only loads, as in FlashAttention-3 (Shah et al. 2024). A
// block is there as long as its multiprocessor, and takes 128 queries of a head after 128 queries: while two warpgroups
// end with the one, the third, the producer, has started to load the next. Barriers in shared memory say which buffers
// are full and which are empty, so that no warp waits for a copy of its own, and none keeps addresses: the producer
// gives most of its registers to the others. Which block takes what decides on no sum: the bits are the same for any
// number of blocks.
#pragma once
#include "attention_wgmma.h"

constexpr int producer_block_threads = warpgroup_size + wgmma_threads, producer_warps = warpgroup_size / warp_size,
              consumer_warps = wgmma_threads / warp_size;
// Registers of a thread after both have changed theirs; 65,536 of a multiprocessor / 384 allow 168 at the launch.
constexpr int producer_registers = 40, consumer_registers = 232;

template <int D>
struct ProducerTiles {
  static constexpr int keys = WgmmaForwardTiles<D>::keys, buffers = 5;
  // The producer tells of a tile when it has started this many more. The consumers wait for a tile with one buffer
  // not yet given back.
  static constexpr int ahead = buffers - 2;
  using Q = SplitTile<D, wgmma_rows>;
  using KV = SplitTile<D, keys>;
  static constexpr int barriers = 2 * Q::bytes + 2 * buffers * KV::bytes;         // q, what goes to out, k, v
  static constexpr size_t bytes = barriers + (2 * buffers + 1) * mbarrier_bytes;  // D = 64: 192 KB, 128: 224 KB

  __device__ static Q q() { return {0}; }
  __device__ static Q out() { return q().next(1); }
  __device__ static KV k(int buffer) { return KV{2 * Q::bytes}.next(buffer); }
  __device__ static KV v(int buffer) { return k(buffers + buffer); }
  // The barriers whose phases are: k and v have arrived; they have been read; q has been read.
  __device__ static int full(int buffer) { return barriers + buffer * mbarrier_bytes; }
  __device__ static int empty(int buffer) { return full(buffers + buffer); }
  __device__ static int q_empty() { return full(2 * buffers); }
};

// A place in the ring of buffers, and the parity of its barriers' phase.
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

// The 128 queries that a block takes as its item-th: the last ones of every head first, which have the most keys.
struct QueryItem {
  int head, sequence, q0;
  __device__ QueryItem(const AttentionArgs<floatX>& a, int item, int items) {
    const int heads = int(a.NH), sequences = int(a.B), tiles = items / (heads * sequences);
    head = item % heads, sequence = item / heads % sequences;
    q0 = (tiles - 1 - item / heads / sequences) * wgmma_rows;
  }
};

// out =, lse =, of items [0, items), of which a block owns every gridDim.x-th: a warp of the second and third
// warpgroup 16 queries, a thread its elements of the warp's fragments.
template <int D>
__global__ void __launch_bounds__(producer_block_threads, 1)
    attention_forward_producer_wgmma_kernel(AttentionArgs<floatX> a, float scale, int items) {
  if (!compiled_for_wgmma) return trap();
  using Tiles = ProducerTiles<D>;
  using Place = RingPlace<Tiles::buffers>;
  using Scores = Accumulator<1, Tiles::keys / 8>;
  using Keys = KeyTiles<Tiles::keys, floatX, plain_attention>;
  using KeyTile = decltype(std::declval<Keys>().first());
  const int HS = int(a.HS), T = int(a.T), first_query = int(a.first_query), queries = T - first_query;
  // The end of an item's queries, a position like its keys.
  auto end_of = [&](const QueryItem& i) { return first_query + min(queries, i.q0 + wgmma_rows); };
  auto keys_of = [&](const QueryItem& i) { return Keys(a, i.head, i.sequence * T, {}, first_query + i.q0, end_of(i)); };

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Tiles::buffers; buffer++)
      mbarrier_init(Tiles::full(buffer), producer_warps), mbarrier_init(Tiles::empty(buffer), consumer_warps);
    mbarrier_init(Tiles::q_empty(), consumer_warps);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    give_back_registers<producer_registers>();
    Place place, told;  // of the next tile; of the next one whose arrival is told
    int untold = 0;
    unsigned q_parity = 0;
    auto tell = [&] {
      copies_for_wgmma();
      arrive(Tiles::full(told.buffer));
      told = told.after(), untold--;
    };
    auto tell_all = [&] {
      wait_for_copies();
      while (untold > 0) tell();
    };
    for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
      const QueryItem i(a, item, items);
      const Keys tiles = keys_of(i);
      const int end = end_of(i);
      tell_all();  // the consumers come to the end of the last item, and read q, only with all of its tiles
      wait_for_phase(Tiles::q_empty(), q_parity ^ 1);
      q_parity ^= 1;
      load_tile_async<warpgroup_size>(Tiles::q(), a.q + i.sequence * queries * a.q_stride + i.head * HS, a.q_stride,
                                      i.q0, queries, HS);
      for (KeyTile tile = tiles.first(); tiles.contains(tile); tile = tiles.after(tile)) {
        wait_for_phase(Tiles::empty(place.buffer), place.parity ^ 1);
        const KVRows<floatX> kv = tiles.rows(tile);
        load_tile_async<warpgroup_size>(Tiles::k(place.buffer), kv.k, kv.k_stride, tile.k0, end, HS);
        load_tile_async<warpgroup_size>(Tiles::v(place.buffer), kv.v, kv.v_stride, tile.k0, end, HS);
        commit_copies();
        place = place.after();
        if (++untold > Tiles::ahead) wait_for_copies<Tiles::ahead>(), tell();
      }
    }
    return tell_all();
  }

  take_registers<consumer_registers>();
  const int warp = warp_index() - producer_warps, warpgroup = warpgroup_index() - 1;
  if (warpgroup == 1) pass_turn(0);
  Place place;
  for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
    const QueryItem i(a, item, items);
    const Keys tiles = keys_of(i);
    const int query = first_query + i.q0 + warp * 16, end = end_of(i);
    RegisterTile<1, D / 16> q_rows;
    Scores s;
    RegisterTile<1, Tiles::keys / 16> p;
    Accumulator<1, D / 8> acc = {};
    OnlineSoftmax<1, false> softmax;
    auto mask_scores = [&](KeyTile tile) {
      if (tiles.changes_some(query, 16, tile.k0, tile.k0 + Tiles::keys))
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
    store_outputs(a, scale, i.head, i.sequence, query, end, softmax, acc, Tiles::out().from_row(warp * 16));
  }
}
