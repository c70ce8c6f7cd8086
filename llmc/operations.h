// The operations of the device that the program is compiled for: the same names and signatures in each folder.
// What an operation computes, its shapes, and which outputs are = and which += stands once: in llmc/ops, or in
// llmc/cpu. They know neither files nor sockets, nor the model.
#pragma once
#ifdef SLA_CPU
#include "llmc/cpu/activation.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/attention_maps.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/device.h"
#include "llmc/cpu/documents.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gru.h"
#include "llmc/cpu/halting.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/lsh.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/muon.h"
#include "llmc/cpu/qknorm.h"
#include "llmc/cpu/relative.h"
#include "llmc/cpu/reversible.h"
#include "llmc/cpu/rotary.h"
#include "llmc/cpu/optimizer.h"
#include "llmc/cpu/token_gate.h"
#include "llmc/cpu/weighted_sum.h"
#else
#include "llmc/cuda/activation.h"
#include "llmc/cuda/attention.h"
#include "llmc/cuda/attention_maps.h"
#include "llmc/cuda/classifier.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/documents.h"
#include "llmc/cuda/embedding.h"
#include "llmc/cuda/gru.h"
#include "llmc/cuda/halting.h"
#include "llmc/cuda/layernorm.h"
#include "llmc/cuda/lsh.h"
#include "llmc/cuda/matmul.h"
#include "llmc/cuda/muon.h"
#include "llmc/cuda/optimizer.h"
#include "llmc/cuda/qknorm.h"
#include "llmc/cuda/relative.h"
#include "llmc/cuda/reversible.h"
#include "llmc/cuda/rotary.h"
#include "llmc/cuda/token_gate.h"
#include "llmc/cuda/weighted_sum.h"
#endif
#if defined(SLA_NCCL) && !defined(SLA_CPU)
#include "llmc/dist/collectives.h"
#else
#include "llmc/dist/no_collectives.h"
#endif
