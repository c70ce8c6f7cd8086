// Attention of the reference model (reference.h), for one head: q (B, T, hs), k and v (B, S * K, hs), where key s * K +
// j is position j of source s, and an attention map (B, T, S * K), zero where a query does not see a key.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#include "dev/test/reference/layers.h"

namespace reference {

// map[t] = softmax of (q[t].k[j] + of_distances[t,j]) / sqrt(hs) over the keys j that t sees: the keys in `visible` (B,
// T, K), the same for every source, and among these, where topk > 0, the topk with the highest scores, of equal ones
// the first. All zero if t sees none. of_distances (B, T, K), the same for every source; empty: zeros.
// sink: with `sinks` one more score, whose probability is not in the map; null: there is none.
template <class Real>
Array<Real> attention_map(const Array<Real>& q, const Array<Real>& k, const Array<Real>& of_distances,
                          const std::vector<bool>& visible, int topk, const Real* sink, int64_t B, int64_t T,
                          int64_t hs) {
  const int64_t keys = k.size() / (B * hs), K = visible.size() / (B * T);
  Array<Real> map(B * T * keys), scores(keys);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      std::vector<int64_t> seen;
      for (int64_t j = 0; j < keys; j++) {
        if (!visible[(b * T + t) * K + j % K]) continue;
        seen.push_back(j);
        Real dot = of_distances.empty() ? 0 : of_distances[(b * T + t) * K + j % K];
        for (int64_t i = 0; i < hs; i++) dot += q[(b * T + t) * hs + i] * k[(b * keys + j) * hs + i];
        scores[j] = dot / std::sqrt(Real(hs));
      }
      if (topk > 0 && int64_t(seen.size()) > topk) {
        std::stable_sort(seen.begin(), seen.end(), [&](int64_t i, int64_t j) { return scores[i] > scores[j]; });
        seen.resize(topk);
      }
      if (seen.empty()) continue;
      Real* p = &map[(b * T + t) * keys];
      Real largest = scores[seen[0]], sum = 0;
      if (sink) largest = std::max(largest, *sink);
      for (int64_t j : seen) largest = std::max(largest, scores[j]);
      if (sink) sum = std::exp(*sink - largest);
      for (int64_t j : seen) sum += p[j] = std::exp(scores[j] - largest);
      for (int64_t j : seen) p[j] /= sum;
    }
  }
  return map;
}

// `sinks`: the gradient of a head's sink, whose probability is what the map leaves of 1.
template <class Real>
Real sink_gradient(const Array<Real>& map, const Array<Real>& d_map, int64_t queries) {
  const int64_t keys = map.size() / queries;
  Real d_sink = 0;
  for (int64_t t = 0; t < queries; t++) {
    Real rest = 1, mean_d_p = 0;
    for (int64_t j = t * keys; j < (t + 1) * keys; j++) rest -= map[j], mean_d_p += map[j] * d_map[j];
    d_sink -= rest * mean_d_p;
  }
  return d_sink;
}

// `alibi`: what is added to the scores of head i, (B, T, K) of K = m + T keys, before they are scaled by 1/sqrt(hs).
template <class Real>
Array<Real> slope_scores(int i, int heads, int64_t B, int64_t T, int64_t K, int64_t hs) {
  int n = 1;  // the largest power of two up to `heads`
  while (n * 2 <= heads) n *= 2;
  const double exponent = i < n ? 8.0 * (i + 1) / n : 8.0 * (2 * (i - n) + 1) / (2 * n);
  Array<Real> scores(B * T * K);
  for (int64_t at = 0; at < B * T * K; at++)
    scores[at] = Real(-std::pow(2.0, -exponent) * double(K - T + at / K % T - at % K) * std::sqrt(double(hs)));
  return scores;
}

// d_q, d_k, d_of_distances (=): d_score = p * (d_p - sum_j p d_p), which is zero for keys that are not seen, and
// through it the others. K: keys of a source.
template <class Real>
void attention_map_backward(const Array<Real>& q, const Array<Real>& k, const Array<Real>& map,
                            const Array<Real>& d_map, Array<Real>& d_q, Array<Real>& d_k, Array<Real>& d_of_distances,
                            int64_t B, int64_t T, int64_t K, int64_t hs) {
  const int64_t keys = k.size() / (B * hs);
  d_q.assign(q.size(), 0);
  d_k.assign(k.size(), 0);
  d_of_distances.assign(B * T * K, 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      const Real* p = &map[(b * T + t) * keys];
      const Real* d_p = &d_map[(b * T + t) * keys];
      Real mean_d_p = 0;
      for (int64_t j = 0; j < keys; j++) mean_d_p += p[j] * d_p[j];
      for (int64_t j = 0; j < keys; j++) {
        const Real d_dot = p[j] * (d_p[j] - mean_d_p) / std::sqrt(Real(hs));
        d_of_distances[(b * T + t) * K + j % K] += d_dot;
        for (int64_t i = 0; i < hs; i++) d_q[(b * T + t) * hs + i] += d_dot * k[(b * keys + j) * hs + i];
        for (int64_t i = 0; i < hs; i++) d_k[(b * keys + j) * hs + i] += d_dot * q[(b * T + t) * hs + i];
      }
    }
  }
}

