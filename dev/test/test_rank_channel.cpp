// What ranks tell each other beside NCCL, and how a run ends when one of them dies or hangs: processes that are forked here, which
// meet in a file or at a port of this machine.
#include <arpa/inet.h>               // htonl
#include <gtest/gtest.h>             // TEST_F
#include <netinet/in.h>              // sockaddr_in
#include <signal.h>                  // kill
#include <sys/socket.h>              // socket
#include <sys/wait.h>                // waitpid
#include <unistd.h>                  // fork, _exit
#include <algorithm>                 // std::count, std::sort
#include <chrono>                    // std::chrono::duration
#include <functional>                // std::function
#include <random>                    // std::mt19937
#include <thread>                    // std::thread
#include "command_line.h"            // CommandLine, read_file
#include "llmc/utils/clock.h"        // seconds_now
#include "llmc/utils/error.h"        // UserError, format
#include "llmc/dist/rank_channel.h"  // RankChannel, WatchdogPause
#include "llmc/dist/watchdog.h"    // Watchdog

static void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

static size_t lines_in(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

// ----------------------------------------------------------------------------
// The judgement, by a made-up clock

// Three ranks, which have arrived at second 0 and are to be blamed after 10.
class Watching : public testing::Test {
 protected:
  Watchdog watch{3, 10};
  double now = 0;
  void SetUp() override {
    for (int rank = 0; rank < 3; rank++) watch.arrive(rank, format("<%d>", rank), 0);
  }
  // Every second all ranks report the same again, but for those of whom nothing is heard. Returns the first verdict, or "".
  std::string after(double seconds, const std::vector<RankReport>& reports, int silent = -1) {
    for (const double end = now + seconds; now < end;) {
      now += 1;
      for (int rank = 0; rank < 3; rank++)
        if (rank != silent) watch.hear(rank, reports[size_t(rank)], now);
      const std::string verdict = watch.verdict(now);
      if (!verdict.empty()) return format("%g: ", now) + verdict;
    }
    return "";
  }
  static RankReport at(uint64_t begun, uint64_t done, bool pause = false) { return {begun, done, true, pause}; }
};

TEST_F(Watching, NamesARankThatIsSilentAndOnlyThen) {
  EXPECT_EQ(after(100, {{}, {}, {}}), "");
  EXPECT_EQ(after(9, {{}, {}, {}}, 1), "");
  EXPECT_EQ(after(100, {{}, {}, {}}), "");
  EXPECT_EQ(after(100, {{}, {}, {}}, 1), "219: <1> has not answered for 10 s: it is stopped, or its machine is gone");
}

TEST_F(Watching, ARankThatHasLeftMayBeSilent) {
  watch.leave(1);
  EXPECT_EQ(after(100, {at(5, 5), at(4, 4), at(5, 5)}, 1), "");
}

TEST_F(Watching, NobodyIsBlamedWhenTheTimeoutIsZero) {
  watch = Watchdog(3, 0);
  SetUp();
  EXPECT_EQ(after(100, {at(5, 5), at(4, 4), at(5, 5)}, 1), "");
}

TEST_F(Watching, NobodyIsBlamedForTheTimeInWhichTheWatchItselfWasStopped) {
  EXPECT_EQ(after(5, {{}, {}, {}}), "");
  now += 1000;
  EXPECT_EQ(watch.verdict(now), "");
  EXPECT_EQ(after(9, {{}, {}, {}}, 1), "");
  EXPECT_NE(after(2, {{}, {}, {}}, 1), "");
}

TEST_F(Watching, NamesTheRankForWhichOthersWaitSinceTheyDo) {
  EXPECT_EQ(after(100, {at(7, 7), at(7, 7), at(7, 7)}), "") << "all compute";
  EXPECT_EQ(after(9, {at(8, 7), at(7, 7), at(7, 7)}), "");
  EXPECT_EQ(after(9, {at(8, 7), at(7, 7), at(8, 7)}), "110: <1> has not come to collective number 8, where <0> has waited for 10 s");
}

TEST_F(Watching, ARankThatComesLateEachTimeIsNotHanging) {
  for (uint64_t n = 0; n < 20; n++) {
    EXPECT_EQ(after(8, {at(n + 1, n), at(n, n), at(n + 1, n)}), "");
    EXPECT_EQ(after(1, {at(n + 1, n + 1), at(n + 1, n + 1), at(n + 1, n + 1)}), "");
  }
  for (uint64_t n = 20; n < 40; n++)
    EXPECT_EQ(after(8, {at(n + 2, n + 1), at(n + 1, n), at(n + 2, n + 1)}), "") << "nor if it is never first";
}

TEST_F(Watching, ARankIsExcusedAsLongAsItSaysAndThenHasItsTime) {
  EXPECT_EQ(after(9, {at(7, 7), at(8, 7), at(8, 7)}), "");
  EXPECT_EQ(after(100, {at(7, 7, true), at(8, 7), at(8, 7)}), "");
  EXPECT_EQ(after(9, {at(7, 7), at(8, 7), at(8, 7)}), "");
  EXPECT_EQ(after(9, {at(7, 7), at(8, 7), at(8, 7)}), "119: <0> has not come to collective number 8, where <1> has waited for 10 s");
}

TEST_F(Watching, NobodyIsBlamedWhenAllWaitInACollectiveThatDoesNotEnd) {
  EXPECT_EQ(after(5, {at(8, 7), at(8, 7), at(7, 7)}), "");
  EXPECT_EQ(after(100, {at(8, 7), at(8, 7), at(8, 7)}),
            "16: all ranks have waited 10 s in collective number 8, which does not end: look at the network (NCCL_DEBUG=INFO)");
}

TEST_F(Watching, ACollectiveThatOneRankHasEndedIsNotOneThatDoesNotEnd) {
  EXPECT_EQ(after(100, {at(8, 8), at(8, 7), at(8, 7)}), "");
}

TEST_F(Watching, ProgressIsJudgedOnceAllReportIt) {
  EXPECT_EQ(after(100, {at(8, 7), {}, at(8, 7)}), "");
  EXPECT_NE(after(11, {at(8, 7), at(0, 0), at(8, 7)}), "");
}

// ----------------------------------------------------------------------------
// Processes

using Body = std::function<void(RankChannel&, int rank)>;

struct Meeting {
  std::string place;
  int size;
  double hang_seconds = 30, patience_seconds = 30;
};

// A rank's process, and what it prints.
struct Process {
  pid_t pid;
  std::string err_path;
};

class Channel : public CommandLine {
 protected:
  int num_started = 0;

  static std::string free_port_at(const std::string& host) {
    static int next = 20000 + int(getpid()) * 7 % 20000;
    return format("tcp:%s:%d", host.c_str(), next++);
  }
  // A process that does what `body` says, with errors as in main().
  Process start(const std::function<void(RankChannel&)>& body) {
    const Process p = {fork(), in(format("err.%d", num_started++))};
    if (p.pid != 0) return p;
    if (freopen(p.err_path.c_str(), "w", stderr) == nullptr) _exit(2);
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
  // Rank `rank`: meets the others, does what `body` says and leaves.
  Process start_rank(const Meeting& meeting, int rank, const Body& body, double delay = 0) {
    return start([=](RankChannel& channel) {
      sleep_for(delay);
      channel.open({rank, meeting.size, 0, meeting.place, false}, meeting.hang_seconds, meeting.patience_seconds);
      body(channel, rank);
      channel.leave();
    });
  }
  std::vector<Process> start_ranks(const Meeting& meeting, const Body& body) {
    std::vector<Process> all;
    for (int rank = 0; rank < meeting.size; rank++) all.push_back(start_rank(meeting, rank, body));
    return all;
  }
  // Its exit status; -1 if a signal ended it, -2 if nothing did within `seconds`.
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
  static void expect_peace(const std::vector<Process>& all) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      EXPECT_EQ(wait_for(all[rank]), 0) << rank;
      EXPECT_EQ(read_file(all[rank].err_path), "") << rank;
    }
  }
  // All end with status 1; rank 0 says one line with each of `parts`, and the others nothing.
  static void expect_one_error(const std::vector<Process>& all, const std::vector<std::string>& parts) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      EXPECT_EQ(wait_for(all[rank]), 1) << rank;
      const std::string err = read_file(all[rank].err_path);
      EXPECT_EQ(lines_in(err), rank == 0 ? 1u : 0u) << rank << "\n" << err;
      for (const std::string& part : rank == 0 ? parts : std::vector<std::string>())
        EXPECT_NE(err.find(part), std::string::npos) << part << "\n" << err;
    }
  }
  // Has the victim gone, and every other rank ended with status 1 and a line that holds `text`: rank 0, or if it is the victim, all.
  static void expect_end_by_loss_of(size_t victim, const std::vector<Process>& all, const std::string& text) {
    for (size_t rank = 0; rank < all.size(); rank++) {
      if (rank == victim) continue;
      EXPECT_EQ(wait_for(all[rank]), 1) << "rank " << rank << " without rank " << victim;
      const std::string err = read_file(all[rank].err_path), expected = format("rank %d (pid %d on ", int(victim), int(all[victim].pid));
      if (rank > 0 && victim > 0) {
        EXPECT_EQ(err, "") << rank;
        continue;
      }
      EXPECT_EQ(lines_in(err), 1u) << err;
      EXPECT_EQ(err.find("error: " + expected), 0u) << err;
      EXPECT_NE(err.find(text), std::string::npos) << err;
    }
    kill(all[victim].pid, SIGKILL);
    EXPECT_EQ(wait_for(all[victim]), -1);
  }
  // A line of a file that a process has written.
  void await_file(const std::string& name) const {
    for (const double end = seconds_now() + 15; !fs::exists(in(name)) && seconds_now() < end; sleep_for(0.002)) {}
    ASSERT_TRUE(fs::exists(in(name))) << name;
  }
};

