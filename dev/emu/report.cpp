// Reports the kernel, block and thread in which something went wrong. Other tools find the fault (AddressSanitizer,
// UBSan's alignment check, the MMU); they know addresses and lines of code, and this adds where in the emulated program
// it happened.
#include <signal.h>
#include <unistd.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "emu.h"

namespace emu {

Running& running() {
  static Running running;
  return running;
}

namespace {

bool reported = false;  // one line per process: abort() or a second tool must not add another

// `emulated GPU: in <where>: <what>`. Called from signal handlers and from inside ASan's report: no allocation, no
// stdio.
void report(const char* what) {
  if (reported) return;
  reported = true;
  char line[2048];
  int n;
  const Running& r = running();
  if (r.kernel != nullptr && r.in_thread) {
    n = snprintf(line, sizeof line, "emulated GPU: in kernel %s, block (%u,%u,%u), thread (%u,%u,%u): %s\n", r.kernel,
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, what);
  } else if (r.kernel != nullptr) {
    n = snprintf(line, sizeof line, "emulated GPU: in kernel %s: %s\n", r.kernel, what);
  } else {
    n = snprintf(line, sizeof line, "emulated GPU: in %s: %s\n", r.operation != nullptr ? r.operation : "host code",
                 what);
  }
  const size_t length = n < int(sizeof line) ? size_t(n) : sizeof line - 1;
  if (write(STDERR_FILENO, line, length) < 0) _exit(134);  // stderr is closed
}

struct sigaction previous_handler;

void on_segv(int, siginfo_t* info, void*) {
  char what[512], where[256];
  if (in_fiber_guard_page(info->si_addr)) {
    snprintf(what, sizeof what, "stack overflow: a thread has %zu KB for its local variables here",
             fiber_stack_bytes / 1024);
  } else if (is_device_memory(info->si_addr) && running().operation == nullptr) {
    if (!describe_device_address(info->si_addr, where, sizeof where)) snprintf(where, sizeof where, "unallocated");
    snprintf(what, sizeof what, "host code accesses device memory at %p (%s); copy it with cudaMemcpyAsync first",
             info->si_addr, where);
  } else if (is_device_memory(info->si_addr)) {
    snprintf(what, sizeof what, "accesses device memory at %p, where nothing has been allocated", info->si_addr);
  } else {
    snprintf(what, sizeof what, "accesses address %p, which is not mapped", info->si_addr);
  }
  report(what);
  // Back to the faulting instruction, which faults again: ASan's handler, or the default, then prints the stack and
  // ends it.
  sigaction(SIGSEGV, &previous_handler, nullptr);
}

}  // namespace

void fatal(const char* format, ...) {
  char what[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(what, sizeof what, format, args);
  va_end(args);
  report(what);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_print_stack_trace();
#endif
  abort();
}

void install_signal_handler() {
  // A handler needs a stack of its own when a fiber has run out of its stack. ASan has one already.
  stack_t current;
  if (sigaltstack(nullptr, &current) == 0 && (current.ss_flags & SS_DISABLE) != 0) {
    static char stack[64 * 1024];
    const stack_t ours = {stack, 0, sizeof stack};
    sigaltstack(&ours, nullptr);
  }
  struct sigaction action = {};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_handler);
}

}  // namespace emu

#if defined(__SANITIZE_ADDRESS__)
// A program leaves its device, its streams and its cuBLASLt plans to the end of the process, as with a driver: no leak
// to report. And locals live on the fibers' own stacks, not on ASan's fake ones, which would cost a switch several
// times its price.
extern "C" const char* __asan_default_options() { return "detect_leaks=0:detect_stack_use_after_return=0"; }

// ASan calls this before it prints its report, and UBSan the other.
extern "C" void __asan_on_error() {
  char what[512], where[256];
  if (!__asan_report_present()) return emu::report("AddressSanitizer stopped it; its report follows");
  const void* address = __asan_get_report_address();
  const char* verb = __asan_get_report_access_type() != 0 ? "writes" : "reads";
  if (!emu::describe_device_address(address, where, sizeof where)) snprintf(where, sizeof where, "not device memory");
  snprintf(what, sizeof what, "%s %zu byte(s) at %p: %s, %s", verb, __asan_get_report_access_size(), address,
           __asan_get_report_description(), where);
  emu::report(what);
}
#endif

extern "C" void __ubsan_on_report() {
  emu::report("misaligned access, or other undefined behaviour; UBSan's report is near");
}
