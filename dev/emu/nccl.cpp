// NCCL on MPI. A collective is an operation of its stream: when it runs, the process waits for the other ranks, all
// exchange which collective they have called, and only then data moves. Sums are taken in the order of the ranks with
// NCCL_NVLS_ENABLE=0; otherwise in an order drawn from the seed, as on a machine whose NVSwitch adds up. It takes three
// ranks to show. Each sum is rounded to the type; the real NCCL has another order.
//
// Collectives of one communicator on one stream have one order on all ranks. Those on several streams may be reached in
// different orders, as streams advance at random, and then the ranks wait for each other until the timeout.
#include "nccl.h"
#include <mpi.h>
#include <unistd.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>
#include "cuda_bf16.h"
#include "emu.h"

struct ncclComm {
  MPI_Comm mpi;
  int rank, size;
  bool owns_mpi;  // MPI was initialised for it
  bool sums_in_any_order;
  std::shared_ptr<uint64_t> left = std::make_shared<uint64_t>(0);  // collectives that are queued
  uint64_t done = 0;
};

namespace {

// The collective that a rank has called. All ranks must have called the same.
struct Call {
  char what[24];
  int64_t type, count, root;  // root: -1 where no rank is another than the others
};

std::string text_of(const Call& call) {
  char text[96], root[32] = "";
  if (call.root >= 0) snprintf(root, sizeof root, " with root %lld", (long long)call.root);
  snprintf(text, sizeof text, "%s of %lld elements of type %lld%s", call.what, (long long)call.count,
           (long long)call.type, root);
  return text;
}

// As the real one does, in other words.
bool logs_collectives() {
  const char *level = getenv("NCCL_DEBUG"), *subsystems = getenv("NCCL_DEBUG_SUBSYS");
  return level != nullptr && strcmp(level, "INFO") == 0 && subsystems != nullptr && strcmp(subsystems, "COLL") == 0;
}

double patience_seconds() {
  const char* seconds = getenv("SLA_EMU_NCCL_TIMEOUT");
  return seconds != nullptr ? atof(seconds) : 120;
}

// Waits for all ranks. Sleeps in between, as cores may be fewer than ranks. Aborts if a rank does not call a collective
// before the timeout, or calls another one.
void meet(ncclComm& comm, const Call& call) {
  std::vector<Call> calls(size_t(comm.size));
  MPI_Request request;
  MPI_Iallgather(&call, sizeof call, MPI_BYTE, calls.data(), sizeof call, MPI_BYTE, comm.mpi, &request);
  const auto start = std::chrono::steady_clock::now();
  for (int here = 0; MPI_Test(&request, &here, MPI_STATUS_IGNORE), !here; usleep(20))
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > patience_seconds())
      emu::fatal("rank %d of %d has waited %.0f s for the others with collective number %llu, %s", comm.rank, comm.size,
                 patience_seconds(), (unsigned long long)comm.done + 1, text_of(call).c_str());
  for (int rank = 0; rank < comm.size; rank++)
    if (memcmp(&calls[size_t(rank)], &call, sizeof call) != 0)
      emu::fatal("collective number %llu is %s on rank %d, but %s on rank %d", (unsigned long long)comm.done + 1,
                 text_of(call).c_str(), comm.rank, text_of(calls[size_t(rank)]).c_str(), rank);
  comm.done++;
}

size_t element_bytes(ncclDataType_t type) { return type == ncclDouble ? 8 : type == ncclFloat ? 4 : 2; }

// Without ASan's checks, as a bucket of gradients has gaps between its tensors. Copies whole floats and doubles if it
// can.
template <class T>
__attribute__((no_sanitize("address"))) void copy_elements(void* to, const void* from, size_t count) {
  for (size_t i = 0; i < count; i++)
    static_cast<volatile T*>(to)[i] = static_cast<const volatile T*>(from)[i];  // volatile: or it becomes a call of
                                                                                // memcpy
}
void copy(void* to, const void* from, size_t count, ncclDataType_t type) {
  if (type == ncclDouble) copy_elements<uint64_t>(to, from, count);
  else if (type == ncclFloat) copy_elements<uint32_t>(to, from, count);
  else copy_elements<uint16_t>(to, from, count);
}

