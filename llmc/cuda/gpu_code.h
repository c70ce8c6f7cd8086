// What a program has for a GPU to execute: machine code, which runs on GPUs of its major compute capability with the
// same or a later minor one, or PTX of an earlier capability, which the driver compiles when the program first starts.
#pragma once
#include <initializer_list>
#include <string>
#include "llmc/base/error.h"

// `architectures`: the machine code's, as nvcc's __CUDA_ARCH_LIST__ has them (800 is 8.0). With has_ptx there is PTX
// of 8.0. Returns what a user should know, which is nothing if there is machine code; throws UserError if there is
// nothing for the GPU.
inline std::string remark_on_gpu_code(const std::string& gpu, int major, int minor,
                                      std::initializer_list<int> architectures, bool has_ptx) {
  for (int architecture : architectures)
    if (architecture / 100 == major && architecture / 10 % 10 <= minor) return "";
  const std::string what = format("this program has no machine code for %s (%d.%d)", gpu.c_str(), major, minor),
                    remedy = format("make GPU_ARCH=sm_%d%d makes one that has", major, minor);
  if (!has_ptx || major < 8) user_error("%s; %s", what.c_str(), remedy.c_str());
  return what + ": at its first start the driver compiles it, for minutes; " + remedy;
}
