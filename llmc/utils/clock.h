// Seconds of a clock that never goes back; since when, says nobody.
#pragma once
#include <chrono>  // std::chrono::steady_clock

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
