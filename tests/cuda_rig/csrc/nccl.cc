// NCCL's C interface between processes: a kernel is a task of its stream, over TCP.
//
// As in the real one, making a communicator waits for all of its ranks, unless its configuration
// says that it must not block; a kernel whose peer is gone runs until the communicator is aborted;
// a communicator takes memory of the device, and gives it back by cudaFree().
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "controls.h"
#include "nccl_api.h"
#include "reduction.h"
#include "stream.h"
#include "wire.h"

using namespace cuda_rig;

namespace {

using Address = Listener::Address;
// Operators that a script makes have numbers from here on.
constexpr int kOwnOperators = ncclNumOps + 100;
constexpr auto kLook = std::chrono::milliseconds(10);

// What a communicator takes of the device's memory.
size_t communicator_bytes() {
  const char* const text = std::getenv("CUDA_RIG_COMMUNICATOR_BYTES");
  return text == nullptr ? size_t{64} << 20 : std::strtoull(text, nullptr, 10);
}

}  // namespace

// Outlives its destruction: kernels and watchdogs may still look at it.
struct ncclComm {
  ncclComm(int number, int rank, int size) : number(number), rank(rank), size(size) {}

  const int number, rank, size;
  int device = 0;
  std::vector<int> peers;
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
  std::mutex mutex;
  // Reached when making it has ended.
  Moment made;
  // What was issued last: kernels of one communicator run one after another.
  std::shared_ptr<Moment> last;
  std::map<int, double> scales;
  void* memory = nullptr;

  bool move(std::vector<Move> moves) { return transfer(std::move(moves), aborted); }
  Move send(int peer, const void* data, size_t bytes) const {
    return {peers[static_cast<size_t>(peer)], const_cast<void*>(data), bytes, true};
  }
  Move receive(int peer, void* data, size_t bytes) const {
    return {peers[static_cast<size_t>(peer)], data, bytes, false};
  }
  int right() const { return (rank + 1) % size; }
  int left() const { return (rank + size - 1) % size; }

  void wait_for_last() {
    made.wait();
    std::shared_ptr<Moment> before;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      before = last;
    }
    if (before) before->wait();
  }

  void close_all() {
    for (int& fd : peers) {
      if (fd >= 0) close(fd);
      fd = -1;
    }
  }
};

// Memory of all ranks of a communicator, as this rank's device sees it.
struct ncclWindow_vidmem {
  void* own;
  std::vector<void*> all;
};

