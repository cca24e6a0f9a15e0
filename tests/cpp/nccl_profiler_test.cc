// The NCCL profiler plugin, driven as NCCL's threads drive it: the order of calls is that of NCCL
// 2.28.9 and 2.30.7 (src/transport/net.cc, sendProxyProgress and recvProxyProgress).
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/nccl_profiler/busy_time.h"
#include "../../csrc/nccl_profiler/crux_nccl_profiler.h"
#include "../../csrc/nccl_profiler/profiler_abi.h"
#include "check.h"

extern "C" crux::nccl_profiler::Plugin ncclProfiler_v5;

namespace crux::nccl_profiler {
namespace {

constexpr int kSteps = 8;  // NCCL_STEPS
constexpr uint64_t kGroupApi = 1 << 8, kCollApi = 1 << 9, kGroup = 1;
constexpr int kSendGpuWait = 8, kReceiveWait = 10, kReceiveGpuWait = 12, kSendPeerWait = 20,
              kInProgress = 19;

const Plugin& plugin() { return ncclProfiler_v5; }

void* start(void* context, const EventDescription& description) {
  EventDescription copy = description;
  void* handle = &copy;  // the plugin has to write it, whatever it makes of the event
  CHECK(plugin().start_event(context, &handle, &copy) == kSuccess);
  return handle;
}

void record(void* handle, int state, size_t bytes = 0) {
  StateArguments arguments{};
  arguments.transferred_bytes = bytes;
  CHECK(plugin().record_state(handle, state, &arguments) == kSuccess);
}

void stop(void* handle) { CHECK(plugin().stop_event(handle) == kSuccess); }

EventDescription operation(bool sends, pid_t pid = ::getpid()) {
  EventDescription description{};
  description.type = kProxyOperation;
  description.proxy_operation.pid = pid;
  description.proxy_operation.steps = 16;
  description.proxy_operation.is_send = sends;
  return description;
}

EventDescription step_of(void* parent) {
  EventDescription description{};
  description.type = kProxyStep;
  description.parent = parent;
  return description;
}

EventDescription of_type(uint64_t type) {
  EventDescription description{};
  description.type = type;
  return description;
}

// A communicator as NCCL makes one: ncclProfilerPluginInit.
struct Communicator {
  Communicator(uint64_t id, const char* name, int ranks = 2, int rank = 0) {
    CHECK(plugin().init(&context, id, &mask, name, ranks, ranks, rank, nullptr) == kSuccess);
    CHECK(context != nullptr);
  }
  void finalize() { CHECK(plugin().finalize(context) == kSuccess); }
  void* context = nullptr;
  int mask = 0;
};

// The calls for one send, with up to kSteps of its transfers in the network's hands.
uint64_t send(void* context, int steps, size_t bytes, int depth = kSteps) {
  void* op = start(context, operation(true));
  CHECK(op != nullptr);
  record(op, kInProgress);
  std::deque<void*> in_flight;
  for (int i = 0; i < steps; ++i) {
    if (static_cast<int>(in_flight.size()) == depth) {
      stop(in_flight.front());
      in_flight.pop_front();
    }
    void* step = start(context, step_of(op));
    CHECK(step != nullptr);
    record(step, kSendGpuWait);
    record(step, kSendPeerWait);
    record(step, kSendPeerWait);  // once more where the network was not ready
    record(step, kSendWait, bytes);
    in_flight.push_back(step);
  }
  for (void* step : in_flight) stop(step);
  stop(op);
  return steps * bytes;
}

uint64_t receive(void* context, int steps, size_t bytes) {
  void* op = start(context, operation(false));
  record(op, kInProgress);
  for (int i = 0; i < steps; ++i) {
    void* step = start(context, step_of(op));
    record(step, kReceiveWait, i == 0 ? 0 : bytes);  // the previous transfer's size
    record(step, kReceiveFlush, bytes);
    record(step, kReceiveGpuWait, bytes);
    stop(step);
  }
  stop(op);
  return steps * bytes;
}

std::vector<crux_nccl_communicator> all() {
  // Other threads may make some in between.
  std::vector<crux_nccl_communicator> found(crux_nccl_profiler_communicators(nullptr, 0) + 16);
  const int count = crux_nccl_profiler_communicators(found.data(), static_cast<int>(found.size()));
  found.resize(std::min(found.size(), static_cast<size_t>(count)));
  return found;
}

crux_nccl_communicator find(uint64_t id) {
  for (const crux_nccl_communicator& one : all()) {
    if (one.id == id) return one;
  }
  CHECK(false);
  return {};
}

crux_nccl_traffic totals() {
  crux_nccl_traffic sum;
  crux_nccl_profiler_totals(&sum);
  return sum;
}

void test_identity() {
  const std::string long_name(200, 'n');
  Communicator named(0x11, "default_pg", 16, 3), unnamed(0x12, nullptr),
      cut(0x13, long_name.c_str());
  CHECK(named.mask == 0b11110);  // Coll, P2p, ProxyOp, ProxyStep
  const crux_nccl_communicator one = find(0x11);
  CHECK(std::strcmp(one.name, "default_pg") == 0);
  CHECK(one.ranks == 16 && one.nodes == 16 && one.rank == 3 && !one.ended);
  CHECK(find(0x12).name[0] == '\0');
  CHECK(std::strlen(find(0x13).name) == CRUX_NCCL_NAME - 1);
  named.finalize();
  CHECK(find(0x11).ended == 1);
  unnamed.finalize();
  cut.finalize();
  // No more is written than there is room for.
  crux_nccl_communicator two[2] = {};
  two[1].ranks = -7;
  CHECK(crux_nccl_profiler_communicators(two, 1) == 3);
  CHECK(two[0].id == 0x11 && two[1].ranks == -7);
}

void test_counts() {
  Communicator comm(0x21, "counts");
  // Parents that NCCL makes whatever the mask says; they must get no handle of ours.
  for (const uint64_t type : {kGroupApi, kCollApi, kGroup, uint64_t{1} << 16}) {
    CHECK(start(comm.context, of_type(type)) == nullptr);
  }
  CHECK(start(comm.context, of_type(kCollective)) == nullptr);
  CHECK(start(comm.context, of_type(kPointToPoint)) == nullptr);
  CHECK(start(comm.context, of_type(kPointToPoint)) == nullptr);
  const uint64_t sent = send(comm.context, 16, 524288) + send(comm.context, 1, 17);
  const uint64_t received = receive(comm.context, 16, 262144);
  const crux_nccl_traffic traffic = find(0x21).traffic;
  CHECK(traffic.collectives == 1 && traffic.point_to_point == 2);
  CHECK(traffic.sends == 17 && traffic.sent_bytes == sent);
  CHECK(traffic.receives == 16 && traffic.received_bytes == received);
  CHECK(traffic.untracked == 0);
  comm.finalize();
}

// Two channels that send at the same time are one span of time, not two.
void test_time_is_a_union() {
  using std::chrono::milliseconds;
  Communicator comm(0x31, "union"), other(0x32, "other");
  const uint64_t whole_before = totals().sending_ns;
  const auto begin = std::chrono::steady_clock::now();
  std::array<void*, 3> ops{}, steps{};
  for (size_t i = 0; i < ops.size(); ++i) {
    void* context = i < 2 ? comm.context : other.context;
    ops[i] = start(context, operation(true));
    steps[i] = start(context, step_of(ops[i]));
    record(steps[i], kSendGpuWait);
  }
  std::this_thread::sleep_for(milliseconds(5));  // the GPU's time, not the network's
  const auto handed = std::chrono::steady_clock::now();
  for (void* step : steps) record(step, kSendWait, 1000);
  std::this_thread::sleep_for(milliseconds(20));
  const uint64_t open_ns = find(0x31).traffic.sending_ns;
  CHECK(find(0x31).traffic.sends == 0);
  stop(steps[0]);
  std::this_thread::sleep_for(milliseconds(10));
  stop(steps[1]);
  stop(steps[2]);
  const auto done = std::chrono::steady_clock::now();
  for (void* op : ops) stop(op);
  std::this_thread::sleep_for(milliseconds(5));
  const auto ns = [](auto span) {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(span).count());
  };
  const uint64_t one = find(0x31).traffic.sending_ns, two = find(0x32).traffic.sending_ns;
  CHECK(open_ns >= ns(milliseconds(20)) - 1000 && open_ns <= one);
  for (const uint64_t spent : {one, two, totals().sending_ns - whole_before}) {
    CHECK(spent >= ns(milliseconds(30)) - 1000 && spent <= ns(done - handed) + 1000);
    CHECK(spent < ns(done - begin));
  }
  comm.finalize();
  other.finalize();
}

void test_forwarded_for_another_process() {
  crux_nccl_traffic before, after;
  crux_nccl_profiler_forwarded(&before);
  const uint64_t whole = totals().sent_bytes;
  // The context is an address of that process: reading it would crash.
  void* foreign = reinterpret_cast<void*>(uintptr_t{0x10});
  void* op = start(foreign, operation(true, ::getpid() + 1));
  CHECK(op != nullptr);
  void* step = start(foreign, step_of(op));
  record(step, kSendWait, 4096);
  stop(step);
  stop(op);
  crux_nccl_profiler_forwarded(&after);
  CHECK(after.sent_bytes == before.sent_bytes + 4096 && after.sends == before.sends + 1);
  CHECK(totals().sent_bytes == whole + 4096);
  // Its number may be ours, in a PID namespace of its own.
  op = start(foreign, operation(true));
  CHECK(op != nullptr);
  stop(op);
}

// ncclProxyOpToArgs starts the event for every transport; sendProxyProgress and recvProxyProgress
// of the network end it, those of CollNet, shared memory and copy engines do not.
void test_operations_that_never_end_take_no_memory() {
  Communicator comm(0x45, "collnet");
  start(comm.context, operation(false));
  const size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 10000; ++i) start(comm.context, operation(false));
  CHECK(mallinfo2().uordblks <= before + 10000);
  comm.finalize();
}

