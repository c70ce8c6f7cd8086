// LayerNorm and RMSNorm over the C channels of each of N rows: the operations of llmc/cpu/layernorm.h. C is a multiple
// of 8, at most 8,192. Statistics and sums are in fp32.
#pragma once
#include <algorithm>
#include <cstdint>
#include "llmc/ops/layernorm_args.h"
#include "column_sums.h"
#include "tile.h"
#include "vec.h"

// ----------------------------------------------------------------------------
// Forward

// A row of C floats that a warp keeps in shared memory: channels [i, i + 8) belong to lane i / 8 % 32. A lane reads
// back only what it has written itself, so no barrier is needed. The eight are stored as two halves, the lanes' first
// halves side by side, so that the 16-byte accesses of a warp are to consecutive addresses, without bank conflicts.
struct WarpRow {
  static constexpr int step = 8 * warp_size;  // channels that a warp accesses at once
  float4* mine;

  __host__ __device__ static constexpr size_t bytes(int64_t C) {
    return size_t(ceil_div(C, step) * step) * sizeof(float);
  }
  __device__ WarpRow(int warp, int lane, int C)
      : mine(reinterpret_cast<float4*>(shared_memory + size_t(warp) * bytes(C)) + lane) {}

  __device__ void set(int i, const float (&x)[8]) const {
    float4* half = mine + i / step * (step / 4);
    half[0] = make_float4(x[0], x[1], x[2], x[3]);
    half[warp_size] = make_float4(x[4], x[5], x[6], x[7]);
  }
  __device__ void get(float (&x)[8], int i) const {
    const float4* half = mine + i / step * (step / 4);
    const float4 a = half[0], b = half[warp_size];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
};

constexpr int layernorm_warps = 4;  // of a block, or fewer where their rows do not fit in its shared memory

// A block owns a row for each of its warps, a lane eight channels of every 256. Global memory is read once: the row
// stays in shared memory for the second pass, in which the variance is taken around the mean (without cancellation),
// and for the third, which normalises. With `adds` the row is a + b rounded to floatX, as residual holds it, so that a
// later LayerNorm of residual gives the same bits. For the same reason products and sums are written as fmaf: their
// rounding must not be the compiler's choice.
template <bool adds>
__global__ void __launch_bounds__(layernorm_warps* warp_size)
    layernorm_forward_kernel(LayerNormForward norm, floatX* residual, const floatX* a, const floatX* b) {
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size, C = int(norm.C);
  const int64_t n = int64_t(blockIdx.x) * (blockDim.x / warp_size) + warp, row = n * C;
  if (n >= norm.N) return;
  const WarpRow kept(warp, lane, C);
  float x[8];

  float sum = 0;
  for (int i = lane * 8; i < C; i += WarpRow::step) {
    load8(x, a + row + i);
    if constexpr (adds) {
      float y[8];
      load8(y, b + row + i);
      for (int j = 0; j < 8; j++) x[j] = rounded(x[j] + y[j]);
      store8(residual + row + i, x);
    }
    kept.set(i, x);
    for (int j = 0; j < 8; j++) sum += x[j];
  }
  const float m = norm.centers ? warp_sum(sum) / float(C) : 0;

  float squares = 0;
  for (int i = lane * 8; i < C; i += WarpRow::step) {
    kept.get(x, i);
    for (int j = 0; j < 8; j++) squares = fmaf(x[j] - m, x[j] - m, squares);
  }
  const float s = 1.0f / sqrtf(warp_sum(squares) / float(C) + norm.eps);

  for (int i = lane * 8; i < C; i += WarpRow::step) {
    float w[8], shift[8] = {};
    kept.get(x, i);
    load8(w, norm.weight + i);
    if (norm.bias != nullptr) load8(shift, norm.bias + i);
    for (int j = 0; j < 8; j++) x[j] = fmaf((x[j] - m) * s, w[j], shift[j]);
    store8(norm.out + row + i, x);
  }
  if (lane == 0) norm.mean[n] = m, norm.rstd[n] = s;
}

// ----------------------------------------------------------------------------
// Backward

// dinp (N, C) +=; partial (blocks, 2, C) = the blocks' dweight and dbias. A block owns a run of rows, a thread eight
// channels of all of them: its sums for dweight and dbias stay in registers, each element is read once, and no two
// threads write to one address. The means of a row, mean(g) and mean(g * xhat), go through shared memory: each warp
// stores its sums, and after a barrier a lane of each warp adds up one row's sums for one mean, warp by warp,
// divides, and hands the mean to the others. `together` rows share a barrier, and all their loads are issued before it;
// the sums alternate between two buffers, so that one barrier per group of rows is enough. With several `stages` the
// rows of the next groups are copied to shared memory meanwhile; a thread copies what it reads itself.
template <int together, int threads, int stages>
__global__ void __launch_bounds__(threads)
    layernorm_backward_kernel(LayerNormBackward norm, float* partial, int rows_per_block) {
  const int64_t N = norm.N;
  const int C = int(norm.C);
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size,
            warps = int(blockDim.x) / warp_size;
  float* sums = reinterpret_cast<float*>(shared_memory);  // (2, warps, together, 2): of g and of g * xhat
  const int channel = int(threadIdx.x) * 8;
  const int64_t first = int64_t(blockIdx.x) * rows_per_block;
  const int rows = first + rows_per_block < N ? rows_per_block : int(N - first);
  float w[8] = {}, dw[8] = {}, db[8] = {};
  if (channel < C) load8(w, norm.weight + channel);
  const int copies = 4 * warps * together * int(sizeof(float)) + channel * int(sizeof(floatX));
  auto copy_of = [&](int group, int r, int tensor) {
    return copies + ((group % stages * together + r) * 3 + tensor) * C * int(sizeof(floatX));
  };
  auto start_loading = [&](int group) {
    for (int r = 0; r < together; r++) {
      if (channel >= C || group * together + r >= rows) continue;
      const int64_t at = (first + group * together + r) * C + channel;
      copy8_async(copy_of(group, r, 0), norm.dout + at);
      copy8_async(copy_of(group, r, 1), norm.inp + at);
      copy8_async(copy_of(group, r, 2), norm.dinp + at);
    }
    commit_copies();
  };
  for (int group = 0; group < stages - 1; group++) start_loading(group);

  for (int row = 0; row < rows; row += together) {
    // Rows past the end count as 0.
    float d[together][8] = {}, xhat[together][8] = {}, dx[together][8] = {}, s[together] = {};
    if constexpr (stages > 1) start_loading(row / together + stages - 1), wait_for_copies<stages - 1>();
#pragma unroll
    for (int r = 0; r < together; r++) {
      if (channel >= C || row + r >= rows) continue;
      const int64_t n = first + row + r, at = n * C + channel;
      if constexpr (stages > 1) {
        load8(d[r], shared_elements(copy_of(row / together, r, 0)));
        load8(xhat[r], shared_elements(copy_of(row / together, r, 1)));
        load8(dx[r], shared_elements(copy_of(row / together, r, 2)));
      } else {
        load8(d[r], norm.dout + at);
        load8(xhat[r], norm.inp + at);
        load8(dx[r], norm.dinp + at);
      }
      s[r] = norm.rstd[n];
      const float m = norm.mean[n];
      for (int j = 0; j < 8; j++) xhat[r][j] = (xhat[r][j] - m) * s[r];
    }
    float* buffer = sums + row / together % 2 * warps * together * 2;
#pragma unroll
    for (int r = 0; r < together; r++) {
      float g = 0, gx = 0;
      for (int j = 0; j < 8; j++) {
        dw[j] += d[r][j] * xhat[r][j];
        db[j] += d[r][j];
        d[r][j] *= w[j];  // from here on g
        g += d[r][j];
        gx += d[r][j] * xhat[r][j];
      }
      g = warp_sum(g), gx = warp_sum(gx);
      if (lane == 0) reinterpret_cast<float2*>(buffer)[warp * together + r] = make_float2(g, gx);
    }
    __syncthreads();
    float mean_of_lane = 0;  // lane 2 r: of g in row r; lane 2 r + 1: of g * xhat
    for (int other = 0; other < warps; other++) mean_of_lane += buffer[other * together * 2 + lane % (together * 2)];
    mean_of_lane /= float(C);
#pragma unroll
    for (int r = 0; r < together; r++) {
      const float g = norm.centers ? __shfl_sync(full_warp, mean_of_lane, 2 * r) : 0,
                  gx = __shfl_sync(full_warp, mean_of_lane, 2 * r + 1);
      if (channel >= C || row + r >= rows) continue;
      for (int j = 0; j < 8; j++) dx[r][j] += s[r] * (d[r][j] - g - xhat[r][j] * gx);
      store8(norm.dinp + (first + row + r) * C + channel, dx[r]);
    }
  }
  if (channel >= C) return;
  store8(partial + int64_t(blockIdx.x) * 2 * C + channel, dw);
  store8(partial + int64_t(blockIdx.x) * 2 * C + C + channel, db);
}

// A thread owns eight elements.
__global__ void __launch_bounds__(element_threads)
    residual_sum_kernel(floatX* residual, const floatX* a, const floatX* b, int64_t n) {
  const int64_t i = first_element();
  if (i >= n) return;
  float x[8], y[8];
  load8(x, a + i);
  load8(y, b + i);
  for (int j = 0; j < 8; j++) x[j] += y[j];
  store8(residual + i, x);
}

// ----------------------------------------------------------------------------
// Launchers

template <bool adds>
void launch_layernorm_forward(const LayerNormForward& norm, floatX* residual, const floatX* a, const floatX* b) {
  CHECK(norm.C % 8 == 0 && norm.C <= largest_channels);
  const int64_t warps = std::min<int64_t>(layernorm_warps, gpu().shared_bytes / WarpRow::bytes(norm.C));
  launch(layernorm_forward_kernel<adds>, blocks_of(norm.N, warps), unsigned(warps * warp_size),
         size_t(warps) * WarpRow::bytes(norm.C), norm, residual, a, b);
}

inline void layernorm_forward(const LayerNormForward& norm, const floatX* inp) {
  launch_layernorm_forward<false>(norm, nullptr, inp, nullptr);
}

// The same bits as residual_sum and then layernorm_forward give.
inline void residual_layernorm_forward(const LayerNormForward& norm, floatX* residual, const floatX* a,
                                       const floatX* b) {
  launch_layernorm_forward<true>(norm, residual, a, b);
}

inline void residual_sum(floatX* residual, const floatX* a, const floatX* b, int64_t n) {
  launch_elements(residual_sum_kernel, n, residual, a, b, n);
}

// How many floats of scratch layernorm_backward takes from the memory plan: none. Its partial sums are in the GPU's own
// scratch, which the plan counts as a workspace and which other reductions use in turn.
inline int64_t layernorm_backward_scratch(int64_t, int64_t) { return 0; }

// The most threads of a block that has two rows in flight. The kernel's registers allow as many threads on a
// multiprocessor, of one block or of several smaller ones.
constexpr int two_row_threads = 640;

// How many rows a block of layernorm_backward takes: so many that all blocks run at once, with none left for a second
// wave, and their partial sums have room in device_scratch, but at least 16, so that these are few.
inline int64_t layernorm_backward_rows(int64_t N, int64_t C, int64_t multiprocessors) {
  const int64_t threads = ceil_div(C, 8 * warp_size) * warp_size,
                room = int64_t(Gpu::scratch_bytes / sizeof(float)) / (2 * C);
  const int64_t at_once = multiprocessors * std::max<int64_t>(1, two_row_threads / threads);
  return rows_of_block(N, 16, std::min(at_once, room));
}

// dinp, dweight and dbias +=, by the formulas of llmc/cpu/layernorm.h. How the rows are divided among blocks,
// and with it the order of the sums for dweight and dbias, depends on N, C and how many multiprocessors the GPU has.
// norm.scratch is not used.
inline void layernorm_backward(const LayerNormBackward& norm) {
  const int64_t N = norm.N, C = norm.C;
  CHECK(C % 8 == 0 && C <= largest_channels);
  const int64_t rows_per_block = layernorm_backward_rows(N, C, gpu().multiprocessors);
  const int64_t blocks = ceil_div(N, rows_per_block), warps = ceil_div(C, 8 * warp_size);
  float* partial = device_scratch<float>(blocks * 2 * C);

  auto bytes = [&](int together, int stages) {
    return size_t(2 * warps * together) * sizeof(float2) +
           size_t((stages > 1 ? stages : 0) * together * 3 * C) * sizeof(floatX);
  };
  auto run = [&](auto kernel, int together, int stages = 1) {
    launch(kernel, unsigned(blocks), unsigned(warps * warp_size), bytes(together, stages), norm, partial,
           rows_per_block);
  };
  const bool has_two_rows = warps * warp_size <= two_row_threads;
  constexpr int stages = 3;
  const size_t blocks_at_once = std::max<size_t>(1, two_row_threads / size_t(warps * warp_size));
  if (gpu().candidates.norm && has_two_rows && blocks_at_once * bytes(2, stages) <= gpu().shared_bytes)
    run(layernorm_backward_kernel<2, two_row_threads, stages>, 2, stages);
  else if (has_two_rows) run(layernorm_backward_kernel<2, two_row_threads, 1>, 2);
  else run(layernorm_backward_kernel<1, 1024, 1>, 1);  // 1,024 threads have 64 registers each, enough for one row
  add_column_sums(norm.dweight, norm.dbias, partial, blocks, 2 * C, C);
}