namespace {

// NCCL's allocations are no business of a capture.
template <class Function>
auto relaxed(const Function& function) {
  auto mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  auto found = function();
  cudaThreadExchangeStreamCaptureMode(&mode);
  return found;
}

// The meeting place of a communicator's ranks: tells each of them where all the others listen.
Address open_meeting(std::shared_ptr<Listener> listener) {
  const Address at = listener->address();
  std::thread([listener = std::move(listener)] {
    const std::atomic<bool> never{false};
    std::vector<int> fds;
    std::vector<Address> addresses;
    size_t missing = 1;
    while (missing > 0) {
      const int fd = listener->accept(never);
      struct {
        int rank, size;
        Address address;
      } said{};
      if (!transfer({{fd, &said, sizeof said, false}}, never)) {
        close(fd);
        continue;
      }
      if (fds.empty()) {
        fds.assign(static_cast<size_t>(said.size), -1);
        addresses.resize(static_cast<size_t>(said.size));
        missing = fds.size();
      }
      fds[static_cast<size_t>(said.rank)] = fd;
      addresses[static_cast<size_t>(said.rank)] = said.address;
      --missing;
    }
    for (const int fd : fds) {
      transfer({{fd, addresses.data(), addresses.size() * sizeof(Address), true}}, never);
      close(fd);
    }
  }).detach();
  return at;
}

// Connects every rank with every other.
ncclResult_t connect_all(ncclComm& of, const Address& meeting) {
  const Listener own;
  struct {
    int rank, size;
    Address address;
  } said{of.rank, of.size, own.address()};
  std::vector<Address> all(static_cast<size_t>(of.size));
  const int fd = dial(meeting);
  if (fd < 0) return ncclRemoteError;
  const bool met = transfer({{fd, &said, sizeof said, true}}, of.aborted) &&
                   transfer({{fd, all.data(), all.size() * sizeof(Address), false}}, of.aborted);
  close(fd);
  if (!met) return ncclRemoteError;
  of.peers.assign(all.size(), -1);
  for (int i = 0; i < of.rank; ++i) {
    const int peer = dial(all[static_cast<size_t>(i)]);
    if (peer < 0 || !transfer({{peer, &said.rank, sizeof said.rank, true}}, of.aborted)) {
      return ncclRemoteError;
    }
    of.peers[static_cast<size_t>(i)] = peer;
  }
  for (int i = of.rank + 1; i < of.size; ++i) {
    const int peer = own.accept(of.aborted);
    int rank = 0;
    if (peer < 0 || !transfer({{peer, &rank, sizeof rank, false}}, of.aborted)) {
      return ncclRemoteError;
    }
    of.peers[static_cast<size_t>(rank)] = peer;
  }
  return ncclSuccess;
}

ncclResult_t initialize(ncclComm& of, const Address& meeting) {
  const std::shared_ptr<Moment> ended(&of.made, [](Moment* made) { made->reach(); });
  cudaSetDevice(of.device);
  const Fault fault = take_fault("init", true);
  if (fault.kind == "error") return ncclSystemError;
  if (fault.kind == "delay")
    std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
  if (fault.kind == "hold") hold(fault, of.aborted);
  const auto allocated = relaxed([&] { return cudaMalloc(&of.memory, communicator_bytes()); });
  if (allocated != cudaSuccess) {
    cudaGetLastError();
    return ncclUnhandledCudaError;
  }
  return connect_all(of, meeting);
}

std::shared_ptr<Issued> described(const ncclComm& of, std::string op) {
  auto found = std::make_shared<Issued>();
  found->op = std::move(op);
  found->communicator = of.number;
  found->rank = of.rank;
  found->size = of.size;
  found->peer = found->reduction = -1;
  found->type = -1;
  found->count = found->bytes = 0;
  found->stream = nullptr;
  found->captured = false;
  return found;
}

ncclResult_t make(ncclComm_t* made, int size, int rank, const ncclConfig_t* with,
                  const Address& meeting) {
  if (take_fault("init", false).kind == "refuse") return ncclSystemError;
  static std::atomic<int> numbers{0};
  auto* const comm = new ncclComm(++numbers, rank, size);
  cudaGetDevice(&comm->device);
  auto issued = described(*comm, "init");
  // Where an operation has its type; NCCL_CONFIG_UNDEF_INT where nobody chose.
  issued->type = with == nullptr ? NCCL_CONFIG_UNDEF_INT : with->trafficClass;
  const int64_t start = now_ns();
  const uint64_t number = log_issued(*issued);
  const auto initialized = [=] {
    const ncclResult_t result = initialize(*comm, meeting);
    log_ran(number, start, now_ns());
    return result;
  };
  if (with == nullptr || with->blocking != 0) {
    const ncclResult_t result = initialized();
    *made = result == ncclSuccess ? comm : nullptr;
    return result;
  }
  *made = comm;
  comm->error = ncclInProgress;
  std::thread([comm, initialized] { comm->error = initialized(); }).detach();
  return ncclInProgress;
}

void give_back(ncclComm& of, uint64_t number) {
  const int64_t start = now_ns();
  of.close_all();
  relaxed([&] { return cudaFree(of.memory); });
  of.memory = nullptr;
  log_ran(number, start, now_ns());
}

// Groups of calls, and the kernels that they become.

struct Operation {
  ncclComm* comm;
  cudaStream_t stream;
  std::shared_ptr<Issued> issued;
  // False once a peer is gone. A message has `moves` instead.
  std::function<bool()> run = nullptr;
  std::vector<Move> moves = {};
  // A message to this rank itself.
  const void* own_from = nullptr;
  void* own_to = nullptr;
};

thread_local int depth = 0;
thread_local std::vector<Operation> group;

// What a kernel does: collectives in their order, then all messages at once.
bool run_all(const std::vector<Operation>& all) {
  std::vector<Move> moves;
  std::vector<const Operation*> own_sent, own_received;
  for (const Operation& each : all) {
    if (each.run && !each.run()) return false;
    moves.insert(moves.end(), each.moves.begin(), each.moves.end());
    if (each.own_from != nullptr) own_sent.push_back(&each);
    if (each.own_to != nullptr) own_received.push_back(&each);
  }
  for (size_t i = 0; i < std::min(own_sent.size(), own_received.size()); ++i) {
    std::memmove(own_received[i]->own_to, own_sent[i]->own_from, own_sent[i]->issued->bytes);
  }
  return all.front().comm->move(std::move(moves));
}

void kernel(ncclComm& comm, const std::vector<Operation>& all, const std::vector<uint64_t>& log) {
  const Kernel running(comm.device);
  const int64_t start = now_ns();
  bool whole = !comm.aborted;
  for (const Operation& each : all) {
    const Fault fault = take_fault(each.issued->op, true);
    if (fault.kind == "delay") take_time(fault.seconds);
    if (fault.kind == "hold") hold(fault, comm.aborted);
    whole &= fault.kind != "error";
  }
  if (!whole || !run_all(all)) {
    if (!comm.aborted) comm.error = ncclRemoteError;
    while (!comm.aborted) std::this_thread::sleep_for(kLook);
    return;
  }
  const int64_t end = now_ns();
  for (const uint64_t number : log) log_ran(number, start, end);
}

ncclResult_t issue(ncclComm& comm, cudaStream_t on, std::vector<Operation> all) {
  Stream* const stream = stream_of(on);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(on, &status);
  const bool captured = status != cudaStreamCaptureStatusNone;
  std::vector<uint64_t> log;
  for (const Operation& each : all) {
    if (comm.aborted) return ncclInvalidUsage;
    if (take_fault(each.issued->op, false).kind == "refuse") return ncclInternalError;
    each.issued->captured = captured;
    each.issued->stream = stream;
    log.push_back(log_issued(*each.issued));
  }
  if (captured) {
    stream->enqueue([&comm, all = std::move(all)] { kernel(comm, all, {}); });
    return ncclSuccess;
  }
  const auto done = std::make_shared<Moment>();
  std::shared_ptr<Moment> before;
  {
    const std::lock_guard<std::mutex> lock(comm.mutex);
    before = std::exchange(comm.last, done);
  }
  stream->enqueue([&comm, all = std::move(all), log = std::move(log), before, done] {
    if (before) before->wait();
    kernel(comm, all, log);
    done->reach();
  });
  return ncclSuccess;
}

ncclResult_t flush() {
  std::vector<Operation> all;
  all.swap(group);
  ncclResult_t found = ncclSuccess;
  while (!all.empty()) {
    ncclComm* const comm = all.front().comm;
    const cudaStream_t stream = all.front().stream;
    const auto others = std::stable_partition(all.begin(), all.end(), [&](const Operation& each) {
      return each.comm == comm && each.stream == stream;
    });
    const ncclResult_t result = issue(
        *comm, stream, {std::make_move_iterator(all.begin()), std::make_move_iterator(others)});
    if (result != ncclSuccess) found = result;
    all.erase(all.begin(), others);
  }
  return found;
}

ncclResult_t add(Operation operation) {
  group.push_back(std::move(operation));
  return depth > 0 ? ncclSuccess : flush();
}

std::shared_ptr<Issued> described(const ncclComm& of, std::string op, size_t count,
                                  ncclDataType_t type, int reduction = -1, int peer = -1) {
  auto found = described(of, std::move(op));
  found->count = count;
  found->bytes = count * bytes_of(type);
  found->type = type;
  found->reduction = reduction >= kOwnOperators ? kOwnOperators : reduction;
  found->peer = peer;
  return found;
}

// Collectives, around the ring. Chunk i of `data` begins at element i * each.

size_t begin_of(size_t i, size_t each, size_t count) { return std::min(i * each, count); }

struct Chunks {
  char* data;
  size_t count, each, width;
  char* at(int i) const { return data + begin_of(static_cast<size_t>(i), each, count) * width; }
  size_t elements(int i) const {
    const auto n = static_cast<size_t>(i);
    return begin_of(n + 1, each, count) - begin_of(n, each, count);
  }
  size_t bytes(int i) const { return elements(i) * width; }
};

// Leaves the sum of chunk `rank` on each rank.
bool reduce_scatter(ncclComm& comm, const Chunks& of, ncclDataType_t type, int op) {
  const int n = comm.size;
  if (const auto own = comm.scales.find(op); own != comm.scales.end()) {
    scale(of.data, of.count, type, own->second, 1);
  }
  for (int step = 1; step < n; ++step) {
    const int gives = (comm.rank - step + n) % n, takes = (comm.rank - step - 1 + 2 * n) % n;
    std::vector<char> got(of.bytes(takes));
    if (!comm.move({comm.send(comm.right(), of.at(gives), of.bytes(gives)),
                    comm.receive(comm.left(), got.data(), got.size())})) {
      return false;
    }
    reduce(of.at(takes), got.data(), of.elements(takes), type, op);
  }
  if (op == ncclAvg) scale(of.at(comm.rank), of.elements(comm.rank), type, 1, n);
  return true;
}

bool all_gather(ncclComm& comm, const Chunks& of) {
  const int n = comm.size;
  for (int step = 0; step < n - 1; ++step) {
    const int gives = (comm.rank - step + n) % n, takes = (comm.rank - step - 1 + n) % n;
    if (!comm.move({comm.send(comm.right(), of.at(gives), of.bytes(gives)),
                    comm.receive(comm.left(), of.at(takes), of.bytes(takes))})) {
      return false;
    }
  }
  return true;
}

bool all_reduce(ncclComm& comm, char* data, size_t count, ncclDataType_t type, int op) {
  const auto n = static_cast<size_t>(comm.size);
  const Chunks chunks{data, count, (count + n - 1) / n, bytes_of(type)};
  return reduce_scatter(comm, chunks, type, op) && all_gather(comm, chunks);
}

void copy(void* to, const void* from, size_t bytes) {
  if (to != from) std::memmove(to, from, bytes);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

// Communicators.

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  const Address at = open_meeting(std::make_shared<Listener>());
  std::memcpy(id->internal, &at, sizeof at);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* with) {
  Address at;
  std::memcpy(&at, id.internal, sizeof at);
  return make(made, size, rank, with, at);
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t* with) {
  return ncclCommInitRankConfig(made, size, ids[0], rank, with);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made,
                           ncclConfig_t* with) {
  *made = nullptr;
  parent->wait_for_last();
  struct Member {
    int color, key, rank;
    Address address;
  };
  auto listener = std::make_shared<Listener>();
  std::vector<Member> all(static_cast<size_t>(parent->size));
  Member& own = all[static_cast<size_t>(parent->rank)];
  own = {color, key, parent->rank, listener->address()};
  std::vector<Move> moves;
  for (int i = 0; i < parent->size; ++i) {
    if (i == parent->rank) continue;
    moves.push_back(parent->send(i, &own, sizeof own));
    moves.push_back(parent->receive(i, &all[static_cast<size_t>(i)], sizeof own));
  }
  log_issued(*described(*parent, "split"));
  if (!parent->move(std::move(moves))) return ncclRemoteError;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  const int rank = parent->rank;
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& m) { return m.color != color; }),
            all.end());
  std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.key < b.key; });
  const auto place = std::find_if(all.begin(), all.end(), [&](auto& m) { return m.rank == rank; });
  if (place == all.begin()) open_meeting(std::move(listener));
  return make(made, static_cast<int>(all.size()), static_cast<int>(place - all.begin()), with,
              all.front().address);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  comm->wait_for_last();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const uint64_t number = log_issued(*described(*comm, "destroy"));
  comm->wait_for_last();
  comm->aborted = true;
  give_back(*comm, number);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const uint64_t number = log_issued(*described(*comm, "abort"));
  comm->aborted = true;
  comm->wait_for_last();
  give_back(*comm, number);
  return ncclSuccess;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
  comm->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->error;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return allocate_shared(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t bytes, void** handle) {
  auto issued = described(*comm, "register");
  issued->bytes = bytes;
  log_issued(*issued);
  *handle = buffer;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  log_issued(*described(*comm, "deregister"));
  return ncclSuccess;
}