// recvProxyProgress starts a transfer's event each time that it comes by, until it can post it.
void test_a_receive_that_starts_over() {
  Communicator comm(0x46, "waits for its buffer");
  void* op = start(comm.context, operation(false));
  void* step = nullptr;
  for (int i = 0; i < 1000; ++i) step = start(comm.context, step_of(op));
  CHECK(step != nullptr);
  record(step, kReceiveWait, 0);
  record(step, kReceiveFlush, 4096);
  stop(step);
  stop(op);
  const crux_nccl_traffic traffic = find(0x46).traffic;
  CHECK(traffic.receives == 1 && traffic.received_bytes == 4096 && traffic.untracked == 0);
  comm.finalize();
}

void test_what_nccl_should_not_do_does_no_harm() {
  Communicator comm(0x41, "odd");
  const uint64_t untracked = totals().untracked;
  CHECK(start(nullptr, operation(true)) == nullptr);
  CHECK(totals().untracked == untracked + 1);
  CHECK(start(comm.context, step_of(nullptr)) == nullptr);
  CHECK(start(nullptr, of_type(kCollective)) == nullptr);
  record(nullptr, kSendWait, 1);
  CHECK(plugin().record_state(nullptr, kSendWait, nullptr) == kSuccess);
  stop(nullptr);
  CHECK(plugin().finalize(nullptr) == kSuccess);

  // More open transfers than the network was given.
  void* op = start(comm.context, operation(true));
  std::vector<void*> steps;
  for (int i = 0; i < kSteps + 1; ++i) steps.push_back(start(comm.context, step_of(op)));
  // The operation is stopped before its transfers are.
  record(steps[0], kSendWait, 5);
  record(op, kSendWait, 7);  // of no transfer
  stop(op);
  for (void* step : steps) stop(step);
  CHECK(find(0x41).traffic.sends == 1 && find(0x41).traffic.sent_bytes == 5);
  // A transfer without arguments is one of no bytes.
  op = start(comm.context, operation(true));
  void* step = start(comm.context, step_of(op));
  CHECK(plugin().record_state(step, kSendWait, nullptr) == kSuccess);
  stop(step);
  stop(op);
  CHECK(find(0x41).traffic.sends == 2 && find(0x41).traffic.sent_bytes == 5);
  comm.finalize();
  comm.finalize();
}