// Numbers as a GPU would write them: collectives in which each rank waits for the others. `before` is called ahead of each.
struct Collectives {
  volatile uint64_t begun = 0, done = 0;
  void run(RankChannel& channel, uint64_t count, const std::function<void(uint64_t)>& before = [](uint64_t) {}) {
    channel.watch_progress(&begun, &done);
    while (done < count) {
      before(done + 1);
      begun = begun + 1;
      channel.check_same_on_all_ranks("step", std::to_string(begun));
      done = begun;
    }
  }
};

static void compute(RankChannel& channel, int) { Collectives().run(channel, UINT64_MAX); }

// ----------------------------------------------------------------------------
// Meeting

TEST_F(Channel, RanksMeetShareAndLeaveWithoutAWord) {
  const auto body = [](RankChannel& channel, int rank) {
    int number = 100 + rank;
    channel.broadcast(&number, sizeof number);
    if (number != 100) throw UserError("shared");
    channel.check_same_on_all_ranks("numbers", "same");
    Collectives().run(channel, 20);
  };
  for (int size : {1, 2, 5}) {
    for (const std::string& place : {"file:" + in("meet"), free_port_at("localhost"), free_port_at("127.0.0.1"), free_port_at("[::1]")}) {
      SCOPED_TRACE(place);
      expect_peace(start_ranks({place, size}, body));
    }
  }
  EXPECT_FALSE(fs::exists(in("meet")));
}

