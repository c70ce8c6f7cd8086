// When the parts of a step ran on the device: what --log-level debug writes. A part is a bucket of parameters (parameters.h) and what is
// done with it: "forward", "backward", "reduce" (of its gradients over the ranks), "gather" (of its weights).
#pragma once
#include <cstddef>            // size_t
#include <cstdint>            // int64_t
#include <optional>           // std::optional
#include <utility>            // std::move
#include <vector>             // std::vector
#include "llmc/operations.h"  // GpuEvent, Collectives

struct TimelineSpan {
  const char* what;
  size_t bucket;
  double begin_ms, end_ms;  // since the first step began
};

// Off, it costs nothing. It sees what is queued piece by piece; nothing of what is replayed as a CUDA graph.
struct Timeline {
  bool on = false;

  // A span from here to the end of the object's life, of operations or, if `collectives` are given, of those.
  struct Scope {
    Timeline* timeline;  // null: nobody wants to know
    size_t index;
    Collectives* collectives;

    Scope(Timeline* t, size_t i, Collectives* c) : timeline(t), index(i), collectives(c) {}
    Scope(const Scope&) = delete;
    ~Scope() {
      if (timeline != nullptr) record(timeline->current_.spans[index].end, collectives);
    }
  };
  Scope span(const char* what, size_t bucket, Collectives* collectives = nullptr) {
    if (!in_step_) return {nullptr, 0, nullptr};
    current_.spans.push_back({what, bucket, {}, {}});
    record(current_.spans.back().begin, collectives);
    return {this, current_.spans.size() - 1, collectives};
  }

  // Spans from here to end_step are of step `step`. What the last one queued as operations is done.
  void start_step(int64_t step) {
    if (!on) return;
    in_step_ = true;
    if (previous_.zero) current_.zero_ms = previous_.zero_ms + current_.zero->ms_since(*previous_.zero);
    previous_ = std::move(current_);
    current_ = {step, GpuEvent(), 0, {}};
    current_.zero->record();
  }
  void end_step() { in_step_ = false; }

  // The step before the one that was started last; -1: there is none.
  int64_t previous_step() const { return previous_.zero ? previous_.step : -1; }

  // Its spans. They have passed: the last of them are of collectives, which the step that was started last has waited for.
  std::vector<TimelineSpan> previous_spans() const {
    std::vector<TimelineSpan> spans;
    for (const Span& s : previous_.spans)
      spans.push_back({s.what, s.bucket, previous_.zero_ms + s.begin.ms_since(*previous_.zero),
                       previous_.zero_ms + s.end.ms_since(*previous_.zero)});
    return spans;
  }

 private:
  struct Span {
    const char* what;
    size_t bucket;
    GpuEvent begin, end;
  };
  struct Step {
    int64_t step = 0;
    std::optional<GpuEvent> zero;
    double zero_ms = 0;  // since the first step began
    std::vector<Span> spans;
  };
  Step current_, previous_;
  bool in_step_ = false;

  static void record(GpuEvent& moment, Collectives* collectives) {
    if (collectives != nullptr) collectives->record(moment);
    else moment.record();
  }
};
