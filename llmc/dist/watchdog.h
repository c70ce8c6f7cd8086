// Do all ranks live and go on? Decided from what they report and from a clock's seconds alone.
#pragma once
#include <algorithm>           // std::max_element, std::min_element
#include <cstdint>             // uint64_t
#include <string>              // std::string
#include <vector>              // std::vector
#include "llmc/utils/error.h"  // format

// What a rank says of itself with every heartbeat.
struct RankReport {
  uint64_t begun = 0, done = 0;  // collectives that its GPU has come to, and that it has ended
  bool is_watched = false;       // these numbers mean something
  bool is_excused = false;       // it does what nobody else does, which may take long
};

struct Watchdog {
  // Nobody is blamed for less than hang_seconds; 0: for nothing. Ranks that have not arrived are not judged.
  Watchdog(int num_ranks, double hang_seconds) : hang_seconds_(hang_seconds), ranks_(size_t(num_ranks)) {}

  void arrive(int rank, const std::string& name, double now) {
    Rank& r = ranks_[size_t(rank)];
    r.name = name, r.is_here = true;
    r.heard = r.moved = r.behind_since = now;
  }
  // Its silence is no fault from here on, and no progress is judged any more.
  void leave(int rank) { ranks_[size_t(rank)].is_here = false; }
  // "rank 3 (pid 1234 on node7)", of one that has arrived
  const std::string& name(int rank) const { return ranks_[size_t(rank)].name; }

  void hear(int rank, const RankReport& report, double now) {
    Rank& r = ranks_[size_t(rank)];
    r.heard = now;
    if (report.begun != r.report.begun) r.behind_since = now;
    if (report.begun != r.report.begun || report.done != r.report.done) r.moved = now;
    r.report = report;
  }

  // What is wrong, naming the rank that it is wrong with; "" if nothing is. Called again and again.
  std::string verdict(double now) {
    // A process that was itself stopped, as by a debugger, has heard nobody meanwhile: that time does not count.
    const double since_last = last_verdict_ > 0 ? now - last_verdict_ : 0;
    last_verdict_ = now;
    if (hang_seconds_ == 0) return "";
    if (since_last > hang_seconds_ / 4)
      for (Rank& r : ranks_) r.heard += since_last, r.moved += since_last, r.behind_since += since_last;
    for (const Rank& r : ranks_)
      if (r.is_here && now - r.heard >= hang_seconds_)
        return format("%s has not answered for %.0f s: it is stopped, or its machine is gone", r.name.c_str(), now - r.heard);
    return progress_verdict(now);
  }

 private:
  struct Rank {
    std::string name;
    bool is_here = false;
    RankReport report;
    double heard = 0;         // when it last reported
    double moved = 0;         // when its numbers last changed
    double behind_since = 0;  // when it last came to a collective, was not behind another, or was pause
  };
  double hang_seconds_, last_verdict_ = 0;
  std::vector<Rank> ranks_;

  std::string progress_verdict(double now) {
    for (const Rank& r : ranks_)
      if (!r.is_here || !r.report.is_watched) return "";
    const auto fewer_begun = [](const Rank& a, const Rank& b) { return a.report.begun < b.report.begun; };
    const Rank& first = *std::max_element(ranks_.begin(), ranks_.end(), fewer_begun);
    const Rank& last = *std::min_element(ranks_.begin(), ranks_.end(), fewer_begun);
    double all_wait_since = 0;  // all are in the same collective since then
    bool all_wait = true;
    for (Rank& r : ranks_) {
      if (r.report.begun == first.report.begun || r.report.is_excused) r.behind_since = now;
      all_wait = all_wait && r.report.begun == first.report.begun && r.report.done + 1 == r.report.begun;
      all_wait_since = std::max(all_wait_since, r.moved);
    }
    if (now - last.behind_since >= hang_seconds_)
      return format("%s has not come to collective number %llu, where %s has waited for %.0f s", last.name.c_str(),
                    (unsigned long long)last.report.begun + 1, first.name.c_str(), now - last.behind_since);
    if (all_wait && now - all_wait_since >= hang_seconds_)
      return format("all ranks have waited %.0f s in collective number %llu, which does not end: look at the network (NCCL_DEBUG=INFO)",
                    now - all_wait_since, (unsigned long long)first.report.begun);
    return "";
  }
};
