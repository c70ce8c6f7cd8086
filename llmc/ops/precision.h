// The type of weights and activations, fixed when the program is built (make PRECISION=BF16, FP16 or FP32). Gradients
// of parameters, AdamW's moments and master weights, LayerNorm's statistics, losses and sums are float in each.
#pragma once
#if defined(PRECISION_BF16) && defined(SLA_CPU)
#include "llmc/ops/bf16.h"
typedef bfloat16 floatX;
constexpr const char* precision_name = "bf16";
#elif defined(PRECISION_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 floatX;
constexpr const char* precision_name = "bf16";
#elif defined(PRECISION_FP16)  // for a GPU alone
#include <cuda_fp16.h>
typedef __half floatX;
constexpr const char* precision_name = "fp16";
#else
#define PRECISION_FP32
typedef float floatX;
constexpr const char* precision_name = "fp32";
#endif

constexpr bool is_16_bit = sizeof(floatX) != sizeof(float);
#ifdef PRECISION_FP16
constexpr bool is_fp16 = true;
#else
constexpr bool is_fp16 = false;
#endif
constexpr bool is_bf16 = is_16_bit && !is_fp16;
// Weights that are not float have float masters, which AdamW updates and which files hold.
constexpr bool has_master_weights = is_16_bit;