// out[t] = sum_j map[t,j] v[j]: (B, T, hs).
template <class Real>
Array<Real> apply_map(const Array<Real>& map, const Array<Real>& v, int64_t B, int64_t T, int64_t hs) {
  const int64_t keys = v.size() / (B * hs);
  Array<Real> out(B * T * hs);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j < keys; j++)
        for (int64_t i = 0; i < hs; i++)
          out[(b * T + t) * hs + i] += map[(b * T + t) * keys + j] * v[(b * keys + j) * hs + i];
  return out;
}

// d_map += d_out[t].v[j], d_v (=) sum_t map[t,j] d_out[t].
template <class Real>
void apply_map_backward(const Array<Real>& map, const Array<Real>& v, const Array<Real>& d_out, Array<Real>& d_map,
                        Array<Real>& d_v, int64_t B, int64_t T, int64_t hs) {
  const int64_t keys = v.size() / (B * hs);
  d_v.assign(v.size(), 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j < keys; j++) {
        for (int64_t i = 0; i < hs; i++) {
          d_map[(b * T + t) * keys + j] += d_out[(b * T + t) * hs + i] * v[(b * keys + j) * hs + i];
          d_v[(b * keys + j) * hs + i] += map[(b * T + t) * keys + j] * d_out[(b * T + t) * hs + i];
        }
      }
    }
  }
}