// Windows: memory of ncclMemAlloc(), which the ranks map from one another.

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t bytes, ncclWindow_t* made,
                                    int) {
  comm->wait_for_last();
  std::vector<SharedMemory> all(static_cast<size_t>(comm->size));
  SharedMemory& own = all[static_cast<size_t>(comm->rank)] = shared_at(buffer);
  std::vector<Move> moves;
  for (int i = 0; i < comm->size; ++i) {
    if (i == comm->rank) continue;
    moves.push_back(comm->send(i, &own, sizeof own));
    moves.push_back(comm->receive(i, &all[static_cast<size_t>(i)], sizeof own));
  }
  auto issued = described(*comm, "window");
  issued->bytes = bytes;
  log_issued(*issued);
  if (!comm->move(std::move(moves))) return ncclRemoteError;
  auto* const window = *made = new ncclWindow_vidmem{buffer, {}};
  for (int i = 0; i < comm->size; ++i) {
    window->all.push_back(i == comm->rank ? buffer : map_shared(all[static_cast<size_t>(i)]));
  }
  const bool whole = own.bytes >= bytes && std::find(window->all.begin(), window->all.end(),
                                                     nullptr) == window->all.end();
  if (whole) return ncclSuccess;
  ncclCommWindowDeregister(comm, window);
  *made = nullptr;
  return ncclInvalidUsage;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t window) {
  for (void* const each : window->all) {
    if (each != window->own && each != nullptr) unmap_shared(each);
  }
  delete window;
  return ncclSuccess;
}
ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t window, void** pointer) {
  *pointer = window->own;
  return ncclSuccess;
}
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer,
                                      void** pointer) {
  *pointer = static_cast<char*>(window->all[static_cast<size_t>(peer)]) + offset;
  return ncclSuccess;
}

