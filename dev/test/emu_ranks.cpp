// Cases for the emulated NCCL, which test_dist starts with mpirun: `emu_ranks CASE`. Either the case passes, and the
// program exits with 0, or it makes a mistake that the emulator must report.
#include <nccl.h>
#include <unistd.h>
#include <cstring>
#include <string>
#include <vector>
#include "cuda_bf16.h"
#include "llmc/base/error.h"
#include "llmc/base/guard.h"
#include "llmc/operations.h"

namespace {

int rank, num_ranks;
ncclUniqueId id;
cudaStream_t stream, side;

void check(cudaError_t error) { CHECK(error == cudaSuccess); }
void check(ncclResult_t result) { CHECK(result == ncclSuccess); }

ncclComm_t make_communicator() {
  ncclComm_t comm;
  check(ncclCommInitRank(&comm, num_ranks, id, rank));
  return comm;
}

template <class T>
T* to_device(const std::vector<T>& host) {
  T* p = nullptr;
  check(cudaMalloc(&p, host.size() * sizeof(T)));
  check(cudaMemcpyAsync(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  check(cudaStreamSynchronize(stream));
  return p;
}

template <class T>
std::vector<T> to_host(const T* p, size_t count) {
  std::vector<T> host(count);
  check(cudaMemcpyAsync(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
  return host;
}

// Rank r's numbers, of such different magnitudes that another order of summation gives other bits.
template <class T>
std::vector<T> numbers_of(int r, size_t count) {
  std::vector<T> x;
  for (size_t i = 0; i < count; i++)
    x.push_back(T(float((i * 37 + size_t(r) * 101) % 113 - 56.5) * (r % 2 == 0 ? 1e6f : 0.37f)));
  return x;
}

template <class T>
std::vector<T> sum_in_order_of_ranks(size_t count) {
  std::vector<T> sum = numbers_of<T>(0, count);
  for (int r = 1; r < num_ranks; r++)
    for (size_t i = 0; i < count; i++) sum[i] = T(sum[i] + numbers_of<T>(r, count)[i]);
  return sum;
}

template <class T>
bool same_bits(const std::vector<T>& a, const T* b) {
  return memcmp(a.data(), b, a.size() * sizeof(T)) == 0;
}

template <class T>
void collectives_of(ncclDataType_t type, ncclComm_t comm) {
  const size_t part = 37, all = part * size_t(num_ranks), mine = part * size_t(rank);
  for (size_t count : {size_t(1), part, all}) {
    T* x = to_device(numbers_of<T>(rank, count));
    check(ncclAllReduce(x, x, count, type, ncclSum, comm, stream));
    CHECK(same_bits(sum_in_order_of_ranks<T>(count), to_host(x, count).data()));
    check(cudaFree(x));
  }
  T* x = to_device(numbers_of<T>(rank, all));
  check(ncclReduceScatter(x, x + mine, part, type, ncclSum, comm, stream));
  std::vector<T> expected = numbers_of<T>(rank, all);  // the other parts are unchanged
  memcpy(expected.data() + mine, sum_in_order_of_ranks<T>(all).data() + mine, part * sizeof(T));
  CHECK(same_bits(expected, to_host(x, all).data()));
  check(ncclAllGather(x + mine, x, part, type, comm, stream));
  CHECK(same_bits(sum_in_order_of_ranks<T>(all), to_host(x, all).data()));
  T* apart = to_device(std::vector<T>(all));
  check(ncclAllGather(x + mine, apart, part, type, comm, stream));
  CHECK(same_bits(sum_in_order_of_ranks<T>(all), to_host(apart, all).data()));
  check(cudaFree(x));
  check(cudaFree(apart));
}

// Each rank is the root of a part, which are of different sizes: sums go to the roots, which then send them to all.
template <class T>
void collectives_with_roots(ncclDataType_t type, ncclComm_t comm) {
  std::vector<size_t> begins = {0};  // the parts, one after the other
  for (int root = 0; root < num_ranks; root++) begins.push_back(begins.back() + 5 + 7 * size_t(root));
  const auto count = [&](int root) { return begins[size_t(root) + 1] - begins[size_t(root)]; };
  const size_t all = begins.back(), mine = begins[size_t(rank)];
  const std::vector<T> numbers = numbers_of<T>(rank, all), sum = sum_in_order_of_ranks<T>(all);
  T *x = to_device(numbers), *apart = to_device(std::vector<T>(all));
  check(ncclGroupStart());
  for (int root = 0; root < num_ranks; root++) {
    T* part = x + begins[size_t(root)];
    check(ncclReduce(part, root == rank ? part : nullptr, count(root), type, ncclSum, root, comm, stream));
  }
  check(ncclGroupEnd());
  std::vector<T> expected = numbers;
  memcpy(expected.data() + mine, sum.data() + mine, count(rank) * sizeof(T));
  CHECK(same_bits(expected, to_host(x, all).data()));
  for (T* to : {apart, x}) {
    check(ncclGroupStart());
    for (int root = num_ranks - 1; root >= 0; root--)
      check(ncclBroadcast(root == rank ? x + mine : nullptr, to + begins[size_t(root)], count(root), type, root, comm,
                          stream));
    check(ncclGroupEnd());
    CHECK(same_bits(sum, to_host(to, all).data()));
  }
  check(cudaFree(x));
  check(cudaFree(apart));
}

// Under how many of 20 seeds a collective on another stream reads x before the copy, which was queued first, has
// written it.
int seeds_that_read_early(ncclComm_t comm, bool wait) {
  float* ones;
  check(cudaMallocHost(&ones, 8 * sizeof(float)));
  for (int i = 0; i < 8; i++) ones[i] = 1;
  cudaEvent_t copied;
  check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
  int missed = 0;
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed * 1000 + uint64_t(rank));
    float* x = to_device(std::vector<float>(8, 0.0f));
    check(cudaStreamSynchronize(stream));
    check(cudaMemcpyAsync(x, ones, 8 * sizeof(float), cudaMemcpyHostToDevice, stream));
    check(cudaEventRecord(copied, stream));
    if (wait) check(cudaStreamWaitEvent(side, copied));
    check(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, comm, side));
    check(cudaStreamSynchronize(side));
    missed += to_host(x, 8)[0] != float(num_ranks);
    check(cudaFree(x));
  }
  check(cudaEventDestroy(copied));
  check(cudaFreeHost(ones));
  return missed;
}

// Under how many of 20 seeds a sum has not the bits of the sum in the order of the ranks.
int seeds_with_another_order(ncclComm_t comm) {
  int differ = 0;
  for (uint64_t seed = 1; seed <= 20; seed++) {
    emu::set_seed(seed * 1000 + uint64_t(rank));
    float* x = to_device(numbers_of<float>(rank, 64));
    check(ncclAllReduce(x, x, 64, ncclFloat, ncclSum, comm, stream));
    differ += !same_bits(sum_in_order_of_ranks<float>(64), to_host(x, 64).data());
    check(cudaFree(x));
  }
  return differ;
}

// The ranks call three all-reduces together, as the trainer does, and a fourth that the last rank does not call; or
// calls after it was paused for longer than a rank may hang, and then computed for less.
void wait_for_the_last_rank(const Ranks& ranks, bool comes) {
  Watchdog watchdog;
  Collectives collectives;
  collectives.init(ranks, watchdog, /*hang_seconds=*/comes ? 4 : 2);
  auto* x = static_cast<float*>(device_malloc(4 * sizeof(float)));
  for (int sum = 0; sum < 4; sum++) {
    watchdog.step = sum + 1;
    const bool is_last = sum == 3 && rank == num_ranks - 1;
    if (is_last && comes) {
      const WatchdogPause pause(watchdog);
      sleep(6);
    }
    if (is_last) sleep(comes ? 2 : 600);
    collectives.comm_waits_for_compute();
    collectives.all_reduce(x, 4);
    collectives.compute_waits_for_comm();
    float host[4];
    copy_to_host(host, x, sizeof host);
  }
}

void run(const std::string& name) {
  if (name == "same_gpu" || name == "shared_gpu") {
    check(cudaSetDevice(0));
    ncclComm_t comm;
    CHECK(ncclCommInitRank(&comm, num_ranks, id, rank) == (name == "same_gpu" ? ncclInvalidUsage : ncclSuccess));
    return;
  }
  check(cudaSetDevice(rank));
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  if (name == "wrong_size") num_ranks++;
  if (name == "other_size") num_ranks += rank;
  if (name == "same_rank") rank = 0;
  if (name == "other_id") id.internal[strlen(id.internal)] = char('A' + rank);
  ncclComm_t comm = make_communicator();
  float* x = to_device(std::vector<float>(64, 1.0f));
  auto reduce = [&](float* from, float* to, size_t count) {
    check(ncclAllReduce(from, to, count, ncclFloat, ncclSum, comm, stream));
  };
  if (name == "collectives") {
    collectives_of<float>(ncclFloat, comm), collectives_with_roots<float>(ncclFloat, comm);
    collectives_of<double>(ncclDouble, comm), collectives_with_roots<double>(ncclDouble, comm);
    collectives_of<__nv_bfloat16>(ncclBfloat16, comm), collectives_with_roots<__nv_bfloat16>(ncclBfloat16, comm);
  } else if (name == "gaps") {
    check(cudaStreamSynchronize(stream));
    forbid(x + 8, 32);
    reduce(x, x, 64);
  } else if (name == "events") {
    CHECK(seeds_that_read_early(comm, /*wait=*/true) == 0);
    CHECK(seeds_that_read_early(comm, /*wait=*/false) > 0);
  } else if (name == "orders") {
    CHECK(seeds_with_another_order(comm) > 0);
  } else if (name == "other_count") {
    reduce(x, x, rank == 0 ? 64 : 32);
  } else if (name == "other_collective") {
    if (rank == 0) reduce(x, x, 1);
    else check(ncclAllGather(x + rank, x, 1, ncclFloat, comm, stream));
  } else if (name == "other_root") {
    check(ncclBroadcast(x, x, 1, ncclFloat, rank, comm, stream));
  } else if (name == "overlap_in_group") {
    check(ncclGroupStart());
    check(ncclReduce(x, x, 32, ncclFloat, ncclSum, 0, comm, stream));
    check(ncclBroadcast(x + 31, x + 31, 32, ncclFloat, 0, comm, stream));
  } else if (name == "one_more") {
    if (rank == 0) reduce(x, x, 64);
  } else if (name == "overrun") {
    reduce(x, x, 65);
  } else if (name == "overlap") {
    reduce(x, x + 1, 32);
  } else if (name == "wrong_part") {
    check(ncclReduceScatter(x, x + (rank + 1) % num_ranks, 1, ncclFloat, ncclSum, comm, stream));
  } else if (name == "pending") {
    reduce(x, x, 64);
    ncclCommDestroy(comm);
  } else if (name == "not_called") {
    if (rank == 0) reduce(x, x, 64);
    else sleep(600);
  } else {
    CHECK(name == "nothing");
  }
  check(cudaStreamSynchronize(stream));
  check(ncclCommDestroy(comm));
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const Ranks ranks = init_ranks("", "");
  rank = ranks.rank, num_ranks = ranks.size;
  const std::string name = argv[1];
  if (name == "one_reduce_is_missing" || name == "a_rank_is_slow") {
    wait_for_the_last_rank(ranks, name == "a_rank_is_slow");
    finalize_ranks(ranks);
    return 0;
  }
  check(ncclGetUniqueId(&id));
  if (ranks.by_mpi) broadcast_by_mpi(&id, sizeof id);
  run(name);
  finalize_ranks(ranks);
  return 0;
}