template <class T>
void add(char* sum, const char* x, size_t count) {
  T* const to = reinterpret_cast<T*>(sum);
  const T* const from = reinterpret_cast<const T*>(x);
  for (size_t i = 0; i < count; i++) to[i] = T(to[i] + from[i]);
}

// The sum of the ranks' parts (ranks, count).
std::vector<char> sum_of(const ncclComm& comm, const std::vector<char>& parts, size_t count, ncclDataType_t type) {
  const size_t bytes = count * element_bytes(type);
  std::vector<char> sum(bytes);
  std::vector<int> order(static_cast<size_t>(comm.size));
  std::iota(order.begin(), order.end(), 0);
  if (comm.sums_in_any_order) emu::rng.shuffle(order.data(), uint32_t(comm.size));
  for (int rank : order) {
    const char* part = parts.data() + size_t(rank) * bytes;
    if (rank == order[0]) memcpy(sum.data(), part, bytes);
    else if (type == ncclDouble) add<double>(sum.data(), part, count);
    else if (type == ncclFloat) add<float>(sum.data(), part, count);
    else add<__nv_bfloat16>(sum.data(), part, count);
  }
  return sum;
}

// The rank-th part of the sum of all ranks' sent (ranks, count).
std::vector<char> summed_part(const ncclComm& comm, const std::vector<char>& sent, size_t count, ncclDataType_t type) {
  const int bytes = int(count * element_bytes(type));
  std::vector<char> parts(sent.size());
  MPI_Alltoall(sent.data(), bytes, MPI_BYTE, parts.data(), bytes, MPI_BYTE, comm.mpi);
  return sum_of(comm, parts, count, type);
}

std::vector<char> gathered(const ncclComm& comm, const std::vector<char>& part) {
  std::vector<char> all(part.size() * size_t(comm.size));
  MPI_Allgather(part.data(), int(part.size()), MPI_BYTE, all.data(), int(part.size()), MPI_BYTE, comm.mpi);
  return all;
}

void all_reduce(const ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  const size_t part = (count + size_t(comm.size) - 1) / size_t(comm.size);
  std::vector<char> mine(part * size_t(comm.size) * element_bytes(type));
  copy(mine.data(), sent, count, type);
  copy(received, gathered(comm, summed_part(comm, mine, part, type)).data(), count, type);
}

void reduce_scatter(const ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  std::vector<char> mine(count * size_t(comm.size) * element_bytes(type));
  copy(mine.data(), sent, count * size_t(comm.size), type);
  copy(received, summed_part(comm, mine, count, type).data(), count, type);
}

void all_gather(const ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  std::vector<char> mine(count * element_bytes(type));
  copy(mine.data(), sent, count, type);
  copy(received, gathered(comm, mine).data(), count * size_t(comm.size), type);
}

void reduce(const ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type, int root) {
  const int bytes = int(count * element_bytes(type));
  std::vector<char> mine(static_cast<size_t>(bytes)), parts(comm.rank == root ? mine.size() * size_t(comm.size) : 0);
  copy(mine.data(), sent, count, type);
  MPI_Gather(mine.data(), bytes, MPI_BYTE, parts.data(), bytes, MPI_BYTE, root, comm.mpi);
  if (comm.rank == root) copy(received, sum_of(comm, parts, count, type).data(), count, type);
}

void broadcast(const ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type, int root) {
  std::vector<char> values(count * element_bytes(type));
  if (comm.rank == root) copy(values.data(), sent, count, type);
  MPI_Bcast(values.data(), int(values.size()), MPI_BYTE, root, comm.mpi);
  copy(received, values.data(), count, type);
}

