// The operations of the device that the program is compiled for: the same names and signatures in each folder.
#pragma once
#ifdef SLA_CPU
#include "llmc/cpu/attention.h"       // attention_forward, attention_backward, copy_rows
#include "llmc/cpu/attention_maps.h"  // mix_map_forward, mix_map_backward, mix_gates_backward
#include "llmc/cpu/classifier.h"      // classifier, add_losses
#include "llmc/cpu/device.h"          // device_malloc, copy_to_device, ...
#include "llmc/cpu/embedding.h"       // embedding_forward, embedding_backward
#include "llmc/cpu/gelu.h"            // gelu_forward, gelu_backward
#include "llmc/cpu/gru.h"             // relu_forward, gru_gates_forward, gru_output_forward, ...
#include "llmc/cpu/halting.h"         // halting_forward, halting_backward
#include "llmc/cpu/layernorm.h"       // layernorm_forward, residual_layernorm_forward, residual_sum, ...
#include "llmc/cpu/lsh.h"             // lsh_hash, lsh_sort, lsh_forward, lsh_backward, lsh_decode
#include "llmc/cpu/matmul.h"          // matmul_forward, matmul_gelu_forward, matmul_backward, gemm, ...
#include "llmc/cpu/muon.h"            // muon_momentum, muon_normalize, muon_polynomial, ...
#include "llmc/cpu/relative.h"        // relative_queries_forward, relative_queries_backward
#include "llmc/cpu/reversible.h"      // streams_begin, stream_add, streams_mean, streams_mean_backward
#include "llmc/cpu/rotary.h"          // rotate, rotate_back
#include "llmc/cpu/optimizer.h"       // adamw_update, sum_of_squares
#include "llmc/cpu/token_gate.h"      // token_gate_forward, token_gate_backward
#else
#include "llmc/cuda/attention.h"
#include "llmc/cuda/attention_maps.h"
#include "llmc/cuda/classifier.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/embedding.h"
#include "llmc/cuda/gelu.h"
#include "llmc/cuda/gru.h"
#include "llmc/cuda/halting.h"
#include "llmc/cuda/layernorm.h"
#include "llmc/cuda/lsh.h"
#include "llmc/cuda/matmul.h"
#include "llmc/cuda/muon.h"
#include "llmc/cuda/optimizer.h"
#include "llmc/cuda/relative.h"
#include "llmc/cuda/reversible.h"
#include "llmc/cuda/rotary.h"
#include "llmc/cuda/token_gate.h"
#endif
#if defined(SLA_NCCL) && !defined(SLA_CPU)
#include "llmc/dist/collectives.h"  // Collectives
#else
#include "llmc/dist/no_collectives.h"  // the same names, for a single process
#endif