// An abort leaves sends that are never reported done: their time ends with the communicator.
void test_abort() {
  Communicator comm(0x51, "aborted");
  void* op = start(comm.context, operation(true));
  void* step = start(comm.context, step_of(op));
  record(step, kSendWait, 99);
  comm.finalize();
  const crux_nccl_traffic first = find(0x51).traffic;
  const uint64_t whole = totals().sending_ns;
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(find(0x51).traffic.sending_ns == first.sending_ns && first.sends == 0);
  CHECK(totals().sending_ns == whole);
  // Many others end meanwhile; this one is kept, for it may be told late.
  for (int i = 0; i < 200; ++i) Communicator(0x5000 + i, "short").finalize();
  stop(step);
  stop(op);
  CHECK(find(0x51).traffic.sends == 1 && find(0x51).traffic.sent_bytes == 99);
  CHECK(find(0x51).traffic.sending_ns == first.sending_ns);
}

void test_totals_keep_what_ended_long_ago() {
  const crux_nccl_traffic before = totals();
  uint64_t sent = 0;
  for (int i = 0; i < 300; ++i) {
    Communicator comm(0x6000 + i, "");
    sent += send(comm.context, 2, 1000 + i);
    comm.finalize();
  }
  CHECK(crux_nccl_profiler_communicators(nullptr, 0) < 100);
  CHECK(totals().sent_bytes - before.sent_bytes == sent);
  CHECK(totals().sends - before.sends == 600);
}

