// Kernels from a file of PTX, for tests that launch them themselves.
#pragma once
#include <functional>
#include <string>
#include "dev/emu/emu.h"
#include "dev/emu/ptx/launch.h"
#include "dev/test/emu_test.h"
#include "llmc/base/error.h"

using emu::Parameters;

inline Stream& ptx_stream() {
  static Stream& stream = *new Stream;
  return stream;
}

// Runs a kernel, and waits. Throws UserError if the file or the kernel cannot be read.
inline void run_ptx(const std::string& file, const std::string& kernel, dim3 grid, dim3 block, size_t shared_bytes,
                    const Parameters& parameters) {
  emu::ptx::use_file(file);
  emu::ptx::check_launch(kernel, parameters);
  check(emu::enqueue_launch("a kernel of a file", ptx_stream(), [&] {
    emu::running().kernel = kernel.c_str();
    emu::ptx::run_kernel(kernel, grid, block, shared_bytes, parameters);
  }));
  check(cudaStreamSynchronize(ptx_stream()));
  emu::ptx::use_file("");
}

// What the UserError says that `run`, which runs such kernels, ends with.
inline std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const UserError& e) {
    emu::ptx::use_file("");
    return e.what();
  }
  return "no error";
}
