// A control channel between the ranks of a run, beside NCCL: a TCP connection of every rank to rank 0 that lasts as
// long as the run. In every process a thread serves it, and ends the process when a rank dies or hangs: NCCL's
// collectives would wait for that rank forever. Whatever the other threads are blocked in, the run ends with one
// message that names the rank. Rank 0 prints it; if rank 0 is the one, all others do.
//
// A process becomes a rank by proving that it knows the run's key (rank_channel.cpp: proofs). Whatever else connects is
// dropped within two seconds; strangers' bytes are bounded, and end no rank. After that nothing is encrypted or signed:
// who can read the network sees what ranks send (options, errors, NCCL's ID and all of its data), who can change it can
// change the run, and whoever knows NCCL's ID can connect to NCCL's own ports.
//
//   a rank dies          its connection is closed, by its machine's system
//   a rank is stopped    its heartbeats stop, as when a machine loses power
//   a rank hangs         it does not reach the collective in which others wait (watchdog.h)
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include "ranks.h"

// Messages of different topics do not wait for each other: each topic may be used by a thread of its own.
enum class Topic : uint32_t { run, checkpoint, memory, count };

struct RankChannel {
  // The channel of a single process: broadcast and check_same_on_all_ranks return at once, watch_progress and finalize
  // do nothing.
  RankChannel();
  RankChannel(const RankChannel&) = delete;
  RankChannel& operator=(const RankChannel&) = delete;
  // If finalize() has not been called, the other ranks report that this one has died.
  ~RankChannel();

  // Connects to the other ranks, at ranks.rendezvous or, with MPI, where rank 0 tells them. Rank 0 returns when all are
  // connected, the others when rank 0 has accepted them. Throws UserError if not all have connected within
  // timeout_seconds, with their numbers, if rank 0 rejects this one, or if it cannot listen; by TCP also if the ranks'
  // secrets differ, or there is none and rank 0 is on another machine. hang_seconds: for how long a rank may be silent,
  // or let others wait; 0: without limit. Does nothing for a single process.
  void open(const Ranks& ranks, double hang_seconds, double timeout_seconds = 300);
  bool is_open() const;

  // Between rank 0 and any other. send does not wait; receive waits for the next message of the topic from that rank,
  // in the order of sending. If a rank is lost, this process ends; if the other one has called finalize(), they throw
  // UserError. Both may be called only while the channel is open.
  void send(int to, Topic topic, const std::string& bytes);
  std::string receive(int from, Topic topic);

  // The next three are called by every rank, in the same order, by the thread that uses Topic::run.
  void broadcast(void* bytes, size_t count);       // bytes (count) = rank 0's
  std::string broadcast(const std::string& text);  // returns rank 0's text
  // Throws the same UserError on every rank if the text `mine` of some rank differs from rank 0's. It names `what`, the
  // first such rank and the first line that differs. No rank returns before all have called it.
  void check_same_on_all_ranks(const char* what, const std::string& mine);
  // Throws the same UserError on every rank if two ranks have the same text `mine`. It names `what`, the text and the
  // first such ranks. No rank returns before all have called it.
  void check_distinct_on_all_ranks(const char* what, const std::string& mine);

  // From the time that all ranks have called it, they are expected to reach the same collectives. The GPU counts in
  // *begun those that it has reached, in *done those that it has finished; the memory must stay valid until finalize().
  void watch_progress(const volatile uint64_t* begun, const volatile uint64_t* done);

  // Ends the run because of an error of this rank. Rank 0 prints `error: ` and the text, preceded by the rank if it is
  // another one's. Most errors occur on all ranks: for another rank's error, rank 0 waits a second for its own.
  [[noreturn]] void end_run(const std::string& error);

  // Clean shutdown: from here on the end of a process is no error. Waits until all others have called it, but at most
  // five seconds.
  void finalize();

 private:
  friend struct WatchdogPause;
  struct State;
  std::unique_ptr<State> state_;  // null for a single process
};

// While it exists, this rank does something that the others don't (rank 0 prints a sample or waits for the disk), and
// is not reported as hanging for being late.
struct WatchdogPause {
  explicit WatchdogPause(RankChannel& channel);
  WatchdogPause(const WatchdogPause&) = delete;
  WatchdogPause& operator=(const WatchdogPause&) = delete;
  ~WatchdogPause();

 private:
  RankChannel& channel_;
};
