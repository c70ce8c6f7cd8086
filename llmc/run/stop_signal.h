// SIGTERM, SIGINT and SIGUSR1 (which Slurm can send ahead of a time limit) ask a run to stop where it can go on later. A second one, a
// second or more after the first, ends the process at once, with the exit status of a shell's command that died of it: 128 and the
// signal's number. Sooner it is the same one: who signals a process and its group, as timeout and mpirun do, signals twice.
//
// No handler ever runs: a thread waits for these signals, and all others block them. oneDNN's generated code keeps values below the
// stack pointer, where the kernel would put a handler's frame, and the emulated GPU's fibers have small stacks.
#pragma once
#include <pthread.h>  // pthread_sigmask
#include <signal.h>   // sigwait, sigaction
#include <unistd.h>   // _exit, write
#include <atomic>     // std::atomic
#include <chrono>     // std::chrono::steady_clock
#include <thread>     // std::thread

inline std::atomic<int> first_stop_signal{0};

// The signal that asked to stop; 0: none yet.
inline int stop_signal() { return first_stop_signal; }

inline const char* signal_name(int signal) {
  return signal == SIGTERM ? "SIGTERM" : signal == SIGINT ? "SIGINT" : signal == SIGUSR1 ? "SIGUSR1" : "a signal";
}

inline void wait_for_stop_signals(sigset_t signals) {
  std::chrono::steady_clock::time_point first_time;
  for (int signal; sigwait(&signals, &signal) == 0;) {
    const auto now = std::chrono::steady_clock::now();
    if (first_stop_signal == 0) {
      first_time = now;
      first_stop_signal = signal;
      static const char text[] = "\nstopping after this step; a second signal stops at once\n";
      if (write(STDERR_FILENO, text, sizeof text - 1) < 0) {}  // nobody is there to read it
    } else if (now - first_time >= std::chrono::seconds(1)) {
      _exit(128 + signal);
    }
  }
}

// From here on. The first thing that a process does, so that no thread is there yet, and those to come block what this one blocks. A
// signal that whoever started us wants ignored stays so, as SIGINT in a shell's background.
inline void handle_stop_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    struct sigaction action = {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&signals, signal);
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread(wait_for_stop_signals, signals).detach();
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may grow no further is a full disk, for which write() has an error
}
