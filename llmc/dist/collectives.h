// Collectives of the ranks of a data-parallel run, by NCCL. They have their own stream and run concurrently with
// operations: operations must not touch what collectives read or write between comm_waits_for_compute and a later
// compute_waits_for_comm, or await of a mark that follows them.
//
// Every rank calls the same collectives in the same order. They are asynchronous, and do nothing in a single process.
#pragma once
#include <nccl.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>
#include "ranks.h"
#include "llmc/utils/error.h"
#include "llmc/utils/parameter_table.h"
#include "llmc/ops/precision.h"
#include "rank_channel.h"
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

  // Throws UserError if this build cannot train with these ranks; this one can.
  static void check_supported(const Ranks&) {}

  // Creates the communicator of all ranks, which must be called on every rank before the GPU is used: it is selected
  // here. From then on the channel checks that all ranks reach the same collectives. Throws UserError if two ranks have
  // the same GPU, or NCCL fails.
  void init(const Ranks& ranks, RankChannel& channel) {
    if (ranks.size == 1) return;
    rank_ = ranks.rank, size_ = ranks.size;
    gpu_index() = ranks.local_rank;
    // Without this check NCCL would say "invalid usage".
    channel.check_distinct_on_all_ranks("GPU (--local-rank, or CUDA_VISIBLE_DEVICES)", gpu().id);
    // The greatest priority: a collective that is ready takes the next blocks that become free, and the others wait for
    // it.
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&operations_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&collectives_, cudaEventDisableTiming));
    set_nccl_environment();
    ncclUniqueId id = {};
    if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    channel.broadcast(&id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&comm_, size_, id, rank_));
    progress_ = PinnedBuffer<uint64_t>(2);
    progress_.data[0] = progress_.data[1] = 0;
    channel.watch_progress(&progress_.data[0], &progress_.data[1]);
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

  // Clean shutdown, after all work. A process that fails does not call it: the channel ends the others.
  void finalize() {
    if (size_ == 1) return;
    wait();
    NCCL_CHECK(ncclCommDestroy(comm_));
    size_ = 1, rank_ = 0;
  }

 private:
  int rank_ = 0, size_ = 1;
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

  template <class T>
  static ncclDataType_t type() {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, floatX>);
    return std::is_same_v<T, float>    ? ncclFloat
           : std::is_same_v<T, double> ? ncclDouble
           : is_fp16                   ? ncclHalf
                                       : ncclBfloat16;
  }
};
