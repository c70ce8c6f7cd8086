// NCCL on a file that all ranks of a machine share, whose name is the communicator's ID. A collective is an operation
// of its stream: when it runs, the process waits for the other ranks, all exchange which collective they have called,
// and only then data moves. Sums are taken in the order of the ranks with NCCL_NVLS_ENABLE=0; otherwise in an order
// drawn from the seed, as on a machine whose NVSwitch adds up. It takes three ranks to show. Each sum is rounded to the
// type; the real NCCL has another order.
//
// Collectives of one communicator on one stream have one order on all ranks. Those on several streams may be reached in
// different orders, as streams advance at random, and then the ranks wait for each other until the timeout.
#include "nccl.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
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
#include "cuda_fp16.h"
#include "emu.h"

namespace {

// The collective that a rank has called. All ranks must have called the same.
struct Call {
  char what[24];
  int64_t type, count, root;  // root: -1 where no rank is another than the others
};

// What a rank tells the others, at the beginning of the file, which is zeros at first.
struct Slot {
  std::atomic<int> size;           // of the communicator, as it knows it; 0: the rank has not joined
  std::atomic<uint64_t> arrivals;  // times that it has waited for the others
  int device;
  Call call;
};

}  // namespace

struct ncclComm {
  int rank, size;
  bool sums_in_any_order;
  int file;
  const char* path;                                                // of the file, until all ranks have opened it
  Slot* slots;                                                     // (size)
  std::shared_ptr<uint64_t> left = std::make_shared<uint64_t>(0);  // collectives that are queued
  uint64_t arrivals = 0, done = 0;
};

namespace {

constexpr size_t slot_bytes = size_t(1) << 16;  // of all slots
constexpr size_t most_bytes = size_t(1) << 30;  // of a collective, of all ranks together

std::string text_of(const Call& call) {
  char text[96], root[32] = "";
  if (call.root >= 0) snprintf(root, sizeof root, " with root %lld", (long long)call.root);
  snprintf(text, sizeof text, "%s of %lld elements of type %lld%s", call.what, (long long)call.count,
           (long long)call.type, root);
  return text;
}

// Whether collectives are logged, which the real NCCL does in other words.
bool logs_collectives() {
  const char *level = getenv("NCCL_DEBUG"), *subsystems = getenv("NCCL_DEBUG_SUBSYS");
  return level != nullptr && strcmp(level, "INFO") == 0 && subsystems != nullptr && strcmp(subsystems, "COLL") == 0;
}

double patience_seconds() {
  const char* seconds = getenv("SLA_EMU_NCCL_TIMEOUT");
  return seconds != nullptr ? atof(seconds) : 120;
}

// Waits for all ranks. Sleeps in between, as cores may be fewer than ranks. Aborts after the timeout.
void await_others(ncclComm& comm, const std::string& what) {
  comm.slots[comm.rank].arrivals = ++comm.arrivals;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < comm.size; rank++)
    for (; comm.slots[rank].arrivals < comm.arrivals; usleep(20)) {
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <= patience_seconds())
        continue;
      if (comm.path != nullptr) unlink(comm.path);
      emu::fatal("rank %d of %d has waited %.0f s for rank %d with %s", comm.rank, comm.size, patience_seconds(), rank,
                 what.c_str());
    }
}

// Waits for all ranks, and aborts if one has called another collective.
void meet(ncclComm& comm, const Call& call) {
  const std::string number = "collective number " + std::to_string(comm.done + 1);
  comm.slots[comm.rank].call = call;
  await_others(comm, number + ", " + text_of(call));
  for (int rank = 0; rank < comm.size; rank++)
    if (memcmp(&comm.slots[rank].call, &call, sizeof call) != 0)
      emu::fatal("%s is %s on rank %d, but %s on rank %d", number.c_str(), text_of(call).c_str(), comm.rank,
                 text_of(comm.slots[rank].call).c_str(), rank);
  comm.done++;
}

// Each rank's bytes are behind the slots. What publish() has written, others read until they all call end_exchange().
off_t place_of(int rank) { return off_t(slot_bytes + size_t(rank) * most_bytes); }

