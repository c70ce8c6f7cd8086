// Attention of a few queries at the end of a sequence, as when generation draws tokens: flash-decoding (Dao, Haziza,
// Massa, Sizov 2023). The kernels of attention_mma.h and attention_fma.h give a block a tile of queries, and here there
// is one tile; these give each block a tile of keys, so that a long cache is read by the whole GPU, and a second
// kernel merges what the blocks leave:
//
//   of tile i:   m_i = max s;  l_i = sum exp(s - m_i);  o_i = sum exp(s - m_i) v
//   m = max m_i;  out = sum_i exp(m_i - m) o_i / sum_i exp(m_i - m) l_i;  lse = m + log sum_i exp(m_i - m) l_i
//   a sink is one more tile: m_i is its score, l_i = 1 and o_i = 0
//
// The tiles have the same keys and are merged in the same order whatever runs beside, so the bits are always the same.
// All query heads of a K/V head are served by one read of it. Keys that none of them sees are not read.
//
// With relative positions each thread reads the row of r of its query and key straight from memory: a row serves one
// query of one head, so that a block has no other use for it.
//
// Products, sums and probabilities are fp32 in every precision.
#pragma once
#include <cmath>
#include "llmc/ops/attention_args.h"
#include "attention_tiles.h"
#include "tile.h"
#include "vec.h"

constexpr int decode_keys = 64, decode_threads = 128;
constexpr int decode_rows = 8;  // queries of query heads that a block works on at a time

// Where o_i (HS), m_i and l_i are, of a tile of keys and one query of a query head.
__device__ inline float* partial_of(const AttentionArgs& a, int64_t b, int head, int query, int source, int tile) {
  const int64_t queries = a.queries(), tiles = (a.T + decode_keys - 1) / decode_keys;
  return a.partials + ((((b * a.NH + head) * queries + query) * a.kv_per_head + source) * tiles + tile) * (a.HS + 2);
}

// Whether a query head may see a key of the tile in sequence b of T positions; the last `queries` are queries.
template <bool Documents>
__device__ inline bool sees_tile(const AttentionArgs& a, int64_t b, int head, int T, int tile) {
  const int first_query = T - int(a.queries()), end = (tile + 1) * decode_keys;
  if (Documents && a.first_keys[b * a.queries()] >= end) return false;
  return mask_of(a, head).sees_some(first_query, T, tile * decode_keys, end);
}

// Shared memory: the tile's k and v with 16 bytes after each row, so that neighbouring rows begin on other banks; q and
// the scores of `decode_rows` rows; and which keys are seen. With InTurn k and v have one place, for GPUs where a block
// cannot have that much: each eight rows load one after the other, and the results have the same bits.
template <bool InTurn>
struct DecodeMemory {
  static __host__ __device__ int stride(int HS) { return HS + 16 / int(sizeof(floatX)); }
  static size_t bytes(int HS) {
    const size_t rows = size_t(decode_rows * (HS + decode_keys)) * sizeof(float);
    return (InTurn ? 1 : 2) * size_t(decode_keys * stride(HS)) * sizeof(floatX) + rows + decode_keys * sizeof(int);
  }
  floatX *k, *v;
  float *q, *p;
  int* seen;

  __device__ explicit DecodeMemory(int HS) {
    k = reinterpret_cast<floatX*>(shared_memory), v = InTurn ? k : k + decode_keys * stride(HS);
    q = reinterpret_cast<float*>(v + decode_keys * stride(HS)), p = q + decode_rows * HS;
    seen = reinterpret_cast<int*>(p + decode_rows * decode_keys);
  }
};

// A row of a block: a query of one of the K/V head's query heads.
struct DecodeRow {
  int head, query;  // the query is number `query` of the sequence's
};
__device__ inline DecodeRow decode_row(const AttentionArgs& a, const KVHead& kv, int row) {
  const int queries = int(a.queries());
  return {a.query_heads[kv.first_query_head + row / queries], row % queries};
}
// Whether it sees a key, in sequence b of T positions.
template <bool Documents>
__device__ inline bool row_sees(const AttentionArgs& a, int64_t b, int T, const DecodeRow& row, int key) {
  if (Documents && key < a.first_keys[b * a.queries() + row.query]) return false;
  return mask_of(a, row.head).sees(T - int(a.queries()) + row.query, key);
}