// `rope`: x[t] of a head, rotated by the angles direction * (first + t) * base^(-2i/hs); direction -1 is the backward
// pass. x (B, T, hs), or with S sources (B, S * T, hs).
template <class Real>
Array<Real> rotate(const Array<Real>& x, double base, int direction, int64_t first, int64_t T, int64_t hs) {
  Array<Real> out(x.size());
  for (int64_t row = 0; row < int64_t(x.size()) / hs; row++) {
    const int64_t t = first + row % T, half = hs / 2;
    for (int64_t i = 0; i < half; i++) {
      const Real angle = Real(direction * double(t) * std::pow(base, -2.0 * double(i) / double(hs)));
      const Real a = x[row * hs + i], b = x[row * hs + half + i];
      out[row * hs + i] = a * std::cos(angle) - b * std::sin(angle);
      out[row * hs + half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return out;
}

// `qknorm`: each row of x (any, hs) divided by r = sqrt(mean(x^2) + 1e-6).
template <class Real>
Array<Real> normed_rows(const Array<Real>& x, int64_t hs) {
  Array<Real> out(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real mean = Real(1e-6);
    for (int64_t i = 0; i < hs; i++) mean += x[first + i] * x[first + i] / hs;
    for (int64_t i = 0; i < hs; i++) out[first + i] = x[first + i] / std::sqrt(mean);
  }
  return out;
}

// d_x = (d_out - x (x . d_out) / (hs r^2)) / r
template <class Real>
Array<Real> normed_rows_backward(const Array<Real>& x, const Array<Real>& d_out, int64_t hs) {
  Array<Real> d_x(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real mean = Real(1e-6), dot = 0;
    for (int64_t i = 0; i < hs; i++) mean += x[first + i] * x[first + i] / hs, dot += x[first + i] * d_out[first + i];
    for (int64_t i = 0; i < hs; i++)
      d_x[first + i] = (d_out[first + i] - x[first + i] * dot / hs / mean) / std::sqrt(mean);
  }
  return d_x;
}

// `lsh`: each row of x (any, hs) divided by its norm.
template <class Real>
Array<Real> unit_rows(const Array<Real>& x, int64_t hs) {
  Array<Real> out(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real squares = 0;
    for (int64_t i = 0; i < hs; i++) squares += x[first + i] * x[first + i];
    for (int64_t i = 0; i < hs; i++) out[first + i] = x[first + i] / std::sqrt(squares);
  }
  return out;
}

// With y = x / |x| of a row: d_x = (d_y - y (y . d_y)) / |x|.
template <class Real>
Array<Real> unit_rows_backward(const Array<Real>& x, const Array<Real>& d_out, int64_t hs) {
  Array<Real> d_x(x.size());
  for (size_t first = 0; first < x.size(); first += hs) {
    Real squares = 0, dot = 0;
    for (int64_t i = 0; i < hs; i++) squares += x[first + i] * x[first + i], dot += x[first + i] * d_out[first + i];
    for (int64_t i = 0; i < hs; i++)
      d_x[first + i] = (d_out[first + i] - x[first + i] * dot / squares) / std::sqrt(squares);
  }
  return d_x;
}

// `lsh`: the values of x (hs) in one round, x R and then -x R. The place of the largest is the bucket of x. R (hs,
// buckets / 2).
template <class Real>
Array<Real> hash_values(const Real* x, const Real* R, int64_t hs, int buckets) {
  Array<Real> values(buckets);
  for (int64_t i = 0; i < hs; i++) {
    for (int c = 0; c < buckets / 2; c++) {
      values[c] += x[i] * R[i * (buckets / 2) + c];
      values[buckets / 2 + c] -= x[i] * R[i * (buckets / 2) + c];
    }
  }
  return values;
}

// `lsh`: the buckets of k (N, hs), and so of q, (rounds, N); rotations (rounds, hs, buckets / 2).
template <class Real>
std::vector<int> buckets_of(const Array<Real>& k, const Real* rotations, const LshTerm& lsh, int64_t hs) {
  std::vector<int> buckets;
  for (int round = 0; round < lsh.rounds; round++) {
    for (size_t first = 0; first < k.size(); first += hs) {
      const Array<Real> values = hash_values(&k[first], rotations + round * hs * (lsh.buckets / 2), hs, lsh.buckets);
      buckets.push_back(int(std::max_element(values.begin(), values.end()) - values.begin()));
    }
  }
  return buckets;
}

// `lsh`: whether the query at t sees the key at j, (B, T, T): earlier ones that are in its bucket in some round, and
// its own if there are none. buckets (rounds, B, T).
inline std::vector<bool> shared_buckets(const std::vector<int>& buckets, int64_t B, int64_t T) {
  std::vector<bool> visible(B * T * T);
  for (size_t round = 0; round < buckets.size(); round += B * T) {
    const int* bucket = &buckets[round];
    for (int64_t n = 0; n < B * T; n++)
      for (int64_t j = 0; j < n % T; j++)
        if (bucket[n] == bucket[n - n % T + j]) visible[n * T + j] = true;
  }
  for (int64_t n = 0; n < B * T; n++) {
    bool sees_earlier = false;
    for (int64_t j = 0; j < n % T; j++) sees_earlier |= visible[n * T + j];
    visible[n * T + n % T] = !sees_earlier;
  }
  return visible;
}

// `relative`: s_d of the distances d = 0 .. K - 1, (K, C): the sines of d * 10000^(-2i/C), i = 0 .. C/2 - 1, then the
// cosines.
template <class Real>
Array<Real> sines_of_distances(int64_t K, int64_t C) {
  Array<Real> sines(K * C);
  for (int64_t d = 0; d < K; d++) {
    for (int64_t i = 0; i < C / 2; i++) {
      const double angle = double(d) * std::pow(10000.0, -2.0 * double(i) / double(C));
      sines[d * C + i] = Real(std::sin(angle));
      sines[d * C + C / 2 + i] = Real(std::cos(angle));
    }
  }
  return sines;
}

// out[t,j] = q[t].r[m + t - j], the distance of key j being counted from the query's place behind m positions of
// memory; zero for later keys. q (B, T, hs), r (K, hs), out (B, T, K).
template <class Real>
Array<Real> distance_scores(const Array<Real>& q, const Array<Real>& r, int64_t B, int64_t T, int64_t hs) {
  const int64_t K = r.size() / hs, m = K - T;
  Array<Real> out(B * T * K);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0; j <= m + t; j++)
        for (int64_t i = 0; i < hs; i++) out[(b * T + t) * K + j] += q[(b * T + t) * hs + i] * r[(m + t - j) * hs + i];
  return out;
}

// d_q, d_r (=).
template <class Real>
void distance_scores_backward(const Array<Real>& q, const Array<Real>& r, const Array<Real>& d_out, Array<Real>& d_q,
                              Array<Real>& d_r, int64_t B, int64_t T, int64_t hs) {
  const int64_t K = r.size() / hs, m = K - T;
  d_q.assign(q.size(), 0);
  d_r.assign(r.size(), 0);
  for (int64_t b = 0; b < B; b++) {
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j <= m + t; j++) {
        for (int64_t i = 0; i < hs; i++) {
          d_q[(b * T + t) * hs + i] += d_out[(b * T + t) * K + j] * r[(m + t - j) * hs + i];
          d_r[(m + t - j) * hs + i] += d_out[(b * T + t) * K + j] * q[(b * T + t) * hs + i];
        }
      }
    }
  }
}