TEST_F(Channel, RanksMayComeInAnyOrderAndLate) {
  for (const std::string& place : {"file:" + in("meet"), free_port_at("localhost")}) {
    const Meeting meeting = {place, 4};
    const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
    std::vector<Process> all;
    for (int rank = 0; rank < 4; rank++) all.push_back(start_rank(meeting, rank, body, rank == 0 ? 0.4 : rank == 2 ? 0.8 : 0));
    expect_peace(all);
  }
}

// A socket at a port that the system picks, in the text that rank 0 would leave in a file.
struct Listener {
  int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
  Listener() {
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port = ntohs(at.sin_port);
  }
  ~Listener() { close(fd); }
};

TEST_F(Channel, AFileThatAnEarlierRunHasLeftMisleadsNobody) {
  const Listener deaf, of_another_run;
  listen(of_another_run.fd, 10);  // takes connections and says nothing
  const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
  int case_number = 0;
  for (const std::string& text : {std::string(), std::string("nonsense"), format("0123 %d 127.0.0.1\n", deaf.port),
                                  format("0123 %d 127.0.0.1\n", of_another_run.port)}) {
    const Meeting meeting = {"file:" + in(format("meet%d", case_number++)), 2};
    write_file(meeting.place.substr(5), text);
    const Process second = start_rank(meeting, 1, body);
    sleep_for(0.1);
    const Process first = start_rank(meeting, 0, body);
    expect_peace({first, second});
  }
}

// Rank 1 reads the file of another run, whose rank 0 is there: it must not join that one.
TEST_F(Channel, ATokenTellsOneRunFromAnother) {
  const Meeting one = {"file:" + in("one"), 2}, other = {"file:" + in("other"), 2};
  const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
  const Process one_first = start_rank(one, 0, body);
  await_file("one");
  const std::string invitation = read_file(in("one"));
  write_file(in("other"), "x" + invitation);
  const Process other_second = start_rank(other, 1, body);
  sleep_for(0.2);
  const Process other_first = start_rank(other, 0, body), one_second = start_rank(one, 1, body);
  expect_peace({one_first, one_second, other_first, other_second});
}

