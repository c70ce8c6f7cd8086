// Under AddressSanitizer (the emulated GPU is built with it) tensors of an arena keep a distance, and nothing may touch the
// bytes between them: one element read past a tensor's end ends the program, in the arena's middle as at its edge.
#pragma once
#include <cstddef>  // size_t
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>  // ASAN_POISON_MEMORY_REGION
constexpr size_t guard_bytes = 256;
inline void forbid(const void* p, size_t bytes) { ASAN_POISON_MEMORY_REGION(p, bytes); }
#else
constexpr size_t guard_bytes = 0;
inline void forbid(const void*, size_t) {}
#endif
