// The type of weights and activations, fixed when the program is built (make PRECISION=BF16 or FP32). Gradients of
// parameters, AdamW's moments and master weights, LayerNorm's statistics, losses and sums are float in both.
#pragma once
#if defined(PRECISION_BF16) && defined(SLA_CPU)
#include "llmc/cpu/bf16.h"
typedef bfloat16 floatX;
constexpr const char* precision_name = "bf16";
#elif defined(PRECISION_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 floatX;
constexpr const char* precision_name = "bf16";
#else
typedef float floatX;
constexpr const char* precision_name = "fp32";
#endif

constexpr bool is_bf16 = sizeof(floatX) != sizeof(float);
// Weights that are not float have float masters, which AdamW updates and which files hold.
constexpr bool has_master_weights = is_bf16;