static int connection_to(const std::string& place) {
  sockaddr_in at = {};
  at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(uint16_t(atoi(place.c_str() + place.rfind(':') + 1)));
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  for (const double end = seconds_now() + 5; connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0; sleep_for(0.01))
    if (seconds_now() > end) return -1;
  return fd;
}

TEST_F(Channel, StrangersAreNotLetInAndHoldNobodyUp) {
  const Meeting meeting = {free_port_at("localhost"), 2};
  const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
  const Process first = start_rank(meeting, 0, body);
  const int silent = connection_to(meeting.place), talkative = connection_to(meeting.place), gone = connection_to(meeting.place);
  const std::string request(100, 'G');
  EXPECT_EQ(send(talkative, request.data(), request.size(), MSG_NOSIGNAL), ssize_t(request.size()));
  close(gone);
  char answer;
  EXPECT_LE(recv(talkative, &answer, 1, 0), 0);
  const double start = seconds_now();
  expect_peace({first, start_rank(meeting, 1, body)});
  EXPECT_LT(seconds_now() - start, 4);
  close(silent), close(talkative);
}

// Rank 1 knocks again when it is not answered; that it has given up on the first connection is no death.
TEST_F(Channel, ARankZeroThatIsStoppedWhileOthersComeStillLetsThemIn) {
  const Meeting meeting = {"file:" + in("meet"), 2};
  const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
  const Process first = start_rank(meeting, 0, body);
  await_file("meet");
  kill(first.pid, SIGSTOP);
  const Process second = start_rank(meeting, 1, body);
  sleep_for(2.5);
  kill(first.pid, SIGCONT);
  expect_peace({first, second});
}

TEST_F(Channel, ARankOfAnotherNumberOfRanksIsRefusedAndToldWhy) {
  for (const std::string& place : {"file:" + in("meet"), free_port_at("localhost")}) {
    const auto body = [](RankChannel& channel, int) { Collectives().run(channel, 3); };
    const Process first = start_rank({place, 2}, 0, body), wrong = start_rank({place, 3}, 1, body);
    EXPECT_EQ(wait_for(wrong), 1);
    EXPECT_EQ(read_file(wrong.err_path),
              "error: --rendezvous " + place + ": rank 1 of 3 has come to rank 0 of 2; start all with the same --ranks\n");
    expect_peace({first, start_rank({place, 2}, 1, body)});
  }
}

TEST_F(Channel, TwoProcessesThatAreTheSameRankAreToldSo) {
  const Meeting meeting = {"file:" + in("meet"), 3};
  const auto body = [](RankChannel& channel, int) {
    channel.broadcast("");
    Collectives().run(channel, 3);
  };
  const Process first = start_rank(meeting, 0, body), one = start_rank(meeting, 1, [this, body](RankChannel& channel, int rank) {
    write_file(in("one_is_in"), "");
    body(channel, rank);
  });
  await_file("one_is_in");
  const Process other = start_rank(meeting, 1, body);
  EXPECT_EQ(wait_for(other), 1);
  const std::string err = read_file(other.err_path);
  EXPECT_NE(err.find(format("two processes are rank 1, this one and rank 1 (pid %d on ", int(one.pid))), std::string::npos) << err;
  expect_peace({first, one, start_rank(meeting, 2, body)});
}

TEST_F(Channel, WhoDoesNotComeIsNamed) {
  for (const std::string& place : {"file:" + in("meet"), free_port_at("localhost")}) {
    const Meeting meeting = {place, 5, 30, 1};
    std::vector<Process> all;
    for (int rank : {0, 1, 3}) all.push_back(start_rank(meeting, rank, compute));
    const Process without_first = start_rank({free_port_at("localhost"), 5, 30, 1}, 1, compute);
    expect_one_error(all, {"of 5 ranks these have not come within 1 s: 2, 4;"});
    EXPECT_EQ(wait_for(without_first), 1);
    EXPECT_NE(read_file(without_first.err_path).find("rank 1 of 5 has waited 1 s for rank 0"), std::string::npos);
  }
  EXPECT_FALSE(fs::exists(in("meet")));
}

