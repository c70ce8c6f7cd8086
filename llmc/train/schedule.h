// Learning-rate schedules.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

// Linear warm-up over the first `warmup_steps` steps, then one of
//   constant   base
//   cosine     from base to final_fraction * base along half a cosine
//   linear     from base to final_fraction * base along a line
//   wsd        base, then over the last fifth of the run, at least two steps of it, down to final_fraction * base as
//              1 - sqrt
//
// wsd is "warm-up, stable, decay" (Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed
// training durations").
struct Schedule {
  std::string kind = "cosine";
  double learning_rate = 3e-4;
  double final_fraction = 0.0;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;

  // The names above.
  static std::vector<std::string> kinds() { return {"cosine", "linear", "constant", "wsd"}; }

  // The learning rate of the step-th update; updates count from 1. The first of w warm-up steps has base / w and the
  // last base. The decay would reach final_fraction * base in step total_steps + 1.
  double operator()(int64_t step) const {
    if (step <= warmup_steps) return learning_rate * double(step) / double(warmup_steps);
    if (kind == "constant") return learning_rate;
    // The first step of a decay still has the whole rate: one of fewer than two steps would be none.
    const int64_t last_fifth = std::max<int64_t>(2, total_steps / 5);
    int64_t decay_from = kind == "wsd" ? std::max(warmup_steps, total_steps - last_fifth) : warmup_steps;
    double length = double(std::max<int64_t>(1, total_steps - decay_from));
    double done = std::min(1.0, std::max(0.0, double(step - 1 - decay_from) / length));
    double shape = 0;  // 1 at the beginning of the decay, 0 at its end
    if (kind == "cosine") shape = 0.5 * (1 + std::cos(3.141592653589793 * done));
    else if (kind == "linear") shape = 1 - done;
    else shape = 1 - std::sqrt(done);
    return learning_rate * (final_fraction + (1 - final_fraction) * shape);
  }
};
