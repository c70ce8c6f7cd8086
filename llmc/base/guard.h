// Gaps between the tensors of an arena that AddressSanitizer checks (the emulated GPU is built with it): an access one
// element past the end of a tensor ends the program, in the middle of an arena as at its edge. In other builds there
// are no gaps and forbid() does nothing.
#pragma once
#include <cstddef>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
constexpr size_t guard_bytes = 256;  // of the gap
// Any access to these bytes ends the program from here on.
inline void forbid(const void* p, size_t bytes) { ASAN_POISON_MEMORY_REGION(p, bytes); }
#else
constexpr size_t guard_bytes = 0;
inline void forbid(const void*, size_t) {}
#endif