// One call, and the memory that it reads and writes on this rank: so many times `count` elements, 0 times if none.
struct Collective {
  const char* name;
  std::function<void(const ncclComm&)> run;
  const void* sent;
  size_t sent_parts;
  void* received;
  size_t received_parts;
  size_t count;
  ncclDataType_t type;
  ncclComm_t comm;
  cudaStream_t stream;
  int root = -1;

  size_t part_bytes() const { return count * element_bytes(type); }
  void check_ranges() const {
    if (sent_parts > 0) emu::check_device_range("what is sent", sent, sent_parts * part_bytes(), emu::Gaps::allow);
    if (received_parts > 0)
      emu::check_device_range("what is received", received, received_parts * part_bytes(), emu::Gaps::allow);
  }
  // What this one writes overlaps what the other one sends or receives.
  bool writes_to(const Collective& other) const {
    const auto overlaps = [&](const void* p, size_t bytes) {
      return received < static_cast<const char*>(p) + bytes &&
             p < static_cast<const char*>(received) + received_parts * part_bytes();
    };
    return received_parts > 0 && (overlaps(other.sent, other.sent_parts * other.part_bytes()) ||
                                  overlaps(other.received, other.received_parts * other.part_bytes()));
  }
  // Buffers that overlap must do so as NCCL allows it: a part of the larger one that is this rank's, or all of it.
  void check_overlap() const {
    if (sent_parts == 0 || received_parts == 0) return;
    const size_t part = part_bytes(), place = size_t(comm->rank) * part;
    const auto *s = static_cast<const char*>(sent), *r = static_cast<const char*>(received);
    const char* in_place = sent_parts > received_parts ? s + place : r + (received_parts > sent_parts ? place : 0);
    if (s < r + received_parts * part && r < s + sent_parts * part && in_place != (sent_parts > received_parts ? r : s))
      emu::fatal("%s: what is received overlaps what is sent, and not as rank %d's part of it", name, comm->rank);
  }
};

// The calls since ncclGroupStart, which ncclGroupEnd queues.
int group_depth = 0;
std::vector<Collective> group;

ncclResult_t enqueue(const Collective& c) {
  Call call = {};
  snprintf(call.what, sizeof call.what, "%s", c.name);
  call.type = c.type, call.count = int64_t(c.count), call.root = c.root;
  ++*c.comm->left;
  const cudaError_t error = emu::enqueue(c.name, c.stream, [c, call] {
    c.check_ranges();
    meet(*c.comm, call);
    c.run(*c.comm);
    --*c.comm->left;
  });
  return error == cudaSuccess ? ncclSuccess : ncclInvalidUsage;
}

// Queues a call, now or at the end of the group. Its ranges are checked now and when it runs.
ncclResult_t queue(const Collective& c) {
  if (c.comm == nullptr || (c.type != ncclFloat && c.type != ncclDouble && c.type != ncclBfloat16) ||
      c.root >= c.comm->size)
    return ncclInvalidArgument;
  c.check_ranges();
  if (!emu::take_for(emu::Library::nccl)) return ncclUnhandledCudaError;
  if (c.part_bytes() * size_t(c.comm->size) > size_t(1) << 30)
    emu::fatal("%s: %zu elements are more than the emulator moves at once", c.name, c.count);
  c.check_overlap();
  if (logs_collectives()) {
    int priority = 0;
    cudaStreamGetPriority(c.stream, &priority);
    printf("NCCL INFO %s: count %zu datatype %d nranks %d stream priority %d\n", c.name + strlen("nccl"), c.count,
           int(c.type), c.comm->size, priority);
  }
  if (group_depth == 0) return enqueue(c);
  for (const Collective& other : group)
    if (c.writes_to(other) || other.writes_to(c))
      emu::fatal("%s: overlaps the memory of %s of the same group, beside which it may run", c.name, other.name);
  group.push_back(c);
  return ncclSuccess;
}

size_t size_of(ncclComm_t comm) { return comm != nullptr ? size_t(comm->size) : 0; }

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
  }
  return "unknown result code";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  snprintf(id->internal, sizeof id->internal, "%lld.%d", (long long)now, int(getpid()));
  return ncclSuccess;
}

