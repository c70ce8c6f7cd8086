#pragma once
#include "llmc/base/error.h"
#include "llmc/base/message.h"
#include "run.h"

// Warns of what a run does as it was asked to, but maybe not as it was meant: a line on stderr, from rank 0 alone.
template <class... Args>
void warn(const Run& run, const char* fmt, const Args&... args) {
  if (run.ranks.rank == 0) print_warning(format(fmt, printf_argument(args)...));
}
