// Attention by locality-sensitive hashing of the last positions of sequences in a cache: each query looks at the
// buckets of all positions before it, and reads the rows of those alone that share one.
#pragma once
#include <cmath>
#include "llmc/ops/lsh.h"
#include "vec.h"

constexpr int lsh_decode_warps = 8, lsh_decode_threads = lsh_decode_warps * warp_size;

// A block owns a head of a query, a warp every eighth group of 32 positions before the query. A lane looks at one
// position of the group, and owns four channels. The warps' sums are added up in their order: the bits are the same.
__global__ void __launch_bounds__(lsh_decode_threads) lsh_decode_kernel(LshDecode a, float scale) {
  const int64_t NH = a.shape.NH, HS = a.shape.HS, C = a.shape.C(), Q = a.queries();
  const int64_t head = blockIdx.y, query = blockIdx.x;
  const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size, channel = lane * 4;
  const KeyRows keys = a.keys_of(query / Q);
  const int t = int(keys.T - Q + query % Q);
  const bool has_channels = channel < int(HS);
  auto row = [&](int j) { return a.qv + (keys.first_row + j) * 2 * C + head * HS + channel; };
  auto buckets = [&](int j) { return a.buckets + ((keys.first_row + j) * NH + head) * a.shape.rounds; };
  float q[4] = {};
  if (has_channels) load4(q, row(t));

  RunningSoftmax softmax;  // of the warp's keys
  float sum_of_values[4] = {}, old;
  for (int j0 = warp * warp_size; j0 < t; j0 += lsh_decode_threads) {
    const int own = j0 + lane;
    unsigned seen = __ballot_sync(full_warp, own < t && share_earlier_bucket(buckets(t), buckets(own), a.shape.rounds));
    for (; seen != 0; seen &= seen - 1) {
      const int j = j0 + __ffs(int(seen)) - 1;
      float k[4] = {}, v[4] = {}, product = 0, square = 0;
      if (has_channels) load4(k, row(j)), load4(v, row(j) + C);
      for (int c = 0; c < 4; c++) product += q[c] * k[c], square += k[c] * k[c];
      product = warp_sum(product), square = warp_sum(square);
      const float weight = softmax.add(square > 0 ? product / sqrtf(square) * scale : 0.0f, old);
      for (int c = 0; c < 4; c++) sum_of_values[c] = sum_of_values[c] * old + weight * v[c];
    }
  }
  float *maxima = reinterpret_cast<float*>(shared_memory), *sums = maxima + lsh_decode_warps,
        *values = sums + lsh_decode_warps;  // (warps, HS)
  if (lane == 0) maxima[warp] = softmax.highest, sums[warp] = softmax.total;
  if (has_channels) store4(values + warp * HS + channel, sum_of_values);
  __syncthreads();
  if (warp > 0 || !has_channels) return;
  float max = -INFINITY, sum = 0, out[4] = {};
  for (int w = 0; w < lsh_decode_warps; w++) max = fmaxf(max, maxima[w]);
  for (int w = 0; w < lsh_decode_warps && max > -INFINITY; w++) {
    const float factor = expf(maxima[w] - max);
    sum += factor * sums[w];
    for (int c = 0; c < 4; c++) out[c] += factor * values[w * HS + channel + c];
  }
  if (max == -INFINITY) load4(out, row(t) + C), sum = 1;  // it sees itself alone
  for (float& x : out) x /= sum;
  store4(a.out + (query * NH + head) * HS + channel, out);
}