TEST_F(Channel, APlaceThatCannotBeIsAnError) {
  for (const char* place : {"tcp:localhost", "tcp:localhost:0", "tcp:localhost:70000", "tcp::29500"})
    for (int rank : {0, 1}) {
      const Process p = start_rank({place, 2}, rank, compute);
      EXPECT_EQ(wait_for(p), 1) << place;
      EXPECT_NE(read_file(p.err_path).find("it must be tcp:HOST:PORT, with a port from 1 to 65535"), std::string::npos) << place;
    }
  const Process lost = start_rank({"tcp:no-such-host.invalid:29500", 2}, 1, compute);
  EXPECT_EQ(wait_for(lost), 1);
  EXPECT_EQ(read_file(lost.err_path).find("error: --rendezvous tcp:no-such-host.invalid:29500: "), 0u);
}

// ----------------------------------------------------------------------------
// Messages

// BUG llmc/dist/rank_channel.cpp: `peer.received[size_t(message.topic)].push` -> `peer.received[0].push`
TEST_F(Channel, MessagesKeepTheirOrderAndTopicsDoNotWaitForEachOther) {
  constexpr int count = 500;
  const auto text = [](int rank, Topic topic, int i) {
    return format("%d %d %d ", rank, int(topic), i) + std::string(i == 250 ? 5000000 : size_t(i), 'x');
  };
  const auto exchange = [=](RankChannel& channel, int rank, Topic topic) {
    const auto others = rank == 0 ? std::vector<int>{1, 2} : std::vector<int>{0};
    for (int i = 0; i < count; i++)
      for (int other : others) channel.send(other, topic, text(rank, topic, i));
    for (int i = 0; i < count; i++)
      for (int other : others)
        if (channel.receive(other, topic) != text(other, topic, i)) throw UserError("another message");
  };
  expect_peace(start_ranks({"file:" + in("meet"), 3}, [=](RankChannel& channel, int rank) {
    std::thread background([&] { exchange(channel, rank, Topic::checkpoint); });
    exchange(channel, rank, Topic::run);
    background.join();
    // All of one topic is there before anybody asks for the other.
    if (rank == 0) {
      channel.send(1, Topic::checkpoint, "first");
      channel.send(1, Topic::run, "second");
    } else if (rank == 1 && (channel.receive(0, Topic::run) != "second" || channel.receive(0, Topic::checkpoint) != "first")) {
      throw UserError("mixed up");
    }
    channel.check_same_on_all_ranks("end", "");
  }));
}

TEST_F(Channel, WhatIsNotTheSameIsToldOnEveryRankAndNamesTheFirst) {
  const std::vector<Process> all = start_ranks({"file:" + in("meet"), 4}, [this](RankChannel& channel, int rank) {
    channel.check_same_on_all_ranks("options", "a=1\nb=2\n");
    try {
      channel.check_same_on_all_ranks("options", rank < 2 ? "a=1\nb=2\nc=3\n" : format("a=1\nb=%d\nc=3\n", rank + 1));
    } catch (const UserError& e) {
      write_file(in(format("told_%d", rank)), e.what());
    }
  });
  expect_peace(all);
  const std::string told = read_file(in("told_0"));
  EXPECT_EQ(told.find(format("options: rank 2 (pid %d on ", int(all[2].pid))), 0u) << told;
  EXPECT_NE(told.find("has \"b=3\", where rank 0 has \"b=2\"; all ranks need the same"), std::string::npos) << told;
  for (int rank = 1; rank < 4; rank++) EXPECT_EQ(read_file(in(format("told_%d", rank))), told);
}

TEST_F(Channel, NobodyPassesBeforeAllHaveAskedForTheSame) {
  expect_peace(start_ranks({"file:" + in("meet"), 3}, [this](RankChannel& channel, int rank) {
    if (rank == 2) sleep_for(0.5), write_file(in("came"), "");
    channel.check_same_on_all_ranks("barrier", "");
    if (!fs::exists(in("came"))) throw UserError("too early");
  }));
}

// ----------------------------------------------------------------------------
// Ends

