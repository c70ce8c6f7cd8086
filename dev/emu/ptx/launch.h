// Kernels from a file of PTX in place of those that g++ has compiled. Host code, memory, streams, graphs, cuBLASLt and
// NCCL stay as they are. An instruction that is not known is an error, with its text and line of source.
//
// Addresses of shared memory begin at 1024, so that a forgotten base is an error.
#pragma once
#include <cstddef>
#include <string>
#include "cuda_runtime.h"

namespace emu::ptx {

// SLA_EMU_PTX names a file. The first call reads it, and throws UserError if it cannot.
bool is_used();

// Checks the kernel that g++ calls `mangled`. Throws UserError if the file lacks it or has it with other parameters.
void check_launch(const std::string& mangled, const Parameters& parameters);
void run_kernel(const std::string& mangled, dim3 grid, dim3 block, size_t shared_bytes, const Parameters& parameters);

// Reads another file from now on; "" is the one that SLA_EMU_PTX names, if any.
void use_file(const std::string& path);

bool is_variable(const void* p, size_t bytes);  // the bytes are of the file's variables in constant and global memory

}  // namespace emu::ptx
