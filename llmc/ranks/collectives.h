// Collectives of the ranks of a data-parallel run, by NCCL. They have their own stream and run concurrently with
// operations: operations must not touch what collectives read or write between comm_waits_for_compute and a later
// compute_waits_for_comm, or await of a mark that follows them.
//
// Every rank calls the same collectives in the same order. They are asynchronous, and do nothing in a single process.
#pragma once
#include <nccl.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>
#include "ranks.h"
#include "llmc/base/error.h"
#include "llmc/ops/parameter_table.h"
#include "llmc/ops/precision.h"
#include "watchdog.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/launch.h"

inline void nccl_check(ncclResult_t status, const char* what) {
  if (status != ncclSuccess)
    user_error("NCCL: %s from %s; NCCL_DEBUG=INFO says more", ncclGetErrorString(status), what);
}
#define NCCL_CHECK(call) nccl_check(call, #call)

// *place = value, in host memory that the GPU can write to. One thread.
__global__ void note_kernel(volatile uint64_t* place, uint64_t value) { *place = value; }

struct Collectives {
  Collectives() = default;  // the collectives of a single process
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // Meets the others and makes the communicator of all ranks, which every rank calls before the GPU is used: it is
  // selected here. From then on the watchdog looks at the collectives. Throws UserError.
  void init(const Ranks& ranks, Watchdog& watchdog, double hang_seconds) {
    if (ranks.size == 1) return;
    rank_ = ranks.rank, size_ = ranks.size, watchdog_ = &watchdog;
    gpu_index() = ranks.local_rank;
    staging_ = static_cast<float*>(device_malloc(staging_bytes));
    // The greatest priority: a collective that is ready takes the next blocks that become free, and the others wait for
    // it.
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&operations_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&collectives_, cudaEventDisableTiming));
    set_nccl_environment();
    progress_ = PinnedBuffer<uint64_t>(2);
    progress_.data[0] = progress_.data[1] = 0;
    ncclUniqueId id = {};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    watchdog.start(ranks, hang_seconds, &id, sizeof id, progress_.data);
    progress_.data[0] = num_collectives_ = 1;  // for which it waits as for a collective
    const ncclResult_t status = ncclCommInitRank(&comm_, size_, id, rank_);
    progress_.data[1] = 1;
    if (status == ncclInvalidUsage)
      user_error("NCCL takes one rank on a GPU, and two of these may have the same, %s here: CUDA_VISIBLE_DEVICES must "
                 "show each machine's ranks as many GPUs as they are, of which LOCAL_RANK=%d takes its own",
                 gpu().id, ranks.local_rank);
    NCCL_CHECK(status);
  }

  // The following wait for the GPU, and for all other ranks.

  // bytes (count), in host memory, = rank root's.
  void broadcast(void* bytes, size_t count, int root = 0) {
    for (size_t at = 0, part = 0; size_ > 1 && at < count; at += part) {
      part = std::min(count - at, staging_bytes);
      char* const place = static_cast<char*>(bytes) + at;
      copy_to_device(reinterpret_cast<char*>(staging_), place, part);
      staged([&] { NCCL_CHECK(ncclBroadcast(staging_, staging_, (part + 3) / 4, ncclFloat, root, comm_, stream_)); });
      copy_to_host(place, reinterpret_cast<char*>(staging_), part);
    }
  }
  // Rank 0's text.
  std::string broadcast(std::string text) {
    size_t size = text.size();
    broadcast(&size, sizeof size);
    text.resize(size);
    broadcast(text.data(), size);
    return text;
  }
  // Does on every rank what may fail on some. Returns when all have done it. If some have failed, the first of them
  // throws its own error, and every other rank throws UserError(""), which is not printed.
  template <class F>
  void together(const F& what) {
    std::exception_ptr error;
    if (watchdog_ != nullptr) watchdog_->pauses++;  // it may read files
    try {
      what();
    } catch (const std::exception&) { error = std::current_exception(); }
    if (watchdog_ != nullptr) watchdog_->pauses--;
    std::vector<float> failed(size_t(size_), 0.0f);
    failed[size_t(rank_)] = error != nullptr;
    if (size_ > 1) {
      copy_to_device(staging_, failed);
      staged([&] { NCCL_CHECK(ncclAllReduce(staging_, staging_, failed.size(), ncclFloat, ncclSum, comm_, stream_)); });
      copy_to_host(failed.data(), staging_, failed.size() * sizeof(float));
    }
    const auto first = std::find_if(failed.begin(), failed.end(), [](float f) { return f > 0; });
    if (first - failed.begin() == rank_) std::rethrow_exception(error);
    if (first != failed.end()) throw UserError("");
  }
  // Throws, as together() does, if the text that `text_of_this` returns differs from rank 0's, with the first line that
  // differs.
  template <class F>
  void all_equal(const char* what, const F& text_of_this) {
    if (size_ == 1) return;
    std::string mine;
    together([&] { mine = text_of_this(); });
    const std::string first = broadcast(mine);
    together([&] {
      if (mine == first) return;
      const auto at = std::mismatch(mine.begin(), mine.end(), first.begin(), first.end());
      const size_t line = mine.substr(0, size_t(at.first - mine.begin())).rfind('\n') + 1;
      const auto line_of = [&](const std::string& text) { return text.substr(line, text.find('\n', line) - line); };
      user_error("%s differ: this rank has \"%s\", where rank 0 has \"%s\"", what, line_of(mine), line_of(first));
    });
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Collectives that are called after this see what the operations called before it have written.
  void comm_waits_for_compute() {
    if (size_ == 1) return;
    CUDA_CHECK(cudaEventRecord(operations_, gpu().stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream_, operations_, 0));
  }
  // Operations that are called after this see what the collectives called before it have written.
  void compute_waits_for_comm() {
    if (size_ == 1) return;
    CUDA_CHECK(cudaEventRecord(collectives_, stream_));
    CUDA_CHECK(cudaStreamWaitEvent(gpu().stream, collectives_, 0));
  }
  // Operations that are called after await(index) see what the collectives called before the latest mark(index) have
  // written.
  void mark(size_t index) {
    if (size_ == 1) return;
    while (marks_.size() <= index) {
      marks_.push_back(nullptr);
      CUDA_CHECK(cudaEventCreateWithFlags(&marks_.back(), cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaEventRecord(marks_[index], stream_));
  }
  void await(size_t index) {
    if (size_ == 1) return;
    CUDA_CHECK(cudaStreamWaitEvent(gpu().stream, marks_[index], 0));
  }
  // Records an event on the collectives' stream.
  void record(GpuEvent& event) { event.record(stream_); }

  // x (count) = the sum of all ranks' x.
  template <class T>
  void all_reduce(T* x, int64_t count) {
    if (size_ == 1) return;
    noted([&] { NCCL_CHECK(ncclAllReduce(x, x, size_t(count), type<T>(), ncclSum, comm_, stream_)); });
  }
  // Each part of the bucket in x, an arena of all parameters, = the sum of all ranks' on the rank that owns it; on the
  // others it is undefined afterwards.
  void reduce_to_owners(float* x, const ParameterBucket& bucket) {
    if (size_ == 1) return;
    noted([&] {
      if (bucket.has_equal_parts) {
        const ShardPart& own = bucket.parts[size_t(rank_)];
        NCCL_CHECK(
            ncclReduceScatter(x + bucket.begin, x + own.begin, size_t(own.count), ncclFloat, ncclSum, comm_, stream_));
        return;
      }
      NCCL_CHECK(ncclGroupStart());
      for (const ShardPart& part : bucket.parts)
        NCCL_CHECK(ncclReduce(x + part.begin, x + part.begin, size_t(part.count), ncclFloat, ncclSum, part.owner, comm_,
                              stream_));
      NCCL_CHECK(ncclGroupEnd());
    });
  }
  // Each part of the bucket in x, an arena of all parameters, = what its owner has of it: at the same place, or if
  // `state` is given in that arena of state.
  template <class T>
  void gather_from_owners(T* x, const ParameterBucket& bucket, const T* state = nullptr) {
    if (size_ == 1) return;
    const auto source = [&](const ShardPart& part) { return state != nullptr ? state + part.state : x + part.begin; };
    noted([&] {
      if (bucket.has_equal_parts) {
        const ShardPart& own = bucket.parts[size_t(rank_)];
        NCCL_CHECK(ncclAllGather(source(own), x + bucket.begin, size_t(own.count), type<T>(), comm_, stream_));
        return;
      }
      NCCL_CHECK(ncclGroupStart());
      for (const ShardPart& part : bucket.parts)
        NCCL_CHECK(ncclBroadcast(part.owner == rank_ ? source(part) : nullptr, x + part.begin, size_t(part.count),
                                 type<T>(), part.owner, comm_, stream_));
      NCCL_CHECK(ncclGroupEnd());
    });
  }

  // The host waits for all collectives.
  void wait() const {
    if (size_ > 1) CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  // Clean shutdown, after all work. A process that fails does not call it.
  void finalize() {
    if (size_ == 1) return;
    wait();
    NCCL_CHECK(ncclCommDestroy(comm_));
    device_free(staging_, staging_bytes);
    size_ = 1, rank_ = 0;
  }

 private:
  int rank_ = 0, size_ = 1;
  Watchdog* watchdog_ = nullptr;
  static constexpr size_t staging_bytes = size_t(1) << 18;
  float* staging_ = nullptr;  // of what the host tells
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t operations_ = nullptr, collectives_ = nullptr;  // the latest of each that the others wait for
  std::vector<cudaEvent_t> marks_;
  uint64_t num_collectives_ = 0;     // collectives that have been called
  PinnedBuffer<uint64_t> progress_;  // (2): how many of them the GPU has come to, and how many it has ended

  // NCCL's own settings, unless the user has set them. NVLS, in which the switch of NVLink adds up, has no fixed order
  // of sums. Without connections at run time NCCL allocates all it needs in init, before the memory plan is compared
  // with what is free.
  static void set_nccl_environment() {
    setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
    setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
    const std::string nvls = getenv("NCCL_NVLS_ENABLE");
    if (nvls != "0")
      printf("NCCL_NVLS_ENABLE=%s: NCCL may add up in another order in each run, so that the bits of two runs may "
             "differ\n",
             nvls.c_str());
  }

  template <class Call>
  void noted(const Call& collective) {
    num_collectives_++;
    launch_on(stream_, note_kernel, 1, 1, 0, &progress_.data[0], num_collectives_);
    collective();
    launch_on(stream_, note_kernel, 1, 1, 0, &progress_.data[1], num_collectives_);
  }

  // A collective in staging_, which the host notes itself: before the memory plan is compared with what is free, no
  // kernel may load what CUDA needs for kernels.
  template <class Call>
  void staged(const Call& collective) {
    comm_waits_for_compute();
    wait();
    progress_.data[0] = ++num_collectives_;
    collective();
    wait();
    progress_.data[1] = num_collectives_;
  }

  template <class T>
  static ncclDataType_t type() {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, floatX>);
    return std::is_same_v<T, float>    ? ncclFloat
           : std::is_same_v<T, double> ? ncclDouble
           : is_fp16                   ? ncclHalf
                                       : ncclBfloat16;
  }
};
