#pragma once
#include <chrono>

// Monotonic seconds; the epoch is arbitrary.
inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
