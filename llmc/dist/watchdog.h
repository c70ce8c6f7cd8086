// Decides from the ranks' heartbeats whether one of them has died or hangs. It uses no clock of its own: all times are
// passed in, in seconds.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>
#include "llmc/utils/error.h"

// What every heartbeat of a rank reports.
struct RankReport {
  uint64_t begun = 0, done = 0;  // collectives that its GPU has reached, and has finished
  bool is_watched = false;       // these counts are valid
  bool is_paused = false;  // the rank is doing something that the others don't, which may take long (WatchdogPause)
};

struct Watchdog {
  // Reports a rank after hang_seconds without a heartbeat or without progress; 0: never. Ranks that have not been added
  // are not checked.
  Watchdog(int num_ranks, double hang_seconds) : hang_seconds_(hang_seconds), ranks_(num_ranks) {}

  // Rank `rank` has connected.
  void add(int rank, const std::string& name, double now) {
    Rank& r = ranks_[rank];
    r.name = name, r.is_added = true;
    r.last_heartbeat = r.last_progress = r.waited_for_since = now;
  }
  // Rank `rank` has shut down cleanly: its silence is no error from here on, and progress is no longer checked.
  void remove(int rank) { ranks_[rank].is_added = false; }
  // The name of a rank that has been added: "rank 3 (pid 1234 on node7)".
  const std::string& name(int rank) const { return ranks_[rank].name; }

  void heartbeat(int rank, const RankReport& report, double now) {
    Rank& r = ranks_[rank];
    r.last_heartbeat = now;
    if (report.begun != r.report.begun) r.waited_for_since = now;
    if (report.begun != r.report.begun || report.done != r.report.done) r.last_progress = now;
    r.report = report;
  }

  // Returns what is wrong, and with which rank; "" if nothing is. To be called several times per hang_seconds.
  std::string verdict(double now) {
    // A process that was itself stopped, by a debugger for example, has received no heartbeats meanwhile: that time
    // does not count.
    const double since_last = last_verdict_ > 0 ? now - last_verdict_ : 0;
    last_verdict_ = now;
    if (hang_seconds_ == 0) return "";
    if (since_last > hang_seconds_ / 4)
      for (Rank& r : ranks_)
        r.last_heartbeat += since_last, r.last_progress += since_last, r.waited_for_since += since_last;
    for (const Rank& r : ranks_)
      if (r.is_added && now - r.last_heartbeat >= hang_seconds_)
        return format("%s has not answered for %.0f s: it is stopped, or its machine is gone", r.name.c_str(),
                      now - r.last_heartbeat);
    return progress_verdict(now);
  }

 private:
  struct Rank {
    std::string name;
    bool is_added = false;
    RankReport report;
    double last_heartbeat = 0;
    double last_progress = 0;     // when its counts last changed
    double waited_for_since = 0;  // when it last reached a collective, no rank was ahead of it, or it was paused
  };
  double hang_seconds_, last_verdict_ = 0;
  std::vector<Rank> ranks_;

  std::string progress_verdict(double now) {
    for (const Rank& r : ranks_)
      if (!r.is_added || !r.report.is_watched) return "";
    const auto fewer_begun = [](const Rank& a, const Rank& b) { return a.report.begun < b.report.begun; };
    const Rank& first = *std::max_element(ranks_.begin(), ranks_.end(), fewer_begun);
    const Rank& last = *std::min_element(ranks_.begin(), ranks_.end(), fewer_begun);
    double all_wait_since = 0;  // since when all are in the same collective
    bool all_wait = true;
    for (Rank& r : ranks_) {
      if (r.report.begun == first.report.begun || r.report.is_paused) r.waited_for_since = now;
      all_wait = all_wait && r.report.begun == first.report.begun && r.report.done + 1 == r.report.begun;
      all_wait_since = std::max(all_wait_since, r.last_progress);
    }
    // A rank that is silent too is stopped: verdict() says that, when it has been silent for as long.
    if (now - last.last_heartbeat >= hang_seconds_ / 2) return "";
    if (now - last.waited_for_since >= hang_seconds_)
      return format("%s has not reached collective number %llu, where %s has waited for %.0f s", last.name.c_str(),
                    (unsigned long long)last.report.begun + 1, first.name.c_str(), now - last.waited_for_since);
    if (all_wait && now - all_wait_since >= hang_seconds_)
      return format("all ranks have waited %.0f s in collective number %llu, which does not end: look at the network "
                    "(NCCL_DEBUG=INFO)",
                    now - all_wait_since, (unsigned long long)first.report.begun);
    return "";
  }
};
