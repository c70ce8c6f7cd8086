// What the ranks of a run tell each other beside NCCL, over a TCP connection of each to rank 0 that lasts as long as the run. A thread of
// every process serves it, and ends the process when a rank dies or hangs: NCCL's collectives would wait for that rank for ever. Whatever
// the other threads are stuck in, the run ends with one message that names the rank: rank 0's, or if it is rank 0, everybody's.
//
//   a rank dies          its connection closes, which the system of its machine sees to
//   a rank is stopped    its heartbeats stay out, as when a machine loses power
//   a rank hangs         it does not come to the collective in which others wait (watchdog.h)
#pragma once
#include <cstddef>  // size_t
#include <cstdint>  // uint64_t
#include <memory>   // std::unique_ptr
#include <string>   // std::string
#include "ranks.h"  // Ranks

// Messages of different topics do not wait for each other: a thread for each topic may send and receive.
enum class Topic : uint32_t { run, checkpoint };

struct RankChannel {
  RankChannel();  // of a process alone: nobody to send to or receive from, and the rest does nothing
  RankChannel(const RankChannel&) = delete;
  RankChannel& operator=(const RankChannel&) = delete;
  ~RankChannel();  // without leave(), the other ranks take this one for dead

  // Meets the other ranks at ranks.rendezvous, or where rank 0 tells them by MPI. Rank 0 returns when all have come, the others when rank
  // 0 has let them in. Throws UserError if they have not come after patience_seconds, with their numbers, or if rank 0 refuses this one.
  // hang_seconds: how long a rank may be silent, or let others wait; 0: for ever.
  void open(const Ranks& ranks, double hang_seconds, double patience_seconds = 300);
  bool is_open() const;

  // Between rank 0 and any other. send returns at once; receive waits for the next message of the topic from that rank, in the order in
  // which they were sent. Neither has errors: if a rank is gone, so is this process.
  void send(int to, Topic topic, const std::string& bytes);
  std::string receive(int from, Topic topic);

  // The next two are called by every rank, in the same order, by the thread that has Topic::run.
  void broadcast(void* bytes, size_t count);  // bytes = rank 0's
  std::string broadcast(const std::string& text);
  // Throws UserError on every rank, the same, that names the first rank whose `mine` is not rank 0's, and the first line that differs. No
  // rank returns before all have called it.
  void check_same_on_all_ranks(const char* what, const std::string& mine);

  // From here on, when all ranks have called it, they are expected to come to the same collectives. What the pointers point to, which
  // the GPU writes, stays until leave().
  void watch_progress(const volatile uint64_t* begun, const volatile uint64_t* done);

  // Ends the run because of an error of this rank. Rank 0 prints `error: ` and the text, with the rank if it is another one's. Most
  // errors meet every rank: one of another rank waits for a second whether rank 0 has it too.
  [[noreturn]] void end_run(const std::string& error);

  // In peace: from here on nobody's end is an accident. Waits until the others leave, too, but for no more than five seconds.
  void leave();

 private:
  friend struct WatchdogPause;
  struct State;
  std::unique_ptr<State> state_;  // null for a process alone
};

// While it lives this rank does something that others don't (rank 0 prints a sample or waits for the disk): its being late is no hang.
struct WatchdogPause {
  explicit WatchdogPause(RankChannel& channel);
  WatchdogPause(const WatchdogPause&) = delete;
  WatchdogPause& operator=(const WatchdogPause&) = delete;
  ~WatchdogPause();

 private:
  RankChannel& channel_;
};
