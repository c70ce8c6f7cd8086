// Tests of the ranks' control channel: the ranks are forked processes, with a rendezvous file or port on this machine.
#pragma once
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>
#include "command_line.h"
#include "llmc/utils/clock.h"
#include "llmc/utils/error.h"
#include "llmc/dist/rank_channel.h"

inline void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

inline size_t lines_in(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

using Body = std::function<void(RankChannel&, int rank)>;

struct Rendezvous {
  std::string address;
  int size;
  double hang_seconds = 30, timeout_seconds = 30;
  std::string secret = "";
};

// A rank's process, and the files with its stderr and stdout.
struct Process {
  pid_t pid;
  std::string err_path, out_path;
};

class Channel : public CommandLine {
 protected:
  int num_started = 0;

  // A port, a new one each time. It is below those that Linux gives to connections, from 32768 on: to one of another
  // program, or to one that tries to connect to this very port before rank 0 listens, and so connects to itself. Either
  // would keep rank 0 from listening.
  static std::string free_port_at(const std::string& host) {
    static int next = 10000 + int(getpid()) * 7 % 20000;
    return format("tcp:%s:%d", host.c_str(), next++);
  }
  // Forks a process that runs `body`, with errors handled as in main().
  Process start(const std::function<void(RankChannel&)>& body) {
    fflush(stdout);
    const std::string number = std::to_string(num_started++);
    const Process p = {fork(), in("err." + number), in("out." + number)};
    if (p.pid != 0) return p;
    if (freopen(p.err_path.c_str(), "w", stderr) == nullptr || freopen(p.out_path.c_str(), "w", stdout) == nullptr)
      _exit(2);
    RankChannel channel;
    try {
      body(channel);
    } catch (const UserError& e) {
      if (channel.is_open()) channel.end_run(e.what());
      fprintf(stderr, "error: %s\n", e.what());
      fflush(stderr);
      _exit(1);
    }
    _exit(0);
  }
  // Rank `rank`: connects to the others after `delay` seconds, runs `body` and finalizes.
  Process start_rank(const Rendezvous& rendezvous, int rank, const Body& body, double delay = 0) {
    return start([=](RankChannel& channel) {
      sleep_for(delay);
      channel.open({rank, rendezvous.size, 0, rendezvous.address, false, rendezvous.secret}, rendezvous.hang_seconds,
                   rendezvous.timeout_seconds);
      body(channel, rank);
      channel.finalize();
    });
  }
  std::vector<Process> start_ranks(const Rendezvous& rendezvous, const Body& body) {
    std::vector<Process> all;
    for (int rank = 0; rank < rendezvous.size; rank++) all.push_back(start_rank(rendezvous, rank, body));
    return all;
  }
  // The exit status of a process; -1 if a signal ended it, -2 if it did not end within `seconds` and was killed here.
  static int wait_for(const Process& p, double seconds = 15) {
    int status = 0;
    for (const double end = seconds_now() + seconds; waitpid(p.pid, &status, WNOHANG) == 0; sleep_for(0.002)) {
      if (seconds_now() < end) continue;
      kill(p.pid, SIGKILL);
      waitpid(p.pid, &status, 0);
      return -2;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  static void expect_clean_shutdown(const std::vector<Process>& all) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      EXPECT_EQ(wait_for(all[rank]), 0) << rank;
      EXPECT_EQ(read_file(all[rank].err_path), "") << rank;
    }
  }
  // All end with status 1; rank 0 prints one line that contains each of `parts`, and the others print nothing.
  static void expect_one_error(const std::vector<Process>& all, const std::vector<std::string>& parts) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      EXPECT_EQ(wait_for(all[rank]), 1) << rank;
      const std::string err = read_file(all[rank].err_path);
      EXPECT_EQ(lines_in(err), rank == 0 ? 1u : 0u) << rank << "\n" << err;
      for (const std::string& part : rank == 0 ? parts : std::vector<std::string>())
        EXPECT_NE(err.find(part), std::string::npos) << part << "\n" << err;
    }
  }
  // Every rank but the victim ends with status 1, and prints a line with the victim's name and `text`: only rank 0
  // does, or, if it is the victim, all others. `its_status`: the victim's, as wait_for has it.
  static void expect_end_after_loss_of(size_t victim, const std::vector<Process>& all, const std::string& text,
                                       int its_status = -1) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      if (rank == victim) continue;
      EXPECT_EQ(wait_for(all[rank]), 1) << "rank " << rank << " without rank " << victim;
      const std::string err = read_file(all[rank].err_path),
                        expected = format("rank %d (pid %d on ", int(victim), int(all[victim].pid));
      if (rank > 0 && victim > 0) {
        EXPECT_EQ(err, "") << rank;
        continue;
      }
      EXPECT_EQ(lines_in(err), 1u) << err;
      EXPECT_EQ(err.find("error: " + expected), 0u) << err;
      EXPECT_NE(err.find(text), std::string::npos) << err;
    }
    if (its_status < 0) kill(all[victim].pid, SIGKILL);
    EXPECT_EQ(wait_for(all[victim]), its_status);
  }
  // Waits until a process has written the file.
  void await_file(const std::string& name) const {
    for (const double end = seconds_now() + 15; !fs::exists(in(name)) && seconds_now() < end; sleep_for(0.002)) {}
    ASSERT_TRUE(fs::exists(in(name))) << name;
  }
};
// Counts as a GPU would write them: collectives in which each rank waits for the others. `before` is called before
// each, with its number.
struct Collectives {
  volatile uint64_t begun = 0, done = 0;
  void run(
      RankChannel& channel, uint64_t count, const std::function<void(uint64_t)>& before = [](uint64_t) {}) {
    channel.watch_progress(&begun, &done);
    while (done < count) {
      before(done + 1);
      begun = begun + 1;
      channel.check_same_on_all_ranks("step", std::to_string(begun));
      done = begun;
    }
  }
};

// A socket at a port, or one that the system picks; it does not listen yet.
struct Listener {
  int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
  explicit Listener(int at_port = 0) {
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    const timeval longest = {10, 0};  // that accept waits
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest);
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK), at.sin_port = htons(uint16_t(at_port));
    socklen_t size = sizeof at;
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port = ntohs(at.sin_port);
  }
  ~Listener() { close(fd); }
};

inline int port_in(const std::string& address) { return atoi(address.c_str() + address.rfind(':') + 1); }

// Connects the socket to a port of this machine, at 127.0.0.1 or another of its numbers.
inline bool connects(int fd, int port, int number = 1) {
  sockaddr_in at = {};
  at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + uint32_t(number));
  at.sin_port = htons(uint16_t(port));
  return connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0;
}

// A connection to the port of an address on this machine; -1 if there is none for five seconds.
inline int connection_to(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  for (const double end = seconds_now() + 5; !connects(fd, port_in(address)); sleep_for(0.01))
    if (seconds_now() > end) return -1;
  return fd;
}
