// The trainer's model against the reference, which shares no code with it: losses, every gradient, updates, for every
// kind of wiring and every level of recomputation; and what the trainer promises beside that: no read of unwritten
// memory, the same bits again, generation that continues what training computes.
//
// The same tests run on the CPU's operations, on a GPU, and on the emulated one, in either precision.
//
// Each section is a file of dev/test/model. They are compiled together, because each would compile the model again.
#include "dev/test/model/losses.h"
#include "dev/test/model/masks.h"
#include "dev/test/model/every_wiring.h"
#include "dev/test/model/updates.h"
#include "dev/test/model/another_wiring.h"
#include "dev/test/model/memory.h"
#include "dev/test/model/steps.h"
#include "dev/test/model/generation.h"
#include "dev/test/model/segments.h"
#include "dev/test/model/documents.h"
#include "dev/test/model/dropout.h"
#include "dev/test/model/route.h"
