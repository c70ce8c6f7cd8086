// Programs that tests start, and signal at some moment.
#pragma once
#include <signal.h>    // kill, signal
#include <sys/wait.h>  // waitpid
#include <unistd.h>    // fork, execl, usleep
#include <string>      // std::string

// Of a process that was just forked: it becomes a shell's `command`, with the signals that stop a program as they are by default. Whoever
// runs the tests may ignore some, as a shell does for what runs in its background.
[[noreturn]] inline void become(const std::string& command) {
  for (int stop : {SIGTERM, SIGINT, SIGUSR1}) signal(stop, SIG_DFL);
  execl("/bin/sh", "sh", "-c", ("exec " + command).c_str(), static_cast<char*>(nullptr));
  _exit(127);
}

// Starts `command` and sends it `signal` after `microseconds`. Returns waitpid's status.
inline int run_and_signal(const std::string& command, int signal, int microseconds) {
  const pid_t child = fork();
  if (child == 0) become(command);
  usleep(useconds_t(microseconds));
  kill(child, signal);
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}
