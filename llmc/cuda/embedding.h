// Token and position embeddings: the operations of llmc/cpu/embedding.h. C is a multiple of 8, and `tokens` is 16-byte
// aligned.
//
// Tokens repeat, so several rows of dout are added to one row of dwte. Atomics would add them in an order that changes
// from run to run; here each token that occurs has one owner, which adds its rows in an order that their positions fix.
#pragma once
#include <cstdint>
#include "column_sums.h"
#include "llmc/ops/rows.h"
#include "vec.h"

// The threads of a row: one per eight channels, in whole warps, up to 256.
__host__ __device__ constexpr int64_t embedding_threads(int64_t C) {
  const int64_t threads = ceil_div(C / 8, warp_size) * warp_size;
  return threads < 256 ? threads : 256;
}

// out = rows of x, in order or those of the tokens, + wse + wpe[positions], without the terms that are null. x may be
// out. A block owns a row of out, a thread eight channels of it, so that a warp's loads and stores are coalesced.
__global__ void embedding_forward_kernel(floatX* out, const floatX* x, const int* tokens, const floatX* wse,
                                         const floatX* wpe, RowPositions positions, int64_t C) {
  const int64_t n = blockIdx.x;
  const floatX* row = x + (tokens != nullptr ? tokens[n] : n) * C;
  for (int64_t i = threadIdx.x * 8; i < C; i += blockDim.x * 8) {
    float sum[8], y[8];
    load8(sum, row + i);
    if (wse != nullptr) {
      load8(y, wse + i);
      for (int j = 0; j < 8; j++) sum[j] += y[j];
    }
    if (wpe != nullptr) {
      load8(y, wpe + positions[n] * C + i);
      for (int j = 0; j < 8; j++) sum[j] += y[j];
    }
    store8(out + n * C + i, sum);
  }
}

constexpr int wte_threads = 256, wte_warps = wte_threads / warp_size;
constexpr int wte_round = 4 * wte_threads;  // positions that a block compares at once: four per thread
constexpr int no_token = -1;

// tokens[i, i + 4), i a multiple of 4; no_token from position `end` on.
__device__ inline int4 load_tokens(const int* tokens, int64_t i, int64_t end) {
  if (i + 4 <= end) return *reinterpret_cast<const int4*>(tokens + i);
  return make_int4(i < end ? tokens[i] : no_token, i + 1 < end ? tokens[i + 1] : no_token,
                   i + 2 < end ? tokens[i + 2] : no_token, no_token);
}

// The positions between which a token occurs, so that a search for it can be short. A token's slot is its remainder by
// token_slots, so that in vocabularies up to this size each has its own.
constexpr int token_slots = 1 << 16;

__host__ __device__ constexpr int slot_of(int token) { return token % token_slots; }

// bounds (2, token_slots) = of each slot the first position of its tokens, and how far their last one is from the end:
// both are minima, which begin as the largest unsigned, all bits 1.
__global__ void token_bounds_kernel(unsigned* bounds, const int* tokens, int64_t N) {
  const int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (n >= N) return;
  atomicMin(bounds + slot_of(tokens[n]), unsigned(n));
  atomicMin(bounds + token_slots + slot_of(tokens[n]), unsigned(N - 1 - n));
}

