// What few runs can show: means with confidence intervals, and the difference of pairs, by Student's t distribution.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

// The regularized incomplete beta function I_x(a, b), by its continued fraction with Lentz's method (Abramowitz and
// Stegun 26.5.8), which converges fast for x < (a + 1) / (a + b + 2); beyond, I_x(a, b) = 1 - I_(1-x)(b, a). Relative
// error about 1e-14.
inline double incomplete_beta(double a, double b, double x) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - incomplete_beta(b, a, 1 - x);
  const double tiny = 1e-300;
  double c = 1, d = 1 / (1 - (a + b) * x / (a + 1)), fraction = d;
  for (int m = 1; m < 1000; m++) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double change = 1;
    for (double term : {even, odd}) {
      d = 1 + term * d, c = 1 + term / c;
      if (std::fabs(d) < tiny) d = tiny;
      if (std::fabs(c) < tiny) c = tiny;
      d = 1 / d;
      change = c * d;
      fraction *= change;
    }
    if (std::fabs(change - 1) < 1e-15) break;
  }
  return std::exp(a * std::log(x) + b * std::log1p(-x) + std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b)) *
         fraction / a;
}

// The probability that |t| is at least this large, of Student's t with `freedom` degrees of freedom: the p of a
// two-sided test.
inline double two_sided_p(double t, double freedom) {
  return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t));
}

// The t that is exceeded on either side with probability p in all; by bisection.
inline double t_of(double p, double freedom) {
  double low = 0, high = 1e3;
  for (int i = 0; i < 100; i++) {
    const double middle = (low + high) / 2;
    (two_sided_p(middle, freedom) > p ? low : high) = middle;
  }
  return low;
}

// How many pairs it takes to find a mean difference with p < 0.05 in four of five experiments, if the differences have
// this standard deviation: the textbooks' sample size, which takes the t distribution of the test as shifted, not as
// noncentral. 0 if 10,000 are too few.
inline int pairs_needed(double difference, double deviation) {
  auto are_enough = [&](int n) {
    return (t_of(0.05, n - 1) + t_of(0.4, n - 1)) * deviation <= std::fabs(difference) * std::sqrt(double(n));
  };
  int too_few = 1, enough = 10001;
  while (enough - too_few > 1) {
    const int middle = (too_few + enough) / 2;
    (are_enough(middle) ? enough : too_few) = middle;
  }
  return enough > 10000 ? 0 : enough;
}

// NaN for none, and where one of them is.
inline double median(std::vector<double> values) {
  for (double v : values)
    if (std::isnan(v)) return NAN;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? NAN : (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// How long one of several was watched, and whether what it was watched for happened then.
struct Watched {
  double time;
  bool happened;
};

// The time after which it has happened to half of them, by the estimate of Kaplan and Meier (1958), which counts those
// that were watched for less time as long as they were; infinite if it is not seen to happen to half.
inline double kaplan_meier_median(std::vector<Watched> watched) {
  std::sort(watched.begin(), watched.end(), [](const Watched& a, const Watched& b) {
    return a.time != b.time ? a.time < b.time : a.happened > b.happened;
  });
  double waiting = 1;  // the share to which it has not happened
  for (size_t i = 0; i < watched.size(); i++) {
    if (watched[i].happened) waiting *= 1 - 1.0 / double(watched.size() - i);
    if (waiting < 0.5 + 1e-9) return watched[i].time;
  }
  return INFINITY;
}

struct Estimate {
  double mean;
  // The mean of all possible samples lies within mean +- interval, with 95 % confidence; NaN for a single value.
  double interval;
  double p;          // of the test whether that mean is 0; NaN for a single value
  double deviation;  // standard deviation of the values; NaN for a single one
};

// The estimate from values that are independent and about normally distributed. For differences of pairs this is the
// paired t-test.
inline Estimate estimate(const std::vector<double>& values) {
  const double n = double(values.size());
  double mean = 0, squares = 0;
  for (double v : values) mean += v / n;
  for (double v : values) squares += (v - mean) * (v - mean);
  if (values.size() < 2) return {values.empty() ? NAN : mean, NAN, NAN, NAN};
  const double deviation = std::sqrt(squares / (n - 1)), error = deviation / std::sqrt(n);
  return {mean, t_of(0.05, n - 1) * error,
          error > 0   ? two_sided_p(mean / error, n - 1)
          : mean == 0 ? 1.0
                      : 0.0,
          deviation};
}

// The p of the test whether that mean lies within +- margin: of the less certain of two one-sided tests (Schuirmann
// 1987). NaN for a single value.
inline double equivalence_p(const std::vector<double>& values, double margin) {
  const Estimate e = estimate(values);
  const double n = double(values.size()), error = e.deviation / std::sqrt(n), room = margin - std::fabs(e.mean);
  if (error == 0) return room > 0 ? 0 : 1;
  const double p = two_sided_p(room / error, n - 1) / 2;
  return room > 0 ? p : 1 - p;
}

// The p of each of several tests, by Holm (1979), so that with probability 0.95 none that shows nothing is below 0.05:
// the smallest times how many there are, the next times one less, and none below a smaller one's.
inline std::vector<double> holm(const std::vector<double>& ps) {
  std::vector<size_t> order(ps.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ps[a] < ps[b]; });
  std::vector<double> adjusted(ps.size());
  double largest = 0;
  for (size_t rank = 0; rank < order.size(); rank++)
    adjusted[order[rank]] = largest = std::max(largest, std::min(1.0, double(ps.size() - rank) * ps[order[rank]]));
  return adjusted;
}