// The tile's rows of k, v or both that some row of the block sees, and zeros for the others, which are not read: by
// asynchronous copies, so that many are on their way at a time. Neighbouring threads copy neighbouring 16 bytes. Its
// barrier lets all threads read what lay there before.
template <bool OfK, bool OfV, bool Documents, bool InTurn>
__device__ inline void load_decode_tile(const AttentionArgs& a, const KVHead& kv, const DecodeMemory<InTurn>& memory,
                                        const KeyRows& keys, int k0) {
  const int HS = int(a.HS), rows = kv.num_query_heads * int(a.queries());
  if (int(threadIdx.x) < decode_keys) {
    bool seen = false;
    for (int row = 0; row < rows && !seen; row++)
      seen = row_sees<Documents>(a, blockIdx.z, keys.T, decode_row(a, kv, row), k0 + int(threadIdx.x));
    memory.seen[threadIdx.x] = seen;
  }
  __syncthreads();
  constexpr int of_piece = 16 / int(sizeof(floatX));
  const int pieces = HS / of_piece, stride = memory.stride(HS);
  const int64_t first_row = int64_t(keys.first_row) + k0;
  for (int i = int(threadIdx.x); i < decode_keys * pieces; i += decode_threads) {
    const int key = i / pieces, channel = i % pieces * of_piece;
    auto copy = [&](floatX* tile, const floatX* x, int64_t x_stride) {
      const int to = int(reinterpret_cast<unsigned char*>(tile + key * stride + channel) - shared_memory);
      const bool seen = memory.seen[key];
      copy_async<16>(to, x + (seen ? (first_row + key) * x_stride + channel : 0), seen);
    };
    if constexpr (OfK) copy(memory.k, kv.k, kv.k_stride);
    if constexpr (OfV) copy(memory.v, kv.v, kv.v_stride);
  }
  commit_copies();
  wait_for_copies();
}

// q k^T of one row and one key of the tile.
template <class Query, class Key>
__device__ inline float decode_score(const Query* q, const Key* k, int HS) {
  float s = 0;
  for (int channel = 0; channel < HS; channel += 8) {
    float x[8], y[8];
    load8(x, q + channel);
    load8(y, k + channel);
    for (int c = 0; c < 8; c++) s += x[c] * y[c];
  }
  return s;
}

// What relative positions add to it, for a key that the row sees in a sequence of T positions.
__device__ inline float decode_relative_score(const AttentionArgs& a, int64_t b, int T, const DecodeRow& row, int key) {
  const int64_t C = a.NH * a.HS, queries = a.queries(), of_head = row.head * a.HS;
  const floatX* q = a.relative.q + (b * queries + row.query) * C + of_head;
  const floatX* r = a.relative.r + relative_row(a, T - int(queries) + row.query, key) * C + of_head;
  return decode_score(q, r, int(a.HS));
}

