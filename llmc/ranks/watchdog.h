// A timer in each of several ranks, which ends its process when a collective does not end: NCCL's would wait for ever
// for a rank that is stopped, or has died where no launcher ends the others. The ranks' notes say who is behind.
#pragma once
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include "rank_folder.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/message.h"

struct Watchdog {
  std::atomic<int64_t> step{0};  // at which this rank is
  std::atomic<int> pauses{0};    // WatchdogPause

  ~Watchdog() { stop(); }
  // bytes (count) = rank 0's: here the ranks meet. From then on this one is watched; hang_seconds 0: it only writes its
  // notes. The GPU counts in counts[0] and [1] the collectives that it has begun and done.
  void start(const Ranks& ranks, double hang_seconds, void* bytes, size_t count, const volatile uint64_t* counts) {
    ranks_ = ranks, hang_seconds_ = hang_seconds, counts_ = counts;
    if (!ranks.folder.empty()) folder_ = std::make_unique<RankFolder>(ranks);
    if (ranks.by_mpi) broadcast_by_mpi(bytes, count);
    else folder_->share(bytes, count, hang_seconds);
    thread_ = std::thread([this] { watch(); });
  }
  void stop() {
    is_stopped_ = true;
    if (thread_.joinable()) thread_.join();
    folder_.reset();
  }

 private:
  Ranks ranks_;
  double hang_seconds_ = 0;
  const volatile uint64_t* counts_ = nullptr;
  std::unique_ptr<RankFolder> folder_;
  std::thread thread_;
  std::atomic<bool> is_stopped_{false};

  bool sleeps(double seconds) const {
    for (const double end = seconds_now() + seconds; !is_stopped_ && seconds_now() < end;) usleep(20000);
    return !is_stopped_;
  }

  void write_note() const {
    try {
      folder_->write();
    } catch (const UserError&) {}  // a full disk: nobody will know who is behind
  }

  void watch() {
    const double interval = hang_seconds_ > 0 ? std::min(2.0, hang_seconds_ / 8) : 2;
    uint64_t begun = 0, done = 0;
    // moved: when a collective last began or was done, or this rank was paused. While the process itself is stopped
    // (SIGSTOP, a laptop that sleeps), no time passes for it.
    for (double last = seconds_now(), moved = last; sleeps(interval); last = seconds_now()) {
      const double now = seconds_now(), stopped = std::max(0.0, now - last - 2 * interval);
      const bool moves = counts_[0] != begun || counts_[1] != done || pauses > 0;
      begun = counts_[0], done = counts_[1];
      moved = moves ? now : moved + stopped;
      if (folder_) {
        RankNote& note = folder_->own;
        note.step = step, note.begun = begun, note.idle_seconds = now - moved;
        if (begun > 1) note.shared.clear();  // all have read it
        write_note();
      }
      if (hang_seconds_ == 0 || begun == done) continue;              // it waits for nobody
      if (now - moved < hang_seconds_ + (ranks_.rank > 0)) continue;  // rank 0 tells first
      const std::string who = who_is_behind(begun, interval);
      if (who.empty() || counts_[1] != done) continue;
      print_error(format("%s: at step %lld collective number %llu has not ended for %.0f s: %s; the run ends, and -y "
                         "resumes from its last checkpoint",
                         rank_name(ranks_).c_str(), (long long)step.load(), (unsigned long long)begun, now - moved,
                         who.c_str()));
      folder_.reset();
      _exit(1);
    }
  }

  // Names the ranks that their notes show behind; "" if one of them has moved, or was paused, less than hang_seconds
  // ago. Meanwhile every rank that lives writes a note.
  std::string who_is_behind(uint64_t begun, double interval) {
    if (!folder_) return "there is no folder (-o, --rendezvous) with notes of who is behind";
    const std::vector<RankNote> before = folder_->read_all();
    for (int i = 0; i < 4; i++) sleeps(interval), write_note();
    const std::vector<RankNote> notes = folder_->read_all();
    std::string who;
    for (size_t rank = 0; rank < notes.size(); rank++) {
      const RankNote& note = notes[rank];
      const bool answers = note.times_written != before[rank].times_written;
      if (answers && note.idle_seconds < hang_seconds_) return "";
      if (answers && note.begun >= begun) continue;
      who += (who.empty() ? "" : ", ") + (note.name.empty() ? format("rank %zu", rank) : note.name) +
             format(answers ? " is at step %lld, before it" : " does not answer since its step %lld",
                    (long long)note.step);
    }
    return who.empty() ? "all ranks have come to it: look at the network (NCCL_DEBUG=INFO)" : who;
  }
};

// While it exists, the others wait as long as it takes: this rank prints a sample, or waits for the disk.
struct WatchdogPause {
  explicit WatchdogPause(Watchdog& watchdog) : watchdog_(watchdog) { watchdog_.pauses++; }
  ~WatchdogPause() { watchdog_.pauses--; }

 private:
  Watchdog& watchdog_;
};
