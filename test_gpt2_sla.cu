// The trainer's model against the reference, which shares no code with it: losses, every gradient, updates, for every
// kind of wiring and every level of recomputation; and what the trainer promises beside that: no read of unwritten
// memory, the same bits again, generation that continues what training computes.
//
// The same tests run on the CPU's operations, on a GPU, and on the emulated one, in either precision.
//
// Each section is a file of dev/test/model. They are compiled together, because each would compile the model again.
#include "dev/test/model/losses.h"          // losses and gradients, of many wirings and of the golden cases
#include "dev/test/model/masks.h"           // targets that are not scored
#include "dev/test/model/every_wiring.h"    // random wirings; what holds for every wiring
#include "dev/test/model/updates.h"         // updates of weights and moments, and the rows that have none
#include "dev/test/model/another_wiring.h"  // another wiring than the model was trained with
#include "dev/test/model/memory.h"          // memory, and the bits of a second run
#include "dev/test/model/steps.h"           // what the training loop queues, uploads and waits for
#include "dev/test/model/generation.h"      // generation and initial weights
#include "dev/test/model/segments.h"        // streams in segments, with a memory of earlier ones