// Writes partials. A block owns a tile of 64 keys of one K/V head in one sequence, and goes through its query heads'
// rows eight at a time. Of the scores, a thread owns one key and every second row, of the softmax a warp whole rows,
// and of the results a thread single channels.
template <bool Relative, bool Documents, bool InTurn>
static __global__ void __launch_bounds__(decode_threads) attention_decode_kernel(AttentionArgs a, float to_exp2) {
  using Memory = DecodeMemory<InTurn>;
  const KVHead kv = a.kv_heads[blockIdx.y];
  const int HS = int(a.HS), tile = int(blockIdx.x), k0 = tile * decode_keys, stride = Memory::stride(HS);
  const KeyRows keys = key_rows_of(a, blockIdx.z);
  bool is_seen = false;
  for (int i = 0; i < kv.num_query_heads; i++)
    is_seen |= sees_tile<Documents>(a, blockIdx.z, a.query_heads[kv.first_query_head + i], keys.T, tile);
  if (!is_seen) return;
  const Memory memory(HS);
  if constexpr (!InTurn) load_decode_tile<true, true, Documents>(a, kv, memory, keys, k0);

  const int64_t queries = a.queries();
  const int all_rows = kv.num_query_heads * int(queries), warp = int(threadIdx.x) / warp_size,
            lane = int(threadIdx.x) % warp_size;
  for (int first = 0; first < all_rows; first += decode_rows) {
    const int rows = min(decode_rows, all_rows - first);
    if constexpr (InTurn) load_decode_tile<true, false, Documents>(a, kv, memory, keys, k0);
    for (int i = int(threadIdx.x); i < rows * HS; i += decode_threads) {
      const DecodeRow row = decode_row(a, kv, first + i / HS);
      memory.q[i] = to_float(a.q[(blockIdx.z * queries + row.query) * a.q_stride + row.head * HS + i % HS]);
    }
    __syncthreads();  // all threads' copies have arrived too, and p of the rows before these has been read
    const int key = int(threadIdx.x) % decode_keys;
    for (int r = int(threadIdx.x) / decode_keys; r < rows; r += decode_threads / decode_keys) {
      const DecodeRow row = decode_row(a, kv, first + r);
      float s = -INFINITY;
      if (row_sees<Documents>(a, blockIdx.z, keys.T, row, k0 + key)) {
        s = decode_score(memory.q + r * HS, memory.k + key * stride, HS);
        if constexpr (Relative) s += decode_relative_score(a, blockIdx.z, keys.T, row, k0 + key);
        s = lowered(s, mask_of(a, row.head).slope(), keys.T - int(queries) + row.query - (k0 + key));
      }
      memory.p[r * decode_keys + key] = s;
    }
    __syncthreads();
    if constexpr (InTurn) load_decode_tile<false, true, Documents>(a, kv, memory, keys, k0);
    auto partial = [&](int r) {
      const DecodeRow row = decode_row(a, kv, first + r);
      return partial_of(a, blockIdx.z, row.head, row.query, source_of(a, row.head, int(blockIdx.y)), tile);
    };
    for (int r = warp; r < rows; r += decode_threads / warp_size) {
      float *p = memory.p + r * decode_keys, *out = partial(r);
      const float max = warp_max(fmaxf(p[lane], p[lane + warp_size])), base = max == -INFINITY ? 0.0f : max;
      float sum = 0;
      for (int i = lane; i < decode_keys; i += warp_size) sum += p[i] = exp2f((p[i] - base) * to_exp2);
      sum = warp_sum(sum);
      if (lane == 0) out[HS] = max, out[HS + 1] = sum;
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < rows * HS; i += decode_threads) {
      const float* p = memory.p + i / HS * decode_keys;
      float sum = 0;
      for (int j = 0; j < decode_keys; j += 4) {
        float x[4];
        load4(x, p + j);
        for (int n = 0; n < 4; n++) sum += x[n] * to_float(memory.v[(j + n) * stride + i % HS]);
      }
      partial(i / HS)[i % HS] = sum;
    }
  }
}

// Computes out and lse from the partials. A block owns a query of one head in one sequence. Each thread has the weights
// of some tiles, which take the place of their m; then groups of threads, a thread for each channel, add up every
// merge_groups-th tile, and the first group adds up what the others have. How many groups there are is fixed, and so is
// the order of the sums.
constexpr int merge_groups = 8;

