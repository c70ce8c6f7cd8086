// The matmuls that do not take the algorithm that cuBLASLt's heuristic puts first: a table, so that every run with one
// version of cuBLASLt on one kind of GPU has the same bits. Its lines are what `STEPS=tune make gpu-check` prints for
// algorithms that are faster by 2 % or more and give the same bits each time. Other GPUs, versions and shapes take the
// first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

struct GemmChoice {
  std::string gpu;  // its name
  size_t cublaslt;  // cublasLtGetVersion()
  char op_a, op_b;  // of the shape as cuBLASLt gets it, column-major: 'N', 'T'
  int64_t m, n, k;
  int type, out_type, epilogue;  // cudaDataType of the operands and of the output, cublasLtEpilogue_t
  bool accumulate;
  int algorithm;  // which of the heuristic's, from 0

  auto key() const { return std::tie(gpu, cublaslt, op_a, op_b, m, n, k, type, out_type, epilogue, accumulate); }
};

inline std::vector<GemmChoice>& gemm_choices() {
  static std::vector<GemmChoice> choices = {};
  return choices;
}
