// Child processes that tests start and signal.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <string>

// Replaces a process that was just forked by the shell command `command`, with the default actions of the signals that
// stop a program: the process that runs the tests may ignore some of them, as background jobs of a shell do.
[[noreturn]] inline void become(const std::string& command) {
  for (int stop : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) signal(stop, SIG_DFL);
  execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), static_cast<char*>(nullptr));
  _exit(127);
}

// Starts the shell command `command`, sends it `signal` after `microseconds` and waits for its end. Returns waitpid's
// status.
inline int run_and_signal(const std::string& command, int signal, int microseconds) {
  const pid_t child = fork();
  if (child == 0) become(command);
  usleep(useconds_t(microseconds));
  kill(child, signal);
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}
