// When the parts of a step ran on the device, for --log-level debug. A part is a bucket of parameters (parameters.h)
// and what was done with it: "forward", "backward", "reduce" (of its gradients over the ranks), "gather" (of its
// weights).
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>
#include "llmc/operations.h"

struct TimelineSpan {
  const char* what;
  size_t bucket;
  double begin_ms, end_ms;  // since the first step began
};

// Costs nothing while `on` is false. It records eager work only, not what is replayed as a CUDA graph.
struct Timeline {
  bool on = false;

  // Records the end of a span when destroyed.
  struct Scope {
    Timeline* timeline;  // null: not recording
    size_t index;
    Collectives* collectives;

    Scope(Timeline* t, size_t i, Collectives* c) : timeline(t), index(i), collectives(c) {}
    Scope(const Scope&) = delete;
    ~Scope() {
      if (timeline != nullptr) record(timeline->current_.spans[index].end, collectives);
    }
  };
  // Begins a span of bucket `bucket` that ends with the returned object, on the collectives' stream if they are given,
  // otherwise on the stream of operations. Spans that follow each other and are of the same are one.
  Scope span(const char* what, size_t bucket, Collectives* collectives = nullptr) {
    if (!in_step_) return {nullptr, 0, nullptr};
    const bool continues =
        !current_.spans.empty() && current_.spans.back().what == what && current_.spans.back().bucket == bucket;
    if (!continues) {
      current_.spans.push_back({what, bucket, {}, {}});
      record(current_.spans.back().begin, collectives);
    }
    return {this, current_.spans.size() - 1, collectives};
  }

  // Spans from here to end_step belong to step `step`. The operations of the step before must have finished.
  void start_step(int64_t step) {
    if (!on) return;
    in_step_ = true;
    if (previous_.zero) current_.zero_ms = previous_.zero_ms + current_.zero->ms_since(*previous_.zero);
    previous_ = std::move(current_);
    current_ = {step, GpuEvent(), 0, {}};
    current_.zero->record();
  }
  void end_step() { in_step_ = false; }

  // The step before the one that was started last; -1: none.
  int64_t previous_step() const { return previous_.zero ? previous_.step : -1; }

  // The spans of previous_step(). Their events have completed: the last ones belong to collectives, which the step that
  // was started last has waited for.
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

  static void record(GpuEvent& event, Collectives* collectives) {
    if (collectives != nullptr) collectives->record(event);
    else event.record();
  }
};