// All of mpirun's processes make the communicator together. As with NCCL, no two of them may use the same GPU of a
// machine.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  *comm = nullptr;
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  int is_initialized = 0, world = 0, threads = 0;
  MPI_Initialized(&is_initialized);
  if (!is_initialized) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &threads);
  MPI_Query_thread(&threads);
  if (threads < MPI_THREAD_FUNNELED)
    emu::fatal("ncclCommInitRank: MPI was initialized for a process of one thread, but NCCL starts others; call "
               "MPI_Init_thread");
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (world != num_ranks)
    emu::fatal("ncclCommInitRank for %d ranks, but mpirun has started %d processes, which are the emulated ranks",
               num_ranks, world);

  struct Member {
    ncclUniqueId id;
    char host[MPI_MAX_PROCESSOR_NAME];
    int rank, device;
  } me = {};
  int host_length = 0;
  me.id = id, me.rank = rank;
  MPI_Get_processor_name(me.host, &host_length);
  cudaGetDevice(&me.device);
  const char* nvls = getenv("NCCL_NVLS_ENABLE");
  auto* made = new ncclComm{MPI_COMM_NULL, rank, num_ranks, !is_initialized, nvls == nullptr || strcmp(nvls, "0") != 0};
  MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &made->mpi);
  std::vector<Member> all(static_cast<size_t>(num_ranks));
  MPI_Allgather(&me, sizeof me, MPI_BYTE, all.data(), sizeof me, MPI_BYTE, made->mpi);
  for (int other = 0; other < num_ranks; other++) {
    const Member& m = all[size_t(other)];
    if (m.rank != other) emu::fatal("ncclCommInitRank: no process is rank %d of %d", other, num_ranks);
    if (memcmp(&m.id, &id, sizeof id) != 0)
      emu::fatal("ncclCommInitRank: ranks %d and %d have not the same id", rank, other);
    if (other != rank && m.device == me.device && strcmp(m.host, me.host) == 0) return ncclInvalidUsage;
  }
  const char* late = getenv("NCCL_RUNTIME_CONNECT");  // by default NCCL connects, and allocates, at the first
                                                      // collective
  if (late != nullptr && strcmp(late, "0") == 0 && !emu::take_for(emu::Library::nccl)) return ncclUnhandledCudaError;
  *comm = made;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (*comm->left > 0)
    emu::fatal("ncclCommDestroy with %llu collectives that have not run; synchronize first",
               (unsigned long long)*comm->left);
  Call call = {};
  snprintf(call.what, sizeof call.what, "ncclCommDestroy");
  meet(*comm, call);
  MPI_Comm_free(&comm->mpi);
  if (comm->owns_mpi) MPI_Finalize();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](const ncclComm& c) { all_reduce(c, sent, received, count, type); };
  return queue({"ncclAllReduce", run, sent, 1, received, 1, count, type, comm, stream});
}

ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](const ncclComm& c) { reduce_scatter(c, sent, received, count, type); };
  return queue({"ncclReduceScatter", run, sent, size_of(comm), received, 1, count, type, comm, stream});
}

ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto run = [=](const ncclComm& c) { all_gather(c, sent, received, count, type); };
  return queue({"ncclAllGather", run, sent, 1, received, size_of(comm), count, type, comm, stream});
}

ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](const ncclComm& c) { reduce(c, sent, received, count, type, root); };
  const bool receives = comm != nullptr && comm->rank == root;
  return queue({"ncclReduce", run, sent, 1, received, receives, count, type, comm, stream, root});
}

ncclResult_t ncclBroadcast(const void* sent, void* received, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](const ncclComm& c) { broadcast(c, sent, received, count, type, root); };
  const bool sends = comm != nullptr && comm->rank == root;
  return queue({"ncclBroadcast", run, sent, sends, received, 1, count, type, comm, stream, root});
}

ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (const Collective& c : std::exchange(group, {}))
    if (result == ncclSuccess) result = enqueue(c);
  return result;
}
