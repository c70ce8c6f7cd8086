// Each operation but attention alone, against its formula in double, on the device that this is compiled for: the CPU,
// the emulated GPU or a real one. Inputs are rounded to floatX first, so that what is compared is the operation's
// arithmetic alone; outputs are NaN before, so that a missing write shows.
//
// Each section is a file of dev/test/operations. They are compiled together, because each would compile all operations
// again.
#include "dev/test/operations/device.h"     // the device's memory; the CPU's threads, vector functions and GEMM
#include "dev/test/operations/matmul.h"     // matmul and its gradients
#include "dev/test/operations/layernorm.h"  // LayerNorm and GELU
#include "dev/test/operations/tokens.h"     // embedding and classifier
#include "dev/test/operations/maps.h"       // sums of attention maps
#include "dev/test/operations/gru.h"        // the gate of gru
#include "dev/test/operations/halting.h"    // tokens that halt after some cycles of layers
#include "dev/test/operations/lsh.h"        // attention by locality-sensitive hashing
#include "dev/test/operations/relative.h"   // relative positions
#include "dev/test/operations/rotary.h"     // rotary positions
#include "dev/test/operations/muon.h"       // Muon
#include "dev/test/operations/optimizer.h"  // AdamW and the norm of the gradients
