// Each operation but attention alone, against its formula in double, on the device that this is compiled for: the CPU,
// the emulated GPU or a real one. Inputs are rounded to floatX first, so that what is compared is the operation's
// arithmetic alone; outputs are NaN before, so that a missing write shows.
//
// Each section is a file of dev/test/operations. They are compiled together, because each would compile all operations
// again.
#include "dev/test/operations/device.h"
#include "dev/test/operations/activation.h"
#include "dev/test/operations/matmul.h"
#include "dev/test/operations/layernorm.h"
#include "dev/test/operations/tokens.h"
#include "dev/test/operations/value_mix.h"
#include "dev/test/operations/depth_attention.h"
#include "dev/test/operations/head_mix.h"
#include "dev/test/operations/maps.h"
#include "dev/test/operations/gru.h"
#include "dev/test/operations/weighted_sum.h"
#include "dev/test/operations/halting.h"
#include "dev/test/operations/lsh.h"
#include "dev/test/operations/relative.h"
#include "dev/test/operations/rotary.h"
#include "dev/test/operations/qknorm.h"
#include "dev/test/operations/muon.h"
#include "dev/test/operations/optimizer.h"