template <bool Documents>
static __global__ void __launch_bounds__(merge_groups* largest_head_size)
    attention_merge_kernel(AttentionArgs a, float scale, float to_exp2) {
  const int query = int(blockIdx.x), head = int(blockIdx.y), HS = int(a.HS);
  float* of_warp = reinterpret_cast<float*>(shared_memory);  // (32): for reductions
  float* out_of_group = of_warp + 32;                        // (merge_groups, HS)
  const int64_t queries = a.queries();
  const int T = key_rows_of(a, blockIdx.z).T, tiles = (T + decode_keys - 1) / decode_keys;
  int sources = 0;
  while (sources < a.kv_per_head && a.kv_of_head[head * a.kv_per_head + sources] >= 0) sources++;
  auto partial = [&](int i) { return partial_of(a, blockIdx.z, head, query, i / tiles, i % tiles); };
  auto for_each_tile = [&](auto visit) {
    for (int i = int(threadIdx.x); i < sources * tiles; i += int(blockDim.x))
      if (sees_tile<Documents>(a, blockIdx.z, head, T, i % tiles)) visit(partial(i));
  };
  const float sink = sink_of(a, head, scale);
  float max = sink, sum = 0;
  for_each_tile([&](const float* of_tile) { max = fmaxf(max, of_tile[HS]); });
  max = block_max(max, of_warp);
  const float base = max == -INFINITY ? 0.0f : max;
  if (threadIdx.x == 0) sum = exp2f((sink - base) * to_exp2);
  for_each_tile([&](float* of_tile) {
    of_tile[HS] = exp2f((of_tile[HS] - base) * to_exp2);
    sum += of_tile[HS] * of_tile[HS + 1];
  });
  sum = block_sum(sum, of_warp);  // all threads' weights have been written, too

  const int group = int(threadIdx.x) / HS, c = int(threadIdx.x) % HS;
  if (group < merge_groups) {
    float out = 0;
#pragma unroll 4
    for (int i = group; i < sources * tiles; i += merge_groups)
      if (sees_tile<Documents>(a, blockIdx.z, head, T, i % tiles)) out += partial(i)[HS] * partial(i)[c];
    out_of_group[group * HS + c] = out;
  }
  __syncthreads();
  if (group > 0) return;
  float out = 0;
  for (int g = 0; g < merge_groups; g++) out += out_of_group[g * HS + c];
  const bool sees_none = sum == 0;
  from_float(a.out[((blockIdx.z * queries + query) * a.NH + head) * HS + c], sees_none ? 0.0f : out / sum);
  if (c == 0) a.lse[(blockIdx.z * a.NH + head) * queries + query] = sees_none ? INFINITY : max * scale + logf(sum);
}

inline int64_t attention_partials(int64_t B, int64_t NH, int64_t HS, int64_t T, int64_t kv_per_head) {
  return B * NH * most_few_queries * kv_per_head * ceil_div(T, decode_keys) * (HS + 2);
}

inline bool takes_sequences(int64_t queries, int topk) { return queries <= most_few_queries && topk == 0; }

// Whether these kernels compute the attention. They do not choose keys by their scores, and do not write exact_out.
inline bool has_few_queries(const AttentionArgs& a) {
  return a.partials != nullptr && takes_sequences(a.queries(), a.topk) && a.exact_out == nullptr;
}

template <bool Documents>
void launch_attention_decode(const AttentionArgs& a) {
  const float scale = score_scale(a), to_exp2 = scale * log2_e;
  const dim3 tiles(unsigned(ceil_div(a.T, decode_keys)), unsigned(a.num_kv_heads), unsigned(a.B));
  for_tiles_that_fit(DecodeMemory<false>::bytes(int(a.HS)), [&](auto in_turn) {
    const auto kernel = a.relative.q != nullptr ? attention_decode_kernel<true, Documents, in_turn>
                                                : attention_decode_kernel<false, Documents, in_turn>;
    launch(kernel, tiles, decode_threads, DecodeMemory<in_turn>::bytes(int(a.HS)), a, to_exp2);
  });
  const dim3 results(unsigned(a.queries()), unsigned(a.NH), unsigned(a.B));
  const unsigned threads = unsigned(ceil_div(merge_groups * a.HS, warp_size) * warp_size);
  launch(attention_merge_kernel<Documents>, results, threads, (32 + merge_groups * size_t(a.HS)) * sizeof(float), a,
         scale, to_exp2);
}
