// Attention and its gradients against the formula in double, on the device that this is compiled for: the CPU, the
// emulated GPU or a real one. The inputs are rounded to floatX first, so that what is compared is the kernels'
// arithmetic alone.
//
// Each section is a file of dev/test/attention. They are compiled together, because each would compile the kernels
// again.
//
// COVERS ONLY llmc/ops/attention_ llmc/cpu/attention.h llmc/cpu/attention_decode.h llmc/cpu/attention_relative.h
// COVERS ONLY llmc/cpu/attention_scores.h llmc/cpu/attention_t llmc/cuda/attention.h llmc/cuda/attention_mma
// COVERS ONLY llmc/cuda/attention_decode.h llmc/cuda/attention_fma llmc/cuda/attention_launch.h
// COVERS ONLY llmc/cuda/attention_relative.h
// COVERS ONLY llmc/cuda/attention_t llmc/cuda/tile.h
#include "dev/test/attention/plain.h"
#include "dev/test/attention/masks.h"
#include "dev/test/attention/documents.h"
#include "dev/test/attention/dropout.h"
#include "dev/test/attention/memory.h"
#include "dev/test/attention/relative.h"
#include "dev/test/attention/scores.h"
#include "dev/test/attention/sequences.h"
#include "dev/test/attention/same_bits.h"
#include "dev/test/attention/counts.h"