void publish(ncclComm& comm, const std::vector<char>& bytes) {
  if (pwrite(comm.file, bytes.data(), bytes.size(), place_of(comm.rank)) != ssize_t(bytes.size()))
    emu::fatal("a collective of %zu bytes: %s", bytes.size(), strerror(errno));
  await_others(comm, "its data");
}
void read_published(const ncclComm& comm, int rank, size_t begin, size_t count, char* to) {
  if (pread(comm.file, to, count, place_of(rank) + off_t(begin)) != ssize_t(count))
    emu::fatal("rank %d of %d has not the data of rank %d", comm.rank, comm.size, rank);
}
void end_exchange(ncclComm& comm) { await_others(comm, "the end of a collective"); }

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
    else if (type == ncclHalf) add<__half>(sum.data(), part, count);
    else add<__nv_bfloat16>(sum.data(), part, count);
  }
  return sum;
}

// The bytes from begin on (count) that each rank has published (ranks, count).
std::vector<char> parts_of_all(const ncclComm& comm, size_t begin, size_t count) {
  std::vector<char> parts(count * size_t(comm.size));
  for (int rank = 0; rank < comm.size; rank++)
    read_published(comm, rank, begin, count, parts.data() + size_t(rank) * count);
  return parts;
}

// The rank-th part of the sum of all ranks' sent (ranks, count).
std::vector<char> summed_part(ncclComm& comm, const std::vector<char>& sent, size_t count, ncclDataType_t type) {
  const size_t bytes = count * element_bytes(type);
  publish(comm, sent);
  const std::vector<char> parts = parts_of_all(comm, size_t(comm.rank) * bytes, bytes);
  end_exchange(comm);
  return sum_of(comm, parts, count, type);
}

std::vector<char> gathered(ncclComm& comm, const std::vector<char>& part) {
  publish(comm, part);
  std::vector<char> all = parts_of_all(comm, 0, part.size());
  end_exchange(comm);
  return all;
}

void all_reduce(ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  const size_t part = (count + size_t(comm.size) - 1) / size_t(comm.size);
  std::vector<char> mine(part * size_t(comm.size) * element_bytes(type));
  copy(mine.data(), sent, count, type);
  copy(received, gathered(comm, summed_part(comm, mine, part, type)).data(), count, type);
}

void reduce_scatter(ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  std::vector<char> mine(count * size_t(comm.size) * element_bytes(type));
  copy(mine.data(), sent, count * size_t(comm.size), type);
  copy(received, summed_part(comm, mine, count, type).data(), count, type);
}

void all_gather(ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type) {
  std::vector<char> mine(count * element_bytes(type));
  copy(mine.data(), sent, count, type);
  copy(received, gathered(comm, mine).data(), count * size_t(comm.size), type);
}

void reduce(ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type, int root) {
  std::vector<char> mine(count * element_bytes(type));
  copy(mine.data(), sent, count, type);
  publish(comm, mine);
  if (comm.rank == root)
    copy(received, sum_of(comm, parts_of_all(comm, 0, mine.size()), count, type).data(), count, type);
  end_exchange(comm);
}

void broadcast(ncclComm& comm, const void* sent, void* received, size_t count, ncclDataType_t type, int root) {
  std::vector<char> values(comm.rank == root ? count * element_bytes(type) : 0);
  if (comm.rank == root) copy(values.data(), sent, count, type);
  publish(comm, values);
  values.resize(count * element_bytes(type));
  read_published(comm, root, 0, values.size(), values.data());
  end_exchange(comm);
  copy(received, values.data(), count, type);
}