// Several proxies and users at once, while others read; sums are exact and time never runs back.
void test_threads() {
  constexpr int kThreads = 4, kRounds = 300;
  std::vector<Communicator> comms;
  for (int i = 0; i < kThreads; ++i) comms.emplace_back(0x700 + i, "threads", kThreads, i);
  const crux_nccl_traffic before = totals();
  std::atomic<bool> done{false};
  std::vector<std::thread> threads, readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&done] {
      crux_nccl_traffic last = totals();
      while (!done.load()) {
        const crux_nccl_traffic now = totals();
        CHECK(now.sending_ns >= last.sending_ns && now.sent_bytes >= last.sent_bytes);
        for (const crux_nccl_communicator& one : all()) CHECK(one.traffic.untracked <= 1);
        last = now;
        std::this_thread::yield();
      }
    });
  }
  std::array<uint64_t, kThreads> sent{}, received{};
  for (int i = 0; i < kThreads; ++i) {
    // The proxy's thread of one communicator, and the user's.
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      for (int round = 0; round < kRounds; ++round) {
        const int steps = static_cast<int>(random() % 20), bytes = static_cast<int>(random() % 99);
        sent[i] += send(comms[i].context, steps, bytes, 1 + round % kSteps);
        received[i] += receive(comms[i].context, steps, bytes);
      }
    });
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        start(comms[i].context, of_type(kCollective));
        Communicator(0x8000 + round, "passing").finalize();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  for (std::thread& reader : readers) reader.join();
  uint64_t whole = 0;
  for (int i = 0; i < kThreads; ++i) {
    const crux_nccl_traffic traffic = find(0x700 + i).traffic;
    CHECK(traffic.sent_bytes == sent[i] && traffic.received_bytes == received[i]);
    CHECK(traffic.collectives == kRounds && traffic.untracked == 0);
    whole += sent[i];
    comms[i].finalize();
  }
  CHECK(totals().sent_bytes - before.sent_bytes == whole);
}

// Against an account of the open intervals, in any order of begins and ends.
void test_busy_time() {
  std::mt19937_64 random(1);
  BusyTime busy;
  BusyTimeReader reader;
  uint64_t now = random(), open = 0, begun = 0, sum = 0;
  const uint64_t tick = BusyTime::kTickNs;
  now -= now % tick;
  for (int i = 0; i < 100000; ++i) {
    now += tick * (random() % 1000);
    if (open != 0 && random() % 50 == 0) {
      CHECK(busy.end_all(now) == open);
      sum += now - begun;
      open = 0;
    } else if (open == 0 || random() % 2) {
      CHECK(busy.begin(now));
      if (open++ == 0) begun = now;
    } else {
      CHECK(busy.end(now));
      if (--open == 0) sum += now - begun;
    }
    CHECK(reader.ns(busy, now) == sum + (open ? now - begun : 0));
  }
  busy.end_all(now);
  CHECK(!busy.end(now));
  // Sums go on past the width of the word, where they are read in time.
  const uint64_t before = reader.ns(busy, now);
  uint64_t wide = 0;
  for (int i = 0; i < 10; ++i) {
    CHECK(busy.begin(now));
    const uint64_t span = tick << (BusyTime::kSumBits - 2);
    now += span;
    CHECK(busy.end(now));
    wide += span;
    CHECK(reader.ns(busy, now) == before + wide);
  }
  // A thread that read the clock long before it ends its interval makes no time run back.
  BusyTime late;
  BusyTimeReader watch;
  CHECK(late.begin(100 * tick) && watch.ns(late, 110 * tick) == 10 * tick);
  CHECK(late.end(105 * tick) && watch.ns(late, 111 * tick) == 10 * tick);
  CHECK(late.begin(200 * tick) && late.end(207 * tick) && watch.ns(late, 300 * tick) == 12 * tick);
  // Full, it takes no more, and none is lost.
  BusyTime full;
  for (uint64_t i = 0; i < BusyTime::kMostOpen; ++i) CHECK(full.begin(0));
  CHECK(!full.begin(0));
  CHECK(full.end_all(tick) == BusyTime::kMostOpen && full.ticks(5 * tick) == 1);
}

}  // namespace
}  // namespace crux::nccl_profiler

int main() {
  using namespace crux::nccl_profiler;
  test_identity();
  test_counts();
  test_time_is_a_union();
  test_forwarded_for_another_process();
  test_operations_that_never_end_take_no_memory();
  test_a_receive_that_starts_over();
  test_what_nccl_should_not_do_does_no_harm();
  test_abort();
  test_totals_keep_what_ended_long_ago();
  test_threads();
  test_busy_time();
  std::puts("nccl_profiler: ok");
  return 0;
}
