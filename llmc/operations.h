// The operations of the device that this is compiled for: the same names and signatures in each folder.
#pragma once
#ifdef SLA_CPU
#include "cpu/attention.h"   // attention_forward, attention_backward, copy_rows
#include "cpu/classifier.h"  // classifier
#include "cpu/device.h"      // device_malloc, copy_to_device, ...
#include "cpu/embedding.h"   // embedding_forward, embedding_backward
#include "cpu/gelu.h"        // gelu_forward, gelu_backward
#include "cpu/layernorm.h"   // layernorm_forward, residual_layernorm_forward, layernorm_backward
#include "cpu/matmul.h"      // matmul_forward, matmul_gelu_forward, matmul_backward, matmul_gelu_backward, gemm, gemm_peak
#include "cpu/optimizer.h"   // adamw_update, sum_of_squares
#else
#include "cuda/attention.h"
#include "cuda/classifier.h"
#include "cuda/device.h"
#include "cuda/embedding.h"
#include "cuda/gelu.h"
#include "cuda/layernorm.h"
#include "cuda/matmul.h"
#include "cuda/optimizer.h"
#endif
#if defined(SLA_NCCL) && !defined(SLA_CPU)
#include "cuda/collectives.h" // Collectives
#else
#include "no_collectives.h"   // the same, of a process alone
#endif