// A rank is killed at any time from its start on: before it has met anybody, while it does, when all compute.
TEST_F(Channel, WhenARankIsKilledAtAnyTimeAllEndAndNameIt) {
  std::mt19937 random(1);
  int before_meeting = 0, after_meeting = 0;
  for (int batch = 0; batch < 6; batch++) {
    struct Run {
      std::vector<Process> all;
      size_t victim;
      double kill_at;
    };
    std::vector<Run> runs;
    for (int i = 0; i < 8; i++) {
      const int size = 2 + int(random() % 4);
      const Meeting meeting = {i % 2 == 0 ? free_port_at("localhost") : "file:" + in(format("meet_%d_%d", batch, i)), size, 30, 1};
      Run run = {{}, random() % size_t(size), 0};
      for (int rank = 0; rank < size; rank++) run.all.push_back(start_rank(meeting, rank, compute, double(random() % 50) * 1e-3));
      run.kill_at = seconds_now() + double(random() % 160) * 1e-3;
      runs.push_back(run);
    }
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.kill_at < b.kill_at; });
    for (const Run& run : runs) {
      sleep_for(std::max(0.0, run.kill_at - seconds_now()));
      kill(run.all[run.victim].pid, SIGKILL);
    }
    for (const Run& run : runs) {
      const std::string died = format("error: rank %d (pid %d on ", int(run.victim), int(run.all[run.victim].pid));
      EXPECT_EQ(wait_for(run.all[run.victim]), -1);
      for (size_t rank = 0; rank < run.all.size(); rank++) {
        if (rank == run.victim) continue;
        EXPECT_EQ(wait_for(run.all[rank]), 1) << "rank " << rank << " without rank " << run.victim;
        const std::string err = read_file(run.all[rank].err_path);
        if (rank > 0 && run.victim > 0) {
          EXPECT_EQ(err, "");
          continue;
        }
        const std::string missed = run.victim > 0 ? format("not come within 1 s: %d;", int(run.victim)) : "has waited 1 s for rank 0";
        const bool says_missed = err.find(missed) != std::string::npos;
        const bool says_died = err.find(died) == 0 && err.find(" has died; the run ends, and -y goes on") != std::string::npos;
        EXPECT_TRUE(says_missed || says_died) << err;
        EXPECT_EQ(lines_in(err), 1u) << err;
        before_meeting += says_missed, after_meeting += says_died;
      }
    }
  }
  EXPECT_GT(before_meeting, 0);
  EXPECT_GT(after_meeting, 10);
}

TEST_F(Channel, ADeathIsNoticedAtOnce) {
  for (size_t victim : {0u, 2u}) {
    const std::vector<Process> all = start_ranks({"file:" + in("meet"), 3}, [this](RankChannel& channel, int rank) {
      channel.check_same_on_all_ranks("meeting", "");
      if (rank == 1) write_file(in("met"), "");
      sleep_for(30);
    });
    await_file("met");
    const double start = seconds_now();
    kill(all[victim].pid, SIGKILL);
    expect_end_by_loss_of(victim, all, " has died; the run ends");
    EXPECT_LT(seconds_now() - start, 2);
    fs::remove(in("met"));
  }
}

// It would look for rank 0 in vain.
TEST_F(Channel, WhoComesAfterADeathIsStillToldToEnd) {
  const Meeting meeting = {"file:" + in("meet"), 3};
  std::vector<Process> all = {start_rank(meeting, 0, compute), start_rank(meeting, 1, [this](RankChannel& channel, int rank) {
    write_file(in("one_is_in"), "");
    compute(channel, rank);
  })};
  await_file("one_is_in");
  kill(all[1].pid, SIGKILL);
  for (const double end = seconds_now() + 5; read_file(all[0].err_path).empty() && seconds_now() < end;) sleep_for(0.01);
  EXPECT_EQ(lines_in(read_file(all[0].err_path)), 1u) << "the death is told at once";
  all.push_back(start_rank(meeting, 2, compute));
  expect_end_by_loss_of(1, all, " has died; the run ends");
}

TEST_F(Channel, ARankThatIsStoppedIsNamed) {
  std::vector<std::vector<Process>> runs;
  for (size_t victim : {0u, 1u}) runs.push_back(start_ranks({"file:" + in(format("meet%d", int(victim))), 3, 2}, compute));
  sleep_for(1);
  for (size_t victim : {0u, 1u}) kill(runs[victim][victim].pid, SIGSTOP);
  const double start = seconds_now();
  for (size_t victim : {0u, 1u})
    expect_end_by_loss_of(victim, runs[victim], " has not answered for 2 s: it is stopped, or its machine is gone; the run ends");
  EXPECT_LT(seconds_now() - start, 6);
}