// Every row of x (any, hs), plus row `head` of `bias` (h, hs).
template <class Real>
Array<Real> add_head_bias(const Array<Real>& x, const Array<Real>& bias, int head, int64_t hs) {
  Array<Real> sum = x;
  for (size_t n = 0; n < x.size(); n++) sum[n] += bias[head * hs + int64_t(n) % hs];
  return sum;
}

// d_bias +=; d_sum is also the gradient of x.
template <class Real>
void add_head_bias_backward(const Array<Real>& d_sum, Array<Real>& d_bias, int head, int64_t hs) {
  for (size_t n = 0; n < d_sum.size(); n++) d_bias[head * hs + int64_t(n) % hs] += d_sum[n];
}

// `blend` and `gate`: map[t] = a[t] below[t] + (1 - a[t]) own[t], with the map of the layer below and the layer's own;
// a (B, T).
template <class Real>
Array<Real> mix_maps(const Array<Real>& a, const Array<Real>& below, const Array<Real>& own) {
  const int64_t keys = own.size() / a.size();
  Array<Real> map(own.size());
  for (size_t i = 0; i < map.size(); i++) map[i] = a[i / keys] * below[i] + (1 - a[i / keys]) * own[i];
  return map;
}

// d_a and d_below +=, d_own (=).
template <class Real>
void mix_maps_backward(const Array<Real>& a, const Array<Real>& below, const Array<Real>& own, const Array<Real>& d_map,
                       Array<Real>& d_a, Array<Real>& d_below, Array<Real>& d_own) {
  const int64_t keys = own.size() / a.size();
  d_own.resize(own.size());
  for (size_t i = 0; i < d_map.size(); i++) {
    d_a[i / keys] += d_map[i] * (below[i] - own[i]);
    d_below[i] += d_map[i] * a[i / keys];
    d_own[i] = d_map[i] * (1 - a[i / keys]);
  }
}

// A head's `hs` columns, from `first` on, of each of the S `matrices` (B, T, width), concatenated: (B, S * T, hs).
template <class Real>
Array<Real> take_columns(const std::vector<const Array<Real>*>& matrices, int64_t first, int64_t B, int64_t T,
                         int64_t hs) {
  const int64_t S = matrices.size(), width = matrices[0]->size() / (B * T);
  Array<Real> out(B * S * T * hs);
  for (int64_t b = 0; b < B; b++)
    for (int64_t s = 0; s < S; s++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < hs; i++)
          out[((b * S + s) * T + t) * hs + i] = (*matrices[s])[(b * T + t) * width + first + i];
  return out;
}

// The reverse of take_columns: `hs` columns, from `first` on, of each of the S `matrices` (B, T, width) += their part
// of x (B, S * T, hs).
template <class Real>
void add_columns(const std::vector<Array<Real>*>& matrices, int64_t first, const Array<Real>& x, int64_t B, int64_t T,
                 int64_t hs) {
  const int64_t S = matrices.size(), width = matrices[0]->size() / (B * T);
  for (int64_t b = 0; b < B; b++)
    for (int64_t s = 0; s < S; s++)
      for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < hs; i++)
          (*matrices[s])[(b * T + t) * width + first + i] += x[((b * S + s) * T + t) * hs + i];
}

// x (B, m + T, width) = in each sequence the rows of `before` (B, m, width) and then the rows of `rows` (B, T, width).
template <class Real>
Array<Real> append_rows(const Array<Real>& before, const Array<Real>& rows, int64_t B) {
  const int64_t a = before.size() / B, b = rows.size() / B;
  Array<Real> x;
  for (int64_t i = 0; i < B; i++) {
    x.insert(x.end(), before.begin() + i * a, before.begin() + (i + 1) * a);
    x.insert(x.end(), rows.begin() + i * b, rows.begin() + (i + 1) * b);
  }
  return x;
}

// The last `count` rows of each sequence of x (B, any, width).
template <class Real>
Array<Real> last_rows(const Array<Real>& x, int64_t B, int64_t count, int64_t width) {
  const int64_t all = x.size() / B;
  Array<Real> rows;
  for (int64_t i = 1; i <= B; i++) rows.insert(rows.end(), x.begin() + i * all - count * width, x.begin() + i * all);
  return rows;
}

}  // namespace reference