// Groups and operators.

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --depth > 0 ? ncclSuccess : flush(); }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* found) {
  --depth;
  group.clear();
  if (found != nullptr) found->estimatedTime = 12.5F;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t comm) {
  static std::atomic<int> numbers{kOwnOperators};
  const int number = ++numbers;
  with_type(type, [&](auto value) {
    comm->scales[number] = static_cast<double>(*static_cast<decltype(value)*>(scalar));
  });
  *op = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// Operations.

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add({comm, stream, described(*comm, "all_reduce", count, type, op), [=] {
                copy(to, from, count * bytes_of(type));
                return all_reduce(*comm, static_cast<char*>(to), count, type, op);
              }});
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return add({comm, stream, described(*comm, "reduce", count, type, op, root), [=] {
                const auto* const begin = static_cast<const char*>(from);
                std::vector<char> sum(begin, begin + count * bytes_of(type));
                const bool whole = all_reduce(*comm, sum.data(), count, type, op);
                if (whole && comm->rank == root) copy(to, sum.data(), sum.size());
                return whole;
              }});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add({comm, stream, described(*comm, "reduce_scatter", count, type, op), [=] {
                const size_t width = bytes_of(type), all = count * static_cast<size_t>(comm->size);
                const auto* const begin = static_cast<const char*>(from);
                std::vector<char> sum(begin, begin + all * width);
                const Chunks chunks{sum.data(), all, count, width};
                if (!reduce_scatter(*comm, chunks, type, op)) return false;
                copy(to, chunks.at(comm->rank), count * width);
                return true;
              }});
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({comm, stream, described(*comm, "all_gather", count, type), [=] {
                const Chunks chunks{static_cast<char*>(to), count * static_cast<size_t>(comm->size),
                                    count, bytes_of(type)};
                copy(chunks.at(comm->rank), from, count * bytes_of(type));
                return all_gather(*comm, chunks);
              }});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({comm, stream, described(*comm, "broadcast", count, type, -1, root), [=] {
                const size_t bytes = count * bytes_of(type);
                if (comm->rank != root) return comm->move({comm->receive(root, to, bytes)});
                copy(to, from, bytes);
                std::vector<Move> moves;
                for (int i = 0; i < comm->size; ++i) {
                  if (i != root) moves.push_back(comm->send(i, from, bytes));
                }
                return comm->move(std::move(moves));
              }});
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  Operation made{comm, stream, described(*comm, "send", count, type, -1, peer)};
  if (peer == comm->rank) {
    made.own_from = from;
  } else {
    made.moves = {comm->send(peer, from, count * bytes_of(type))};
  }
  return add(std::move(made));
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Operation made{comm, stream, described(*comm, "receive", count, type, -1, peer)};
  if (peer == comm->rank) {
    made.own_to = to;
  } else {
    made.moves = {comm->receive(peer, to, count * bytes_of(type))};
  }
  return add(std::move(made));
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  ncclGroupStart();
  for (int i = 0; i < comm->size; ++i) {
    const size_t at = static_cast<size_t>(i) * bytes;
    ncclSend(static_cast<const char*>(from) + at, count, type, i, comm, stream);
    ncclRecv(static_cast<char*>(to) + at, count, type, i, comm, stream);
  }
  return ncclGroupEnd();
}
ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  ncclGroupStart();
  ncclSend(from, count, type, root, comm, stream);
  for (int i = 0; comm->rank == root && i < comm->size; ++i) {
    ncclRecv(static_cast<char*>(to) + static_cast<size_t>(i) * bytes, count, type, i, comm, stream);
  }
  return ncclGroupEnd();
}

}  // extern "C"
