// SIGTERM, SIGINT and SIGUSR1 (which Slurm can send ahead of a time limit) ask a run to stop where it can go on later. The second of
// them ends the process at once, with the exit status of a shell's command that died of it: 128 and the signal's number.
#pragma once
#include <signal.h>  // sigaction
#include <unistd.h>  // write, _exit
#include <atomic>    // std::atomic
#include <cerrno>    // errno

inline std::atomic<int> first_stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may use no other");

// The signal that asked to stop; 0: none yet.
inline int stop_signal() { return first_stop_signal; }

inline const char* signal_name(int signal) {
  return signal == SIGTERM ? "SIGTERM" : signal == SIGINT ? "SIGINT" : signal == SIGUSR1 ? "SIGUSR1" : "a signal";
}

// Calls nothing that a handler may not call.
inline void on_stop_signal(int signal) {
  int none = 0;
  if (!first_stop_signal.compare_exchange_strong(none, signal)) _exit(128 + signal);
  const int kept = errno;
  static const char text[] = "\nstopping after this step; a second signal stops at once\n";
  if (write(STDERR_FILENO, text, sizeof text - 1) < 0) {}  // nobody is there to read it
  errno = kept;
}

// From here on. A signal that whoever started us wants ignored stays so, as SIGINT in a shell's background.
inline void handle_stop_signals() {
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    struct sigaction action = {}, before = {};
    action.sa_handler = on_stop_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may grow no further is a full disk, for which write() has an error
}
