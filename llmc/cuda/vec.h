// Building blocks that every file of kernels includes: loads and stores of two, four and eight elements, sums over a
// warp and a block, the GPU and its launches.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "device.h"
#include "launch.h"
#include "llmc/ops/precision.h"

constexpr int warp_size = 32;
constexpr unsigned full_warp = 0xffffffffu;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many of N rows a block sums up in a reduction over rows: at least `least`, and so many that there are at most
// `most_blocks` blocks. The last block may have fewer.
constexpr int64_t rows_of_block(int64_t N, int64_t least, int64_t most_blocks) {
  const int64_t rows = ceil_div(N, most_blocks);
  return rows > least ? rows : least;
}

// A grid of one dimension whose blocks have `of_block` of `count` elements, rows or other things.
inline dim3 blocks_of(int64_t count, int64_t of_block) { return dim3(unsigned(ceil_div(count, of_block))); }

// Kernels in which a thread owns eight neighbouring elements, and neighbouring threads have neighbouring ones, so that
// a warp's accesses are coalesced: the first of this thread's.
constexpr int element_threads = 256;
__device__ inline int64_t first_element() { return (int64_t(blockIdx.x) * element_threads + threadIdx.x) * 8; }

// Launches such a kernel for `count` elements, a multiple of 8.
template <class... Params, class... Args>
void launch_elements(void (*kernel)(Params...), int64_t count, Args... args) {
  CHECK(count % 8 == 0);
  launch(kernel, blocks_of(count, 8 * element_threads), element_threads, 0, args...);
}

// Four consecutive elements as floats. p is aligned to the four of them.
__device__ inline void load4(float (&x)[4], const float* p) {
  const float4 a = *reinterpret_cast<const float4*>(p);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
}
__device__ inline void store4(float* p, const float (&x)[4]) {
  *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
}

// Eight consecutive elements as floats: one 16-byte access for 16 bits, two for float. p is aligned to the eight of
// them.
__device__ inline void load8(float (&x)[8], const float* p) {
  const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
  x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ inline void store8(float* p, const float (&x)[8]) {
  *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

// Conversions between float and floatX: none for float, rounded to nearest even for bf16 and fp16. fp16 makes infinity
// of what is beyond its range.
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline void from_float(float& y, float x) { y = x; }

#ifdef PRECISION_FP16
typedef __half float16;
typedef __half2 float16x2;
__device__ inline float16x2 rounded2(float a, float b) { return __floats2half2_rn(a, b); }
__host__ __device__ inline float to_float(__half x) { return __half2float(x); }
__host__ __device__ inline void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ inline void unpack2(float& a, float& b, unsigned two) {
  float16x2 halves;
  memcpy(&halves, &two, sizeof two);
  const float2 floats = __half22float2(halves);
  a = floats.x, b = floats.y;
}
#else
typedef __nv_bfloat16 float16;
typedef __nv_bfloat162 float16x2;
__device__ inline float16x2 rounded2(float a, float b) { return __floats2bfloat162_rn(a, b); }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }
// A bf16 is the upper half of a float.
__device__ inline void unpack2(float& a, float& b, unsigned two) {
  a = __uint_as_float(two << 16);
  b = __uint_as_float(two & 0xffff0000u);
}
#endif
// Two of 16 bits, a in the lower half.
__device__ inline unsigned pack2(float a, float b) {
  const float16x2 two = rounded2(a, b);
  unsigned bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}
// x rounded to floatX.
__device__ inline float rounded(float x) {
  floatX y;
  from_float(y, x);
  return to_float(y);
}
__device__ inline void load8(float (&x)[8], const float16* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  unpack2(x[0], x[1], v.x), unpack2(x[2], x[3], v.y), unpack2(x[4], x[5], v.z), unpack2(x[6], x[7], v.w);
}
__device__ inline void store8(float16* p, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(p) = make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
}
__device__ inline void load4(float (&x)[4], const float16* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  unpack2(x[0], x[1], v.x), unpack2(x[2], x[3], v.y);
}
__device__ inline void store4(float16* p, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(pack2(x[0], x[1]), pack2(x[2], x[3]));
}

// Two consecutive elements as floats. p is aligned to both of them.
__device__ inline void load2(float (&x)[2], const float* p) {
  const float2 a = *reinterpret_cast<const float2*>(p);
  x[0] = a.x, x[1] = a.y;
}
__device__ inline void store2(float* p, const float (&x)[2]) {
  *reinterpret_cast<float2*>(p) = make_float2(x[0], x[1]);
}
__device__ inline void load2(float (&x)[2], const float16* p) {
  unpack2(x[0], x[1], *reinterpret_cast<const unsigned*>(p));
}
__device__ inline void store2(float16* p, const float (&x)[2]) { *reinterpret_cast<unsigned*>(p) = pack2(x[0], x[1]); }

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Sums over the lanes of a warp, or over each half of it (lanes = 16), and so on: every lane gets the result. The order
// of the additions is fixed, and so are the bits.
template <int lanes = warp_size, class T>
__device__ inline T warp_sum(T x) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_warp, x, offset);
  return x;
}
template <int lanes = warp_size>
__device__ inline float warp_max(float x) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(full_warp, x, offset));
  return x;
}

// block_sum and block_max reduce x over a block of whole warps; every thread gets the result. `shared` holds one T per
// warp, and nothing else uses it meanwhile.
template <class T>
__device__ inline T block_sum(T x, T* shared) {
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size,
            warps = int(blockDim.x) / warp_size;
  x = warp_sum(x);
  __syncthreads();  // all threads have finished the last use of `shared`
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? shared[lane] : T(0));
}
__device__ inline float block_max(float x, float* shared) {
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size,
            warps = int(blockDim.x) / warp_size;
  x = warp_max(x);
  __syncthreads();
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_max(lane < warps ? shared[lane] : -INFINITY);
}

// The sum of x (count) in double, computed by a block of whole warps; every thread gets it. `shared` holds one double
// per warp. The order of the sum depends on count and the block's size alone.
template <class T>
__device__ inline double block_sum_of(const T* x, int64_t count, double* shared) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += double(x[i]);
  return block_sum(sum, shared);
}

// The softmax of scores that come one after the other, and a sum of terms by its weights.
struct RunningSoftmax {
  float highest = -INFINITY, total = 0;

  // Takes a score. A sum so far is to be multiplied by `old`; the score's own term by what this returns.
  __device__ float add(float score, float& old) {
    const float higher = fmaxf(highest, score), weight = expf(score - higher);
    old = expf(highest - higher), highest = higher;
    total = total * old + weight;
    return weight;
  }
};