// dwte += . A block owns the token at position n, unless the token has occurred before: then it returns. The owner
// searches the positions between the bounds of its slot in rounds of 1,024, collects its token's own in shared
// memory in ascending order, and adds their rows. A thread owns eight channels of every k-th row, where the block has k
// times as many threads as a row has eight channels, and has several loads in flight; the k sums are added in their
// order.
__global__ void __launch_bounds__(wte_threads)
    embedding_backward_wte_kernel(float* dwte, const floatX* dout, const int* tokens, const unsigned* bounds, int64_t N,
                                  int64_t C) {
  float* sums = reinterpret_cast<float*>(shared_memory);                  // (wte_threads, 8)
  int* matches_of_warp = reinterpret_cast<int*>(sums + 8 * wte_threads);  // (warps)
  int* matches = matches_of_warp + wte_warps;                             // (wte_round): positions within the round
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size, mine = int(threadIdx.x) * 4;
  const int64_t n = blockIdx.x;
  const int token = tokens[n];
  const int64_t earliest = bounds[slot_of(token)], end = N - bounds[token_slots + slot_of(token)];

  for (int64_t first = earliest / wte_round * wte_round; first < n; first += wte_round) {
    const int4 t = load_tokens(tokens, first + mine, n);
    if (__syncthreads_or(t.x == token || t.y == token || t.z == token || t.w == token)) return;
  }

  const int row_threads = int(embedding_threads(C)), groups = wte_threads / row_threads,
            group = int(threadIdx.x) / row_threads, thread = int(threadIdx.x) % row_threads;
  for (int64_t first = n / wte_round * wte_round; first < end; first += wte_round) {  // before n there is no match
    const int4 t = load_tokens(tokens, first + mine, N);
    const bool match[4] = {t.x == token, t.y == token, t.z == token, t.w == token};
    if (!__syncthreads_or(match[0] || match[1] || match[2] || match[3])) continue;

    int index = 0, in_warp = 0;  // matches in lower lanes, then also in lower warps; matches in this warp
    for (int j = 0; j < 4; j++) {
      const unsigned lanes = __ballot_sync(full_warp, match[j]);
      index += __popc(lanes & ((1u << lane) - 1));
      in_warp += __popc(lanes);
    }
    if (lane == 0) matches_of_warp[warp] = in_warp;
    __syncthreads();
    int count = 0;
    for (int w = 0; w < wte_warps; w++) {
      if (w == warp) index += count;
      count += matches_of_warp[w];
    }
    for (int j = 0; j < 4; j++)
      if (match[j]) matches[index++] = mine + j;
    __syncthreads();

    const int used = min(groups, count);
    for (int64_t i = thread * 8; i < C; i += row_threads * 8) {  // once, if there are several groups
      float sum[8] = {};
      if (group == 0) load8(sum, dwte + token * C + i);
#pragma unroll 8
      for (int k = group < groups ? group : count; k < count; k += groups) {  // the threads after the last group: none
        float x[8];
        load8(x, dout + (first + matches[k]) * C + i);
        for (int j = 0; j < 8; j++) sum[j] += x[j];
      }
      if (used > 1) store8(sums + 8 * int(threadIdx.x), sum);
      else if (group == 0) store8(dwte + token * C + i, sum);
    }
    if (used == 1) continue;
    __syncthreads();
    if (group > 0 || thread * 8 >= C) continue;
    float sum[8];
    load8(sum, sums + 8 * thread);
    for (int g = 1; g < used; g++) {
      float x[8];
      load8(x, sums + 8 * (g * row_threads + thread));
      for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    store8(dwte + token * C + thread * 8, sum);
  }
}

inline dim3 embedding_block(int64_t C) {
  CHECK(C % 8 == 0);
  return dim3(unsigned(embedding_threads(C)));
}

inline void embedding_forward(floatX* out, const int* tokens, const RowPositions& positions, const floatX* wte,
                              const floatX* wpe, int64_t N, int64_t C) {
  launch(embedding_forward_kernel, unsigned(N), embedding_block(C), 0, out, wte, tokens, nullptr, wpe, positions, C);
}

inline void add_coordinates(floatX* out, const floatX* x, const floatX* wse, const floatX* wpe,
                            const RowPositions& positions, int64_t N, int64_t C) {
  launch(embedding_forward_kernel, unsigned(N), embedding_block(C), 0, out, x, nullptr, wse, wpe, positions, C);
}

inline void position_backward(float* dwpe, const floatX* dout, int64_t B, int64_t T, int64_t C) {
  CHECK(C % 8 == 0);
  launch_elements(sum_of_sequences_kernel<true, float, floatX>, T * C, dwpe, dout, B, T * C);
}

inline void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int64_t B, int64_t T,
                               int64_t C) {
  CHECK(uintptr_t(tokens) % 16 == 0);
  if (dwpe != nullptr) position_backward(dwpe, dout, B, T, C);
  const int64_t N = B * T;
  CHECK(N <= INT32_MAX);
  unsigned* bounds = device_scratch<unsigned>(2 * token_slots);
  device_memset(bounds, 0xff, 2 * token_slots * sizeof(unsigned));
  launch(token_bounds_kernel, blocks_of(N, wte_threads), wte_threads, 0, bounds, tokens, N);
  launch(embedding_backward_wte_kernel, unsigned(N), wte_threads,
         (8 * wte_threads + wte_warps + wte_round) * sizeof(float), dwte, dout, tokens, bounds, N, C);
}