// A training thread that hangs while the process lives; and a network that does.
TEST_F(Channel, ARankThatDoesNotComeToACollectiveIsNamedAndNobodyIfAllHaveCome) {
  const std::vector<Process> all_wait = start_ranks({"file:" + in("meet"), 3, 2}, [](RankChannel& channel, int) {
    volatile uint64_t begun = 8, done = 7;
    channel.watch_progress(&begun, &done);
    sleep_for(30);
  });
  std::vector<std::vector<Process>> runs;
  for (int victim : {0, 1})
    runs.push_back(start_ranks({"file:" + in(format("meet%d", victim)), 3, 2}, [victim](RankChannel& channel, int rank) {
      Collectives().run(channel, 100, [=](uint64_t n) {
        if (rank == victim && n == 8) sleep_for(30);
      });
    }));
  for (int victim : {0, 1})
    expect_one_error(runs[size_t(victim)], {format("error: rank %d (pid %d on ", victim, int(runs[size_t(victim)][size_t(victim)].pid)),
                                            " has not come to collective number 8, where ", " has waited for 2 s; the run ends"});
  expect_one_error(all_wait, {"error: all ranks have waited 2 s in collective number 8, which does not end: look at the network"});
}

TEST_F(Channel, AnExcusedRankMayTakeItsTime) {
  expect_peace(start_ranks({"file:" + in("meet"), 3, 2}, [](RankChannel& channel, int rank) {
    Collectives().run(channel, 10, [&](uint64_t n) {
      if (rank != 0 || n != 8) return;
      const WatchdogPause pause(channel);
      sleep_for(3);
    });
  }));
}

TEST_F(Channel, WithATimeoutOfZeroNothingIsAHang) {
  expect_peace(start_ranks({"file:" + in("meet"), 2, 0}, [](RankChannel& channel, int rank) {
    Collectives().run(channel, 10, [&](uint64_t n) {
      if (rank == 1 && n == 8) sleep_for(1);
    });
  }));
}

// ----------------------------------------------------------------------------
// Errors and leaving

TEST_F(Channel, AnErrorOfOneRankIsToldByRankZeroAndEndsAll) {
  const std::vector<Process> all = start_ranks({"file:" + in("meet"), 4}, [](RankChannel& channel, int rank) {
    channel.check_same_on_all_ranks("meeting", "");
    if (rank == 2) throw UserError("no such file");
    compute(channel, rank);
  });
  expect_one_error(all, {format("error: rank 2 (pid %d on ", int(all[2].pid)), "): no such file\n"});
}

TEST_F(Channel, AnErrorThatAllRanksMeetIsToldOnceAndIsNobodys) {
  const std::vector<Process> all = start_ranks({"file:" + in("meet"), 4}, [](RankChannel& channel, int rank) {
    channel.check_same_on_all_ranks("meeting", "");
    sleep_for(rank == 0 ? 0.5 : 0);
    throw UserError("no such file");
  });
  expect_one_error(all, {"error: no such file\n"});
}

TEST_F(Channel, AnErrorOfRankZeroEndsTheOthersSilently) {
  const std::vector<Process> all = start_ranks({"file:" + in("meet"), 4}, [](RankChannel& channel, int rank) {
    channel.check_same_on_all_ranks("meeting", "");
    if (rank == 0) throw UserError("no such file");
    compute(channel, rank);
  });
  expect_one_error(all, {"error: no such file\n"});
}

TEST_F(Channel, ARankLeavesWithTheOthersOrAfterFiveSecondsWithoutThem) {
  const auto leave_after = [this](const std::string& name, double seconds_of_first, double seconds_of_second) {
    return start_ranks({"file:" + in(name), 2, 2}, [=](RankChannel& channel, int rank) {
      channel.check_same_on_all_ranks("meeting", "");
      sleep_for(rank == 0 ? seconds_of_first : seconds_of_second);
    });
  };
  const double start = seconds_now();
  const std::vector<Process> first_later = leave_after("first_later", 6, 0), second_later = leave_after("second_later", 0, 30);
  expect_peace(leave_after("together", 0.5, 0));
  EXPECT_LT(seconds_now() - start, 2);
  expect_peace({second_later[0]});
  EXPECT_LT(seconds_now() - start, 6) << "five seconds";
  expect_peace(first_later);
  kill(second_later[1].pid, SIGKILL);
  EXPECT_EQ(wait_for(second_later[1]), -1);
}
