// SIGTERM, SIGINT, SIGHUP (the terminal is gone) and SIGUSR1 (which Slurm can send before a time limit) ask a run to
// stop after the current step, with a checkpoint to resume from. A second signal, at least a second after the first,
// ends the process at once, with the exit status that a shell reports for it: 128 + the signal's number. One that
// arrives sooner is ignored: timeout and mpirun signal a process and its group, which is twice. Before the first step,
// while a model is loaded, the first signal ends the process: there is nothing to save.
//
// There is no signal handler: a thread waits for these signals, and all others block them. oneDNN's generated code
// keeps values below the stack pointer, where the kernel would put a handler's frame, and the emulated GPU's fibers
// have small stacks.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <thread>
#include "llmc/base/files.h"

inline std::atomic<int> first_stop_signal{0};
inline std::atomic<bool> has_loaded{false};

// The number of the signal that asked to stop; 0: none so far.
inline int stop_signal() { return first_stop_signal; }

// "SIGTERM", "SIGINT", "SIGHUP" or "SIGUSR1".
inline const char* signal_name(int signal) {
  return signal == SIGTERM   ? "SIGTERM"
         : signal == SIGINT  ? "SIGINT"
         : signal == SIGHUP  ? "SIGHUP"
         : signal == SIGUSR1 ? "SIGUSR1"
                             : "a signal";
}

// The body of the thread that waits for `signals`.
inline void wait_for_stop_signals(sigset_t signals) {
  std::chrono::steady_clock::time_point first_time;
  for (int signal; sigwait(&signals, &signal) == 0;) {
    if (!has_loaded) _exit(128 + signal);
    const auto now = std::chrono::steady_clock::now();
    if (first_stop_signal == 0) {
      first_time = now;
      first_stop_signal = signal;
      static const char text[] = "\nstopping after this step; a second signal stops at once\n";
      if (write(STDERR_FILENO, text, sizeof text - 1) < 0) {}  // stderr is closed
    } else if (now - first_time >= std::chrono::seconds(1)) {
      _exit(128 + signal);
    }
  }
}

// From now on the first signal lets the step end.
inline void stop_after_steps() { has_loaded = true; }

// These signals, but for those that are ignored.
inline sigset_t stop_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1})
    if (!is_ignored(signal)) sigaddset(&signals, signal);
  return signals;
}

// Starts to handle them. Must be called before any thread is started: threads inherit the blocked signals.
inline void handle_stop_signals() {
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread(wait_for_stop_signals, signals).detach();
}