// One call, and the memory that it reads and writes on this rank: so many times `count` elements, 0 times if none.
struct Collective {
  const char* name;
  std::function<void(ncclComm&)> run;
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
  // Whether what this one writes overlaps what the other one sends or receives.
  bool writes_to(const Collective& other) const {
    const auto overlaps = [&](const void* p, size_t bytes) {
      return received < static_cast<const char*>(p) + bytes &&
             p < static_cast<const char*>(received) + received_parts * part_bytes();
    };
    return received_parts > 0 && (overlaps(other.sent, other.sent_parts * other.part_bytes()) ||
                                  overlaps(other.received, other.received_parts * other.part_bytes()));
  }
  // Buffers may overlap only as NCCL allows: one is this rank's part of the larger one, or all of it.
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
  const bool is_known = c.type == ncclFloat || c.type == ncclDouble || c.type == ncclHalf || c.type == ncclBfloat16;
  if (c.comm == nullptr || !is_known || c.root >= c.comm->size) return ncclInvalidArgument;
  c.check_ranges();
  if (!emu::take_for(emu::Library::nccl)) return ncclUnhandledCudaError;
  if (c.part_bytes() * size_t(c.comm->size) > most_bytes)
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
  const char* const folder = getenv("TMPDIR");
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const int length = snprintf(id->internal, sizeof id->internal, "%s/emulated_nccl.%lld.%d",
                              folder != nullptr ? folder : "/tmp", (long long)now, int(getpid()));
  return length < int(sizeof id->internal) ? ncclSuccess : ncclInvalidArgument;
}

// Whether `ranks` ranks may use one GPU: as with NCCL 2.30, one, or if asked for two, or more of few blocks each.
static bool may_share_gpu(int ranks) {
  const char *shared = getenv("NCCL_MULTI_RANK_GPU_ENABLE"), *blocks = getenv("NCCL_MAX_CTAS");
  if (shared == nullptr || strcmp(shared, "1") != 0) return ranks == 1;
  return ranks <= 2 || (blocks != nullptr && atoi(blocks) * ranks <= 64);
}

// All ranks make the communicator together.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  *comm = nullptr;
  if (num_ranks < 1 || num_ranks > int(slot_bytes / sizeof(Slot)) || rank < 0 || rank >= num_ranks)
    return ncclInvalidArgument;
  const int file = open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, place_of(num_ranks)) != 0)
    emu::fatal("ncclCommInitRank: %s: %s", id.internal, strerror(errno));
  void* const slots = mmap(nullptr, slot_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (slots == MAP_FAILED) emu::fatal("ncclCommInitRank: %s", strerror(errno));
  const char* nvls = getenv("NCCL_NVLS_ENABLE");
  auto* made = new ncclComm{rank, num_ranks,   nvls == nullptr || strcmp(nvls, "0") != 0,
                            file, id.internal, static_cast<Slot*>(slots)};
  Slot& mine = made->slots[rank];
  int device = 0;
  cudaDeviceProp properties;
  cudaGetDevice(&device);
  cudaGetDeviceProperties(&properties, device);
  mine.device = properties.uuid.bytes[15];  // its number in the machine
  if (mine.size.exchange(num_ranks) != 0) {
    unlink(id.internal);
    emu::fatal("ncclCommInitRank: two processes are rank %d of %d", rank, num_ranks);
  }
  await_others(*made, "ncclCommInitRank");
  unlink(id.internal);
  made->path = nullptr;
  int on_this_gpu = 0;
  for (int other = 0; other < num_ranks; other++) {
    const Slot& slot = made->slots[other];
    if (slot.size != num_ranks)
      emu::fatal("ncclCommInitRank for %d ranks on rank %d, but for %d on rank %d", num_ranks, rank, int(slot.size),
                 other);
    on_this_gpu += slot.device == mine.device;
  }
  if (!may_share_gpu(on_this_gpu)) return ncclInvalidUsage;
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
  munmap(comm->slots, slot_bytes);
  close(comm->file);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](ncclComm& c) { all_reduce(c, sent, received, count, type); };
  return queue({"ncclAllReduce", run, sent, 1, received, 1, count, type, comm, stream});
}

ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](ncclComm& c) { reduce_scatter(c, sent, received, count, type); };
  return queue({"ncclReduceScatter", run, sent, size_of(comm), received, 1, count, type, comm, stream});
}

ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  const auto run = [=](ncclComm& c) { all_gather(c, sent, received, count, type); };
  return queue({"ncclAllGather", run, sent, 1, received, size_of(comm), count, type, comm, stream});
}

ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](ncclComm& c) { reduce(c, sent, received, count, type, root); };
  const bool receives = comm != nullptr && comm->rank == root;
  return queue({"ncclReduce", run, sent, 1, received, receives, count, type, comm, stream, root});
}

ncclResult_t ncclBroadcast(const void* sent, void* received, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto run = [=](ncclComm& c) { broadcast(c, sent, received, count, type, root); };
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
