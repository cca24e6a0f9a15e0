// The recorder without torch: what many threads push is drained once or counted, operations meet
// their completions in any order and get their places in time, and a gate is left once.

#include "../../csrc/process_group/recorder.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../csrc/process_group/completion_table.h"
#include "../../csrc/process_group/gate_ticket.h"
#include "../../csrc/process_group/operation.h"
#include "../../csrc/process_group/ring.h"
#include "check.h"

namespace crux {
namespace {

constexpr uint32_t kProducers = 6;
constexpr uint64_t kPerProducer = 20000;

static_assert(std::is_trivially_copyable_v<Record>, "drain hands out bytes");
static_assert(std::is_nothrow_default_constructible_v<Record>);

// Every field follows from the producer and the number, so that a torn record shows.
Record numbered(uint32_t producer, uint64_t number) {
  Record record;
  record.sequence = number;
  record.issue_ns = static_cast<int64_t>(number * kProducers + producer);
  record.start_ns = record.issue_ns + 1;
  record.end_ns = record.issue_ns + 2;
  record.device_ns = record.issue_ns + 3;
  record.bytes = record.issue_ns + 4;
  record.group = producer;
  record.world_size = producer + 1;
  record.peer = static_cast<int32_t>(number);
  record.op = static_cast<Op>(number % static_cast<uint64_t>(Op::kCount));
  record.flags = static_cast<uint8_t>(number);
  return record;
}

bool same(const Record& a, const Record& b) { return std::memcmp(&a, &b, sizeof(Record)) == 0; }

// A place on a stream whose time is known, or not.
struct PlainMark {
  int64_t ns = kUnknownTime;
  int64_t reached_ns() const noexcept { return ns; }
};
using PlainOperation = Operation<PlainMark>;
using Table = CompletionTable<PlainOperation>;

PlainOperation operation(const Record& whole, int64_t reached_ns = kUnknownTime) {
  PlainOperation made;
  made.whole = whole;
  made.mark.ns = reached_ns;
  return made;
}

// Places operations at once, as the device's thread does later.
Table::Done placing(Lanes& lanes) {
  return [&lanes](PlainOperation&& done, int64_t device_ns) { lanes.finish(done, device_ns); };
}

// What a completion adds to `issued`: the duration, and times that agree with it.
bool completed_as(const Record& record, const Record& issued, int64_t device_ns) {
  Record expected = issued;
  expected.device_ns = device_ns;
  expected.start_ns = issued.issue_ns;
  if (device_ns != kUnknownTime) {
    if (record.end_ns < issued.issue_ns + device_ns) return false;
    expected.end_ns = record.end_ns;
  }
  return same(record, expected);
}

std::vector<Record> drain_all(Recorder& recorder) {
  std::vector<Record> records;
  recorder.drain(SIZE_MAX, records);
  return records;
}

// Runs body(i) on `count` threads, all let go at once.
template <typename Body>
class Threads {
 public:
  Threads(uint32_t count, Body body) {
    for (uint32_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, body, i] {
        while (!go_.load(std::memory_order_acquire)) std::this_thread::yield();
        body(i);
      });
    }
    go_.store(true, std::memory_order_release);
  }
  ~Threads() { join(); }
  void join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  std::atomic<bool> go_{false};
  std::vector<std::thread> threads_;
};

void ring_is_first_in_first_out_and_refuses_when_full() {
  for (const auto& [asked, got] :
       {std::pair<size_t, size_t>{0, 2}, {1, 2}, {2, 2}, {3, 4}, {1000, 1024}, {1024, 1024}}) {
    Ring<uint64_t> ring(asked);
    CHECK(ring.capacity() == got);
    uint64_t in = 0;
    uint64_t out = 0;
    uint64_t value = 0;
    CHECK(!ring.pop(value));
    while (ring.push(in)) ++in;
    CHECK(in == got);
    // Around the ring a few times, with every fill level on the way.
    std::mt19937 random(1);
    for (int i = 0; i < 20000; ++i) {
      if (random() % 2 == 0) {
        const bool fits = in - out < got;
        CHECK(ring.push(in) == fits);
        in += fits ? 1 : 0;
      } else {
        const bool any = in != out;
        CHECK(ring.pop(value) == any);
        if (any) CHECK(value == out++);
      }
    }
  }
}

// The ring tells each producer what it took: exactly that comes out, once, in each producer's
// order.
void ring_gives_exactly_what_it_took() {
  Ring<Record> ring(64);
  std::vector<std::vector<uint64_t>> taken(kProducers);
  std::vector<std::vector<uint64_t>> given(kProducers);
  std::atomic<uint32_t> running{kProducers};
  std::atomic<bool> refused{false};
  Threads producers(kProducers, [&](uint32_t producer) {
    for (uint64_t number = 0; number < kPerProducer; ++number) {
      if (ring.push(numbered(producer, number))) {
        taken[producer].push_back(number);
      } else {
        refused.store(true, std::memory_order_relaxed);
      }
    }
    running.fetch_sub(1, std::memory_order_release);
  });
  // Until the ring was full once, nothing is popped: the rest runs against a ring near its limit.
  while (!refused.load(std::memory_order_relaxed) && running.load() > 0) {
    std::this_thread::yield();
  }
  Record record;
  for (;;) {
    const bool last = running.load(std::memory_order_acquire) == 0;
    while (ring.pop(record)) {
      CHECK(record.group < kProducers);
      CHECK(same(record, numbered(record.group, record.sequence)));
      given[record.group].push_back(record.sequence);
    }
    if (last) break;
  }
  producers.join();
  CHECK(refused.load());
  CHECK(given == taken);
}

// Two drainers, which exclude each other: together they get each record once, each in order.
void recorder_drains_or_counts_every_record(size_t capacity) {
  Recorder recorder(capacity);
  const bool overflows = recorder.capacity() < kProducers * kPerProducer;
  std::atomic<uint32_t> running{kProducers};
  std::vector<std::vector<Record>> drained(2);
  Threads producers(kProducers, [&](uint32_t producer) {
    for (uint64_t number = 0; number < kPerProducer; ++number) {
      recorder.push(numbered(producer, number));
    }
    running.fetch_sub(1, std::memory_order_release);
  });
  Threads drainers(2, [&](uint32_t drainer) {
    while (overflows && recorder.dropped() == 0 && running.load() > 0) {
      std::this_thread::yield();
    }
    for (;;) {
      const bool last = running.load(std::memory_order_acquire) == 0;
      size_t before;
      do {
        before = drained[drainer].size();
        recorder.drain(50, drained[drainer]);
        CHECK(drained[drainer].size() - before <= 50);
      } while (drained[drainer].size() != before);
      if (last) break;
      std::this_thread::yield();
    }
  });
  producers.join();
  drainers.join();

  CHECK(recorder.recorded() + recorder.dropped() == kProducers * kPerProducer);
  CHECK((recorder.dropped() > 0) == overflows);
  CHECK(recorder.recorded() >= std::min(recorder.capacity(), size_t{kProducers * kPerProducer}));
  CHECK(drained[0].size() + drained[1].size() == recorder.recorded());
  CHECK(drain_all(recorder).empty());
  std::vector<std::vector<bool>> seen(kProducers, std::vector<bool>(kPerProducer));
  for (const std::vector<Record>& records : drained) {
    std::vector<uint64_t> next(kProducers, 0);
    for (const Record& record : records) {
      CHECK(record.group < kProducers && record.sequence < kPerProducer);
      CHECK(same(record, numbered(record.group, record.sequence)));
      CHECK(record.sequence >= next[record.group]);
      next[record.group] = record.sequence + 1;
      CHECK(!seen[record.group][record.sequence]);
      seen[record.group][record.sequence] = true;
    }
  }
}

// With nobody draining, producers still return, the oldest records stay, and the rest is counted.
void full_recorder_keeps_the_oldest_and_blocks_nobody() {
  Recorder recorder(256);
  Threads(kProducers, [&](uint32_t producer) {
    for (uint64_t number = 0; number < kPerProducer; ++number) {
      recorder.push(numbered(producer, number));
    }
  }).join();
  CHECK(recorder.recorded() == 256);
  CHECK(recorder.dropped() == kProducers * kPerProducer - 256);
  std::vector<Record> records;
  recorder.drain(0, records);
  CHECK(records.empty());
  recorder.drain(100, records);
  CHECK(records.size() == 100);
  recorder.drain(SIZE_MAX, records);
  CHECK(records.size() == 256);
  std::vector<uint64_t> next(kProducers, 0);
  for (const Record& record : records) CHECK(record.sequence == next[record.group]++);

  recorder.push(numbered(0, 7));
  CHECK(recorder.recorded() == 257);
  CHECK(drain_all(recorder).size() == 1);
}

Group named(uint32_t index, int64_t generation) {
  return {std::to_string(index) + "/" + std::to_string(generation),
          {index, generation},
          static_cast<int>(index),
          static_cast<int>(index) + 1};
}

// A reader sees a name with the ranks that were set with it, whatever is added and renamed
// meanwhile.
void groups_are_renamed_while_read() {
  constexpr int64_t kGenerations = 500;
  Recorder recorder(2);
  std::atomic<uint32_t> running{kProducers};
  Threads writers(kProducers, [&](uint32_t) {
    const uint32_t index = recorder.add_group({});
    for (int64_t generation = 0; generation < kGenerations; ++generation) {
      const Group group = named(index, generation);
      recorder.rename_group(index, group.name, group.ranks);
    }
    running.fetch_sub(1, std::memory_order_release);
  });
  std::map<uint32_t, int64_t> newest;
  while (running.load(std::memory_order_acquire) > 0) {
    const std::vector<Group> groups = recorder.groups();
    for (uint32_t index = 0; index < groups.size(); ++index) {
      if (groups[index].name.empty()) continue;
      CHECK(groups[index].ranks.size() == 2 && groups[index].ranks[0] == index);
      const int64_t generation = groups[index].ranks[1];
      CHECK(groups[index].name == named(index, generation).name);
      CHECK(generation >= newest[index]);
      newest[index] = generation;
    }
  }
  writers.join();
  const std::vector<Group> groups = recorder.groups();
  CHECK(groups.size() == kProducers);
  for (uint32_t index = 0; index < kProducers; ++index) {
    CHECK(groups[index].name == named(index, kGenerations - 1).name);
  }
}

void group_keeps_what_a_renaming_does_not_tell() {
  Recorder recorder(2);
  const uint32_t index = recorder.add_group(named(3, 1));
  recorder.rename_group(index, "again", {});
  const Group group = recorder.groups().at(index);
  CHECK(group.name == "again");
  CHECK((group.ranks == std::vector<int64_t>{3, 1}));
  CHECK(group.rank == 3 && group.size == 4);
  bool refused = false;
  try {
    recorder.rename_group(index + 1, "nobody", {});
  } catch (const std::out_of_range&) {
    refused = true;
  }
  CHECK(refused);
}

void completion_after_issue_and_before_it_are_the_same() {
  Recorder recorder(16);
  Lanes lanes(recorder);
  Table table(recorder, placing(lanes));
  table.issued(11, operation(numbered(0, 1)));
  CHECK(drain_all(recorder).empty());
  table.completed(11, 500);
  table.completed(12, 600);
  CHECK(recorder.recorded() == 1);
  table.issued(12, operation(numbered(0, 2)));
  // A key is free again once its operation is over.
  table.issued(11, operation(numbered(0, 3)));
  table.issued(12, operation(numbered(0, 4)));
  CHECK(recorder.recorded() == 2);
  table.completed(11, kUnknownTime);
  table.completed(12, 700);

  const std::vector<Record> records = drain_all(recorder);
  CHECK(records.size() == 4);
  const int64_t device_ns[] = {500, 600, kUnknownTime, 700};
  for (uint64_t i = 0; i < 4; ++i) {
    CHECK(completed_as(records[i], numbered(0, i + 1), device_ns[i]));
  }
}

void completions_of_nothing_are_forgotten() {
  Recorder recorder(1 << 15);
  Lanes lanes(recorder);
  Table table(recorder, placing(lanes));
  // An operation that was issued while nobody recorded: far more of them than are kept.
  for (uint64_t key = 0; key < 20000; ++key) table.completed(key, 5);
  CHECK(recorder.recorded() == 0);
  table.issued(3, operation(numbered(0, 1)));
  CHECK(recorder.recorded() == 0);
  table.completed(3, 7);
  CHECK(recorder.recorded() == 1);
}

void a_key_that_is_used_again_leaves_its_first_operation_incomplete() {
  Recorder recorder(16);
  Lanes lanes(recorder);
  Table table(recorder, placing(lanes));
  table.issued(1, operation(numbered(0, 1)));
  table.issued(1, operation(numbered(0, 2)));
  table.completed(1, 5);
  const std::vector<Record> records = drain_all(recorder);
  CHECK(records.size() == 2);
  CHECK(records[0].sequence == 1 && records[0].status == Status::kIncomplete);
  CHECK(completed_as(records[1], numbered(0, 2), 5));
}

void what_never_completes_is_recorded_at_the_end() {
  Recorder recorder(16);
  Lanes lanes(recorder);
  {
    Table table(recorder, placing(lanes));
    table.issued(1, operation(numbered(0, 1)));
    table.issued(2, operation(numbered(0, 2)));
    table.completed(2, 5);
    table.completed(3, 5);
    CHECK(recorder.recorded() == 1);
  }
  const std::vector<Record> records = drain_all(recorder);
  CHECK(records.size() == 2);
  CHECK(records[0].sequence == 2 && records[0].status == Status::kOk);
  Record expected = numbered(0, 1);
  expected.status = Status::kIncomplete;
  CHECK(same(records[1], expected));
}

// Issuing threads race with watchdogs; every tenth operation never completes.
void issues_and_completions_race() {
  constexpr uint32_t kPairs = 3;
  const auto completes = [](uint64_t number) { return number % 10 != 0; };
  Recorder recorder(kPairs * kPerProducer);
  Lanes lanes(recorder);
  // A watchdog is never far ahead of the thread that issues.
  constexpr uint64_t kAhead = 500;
  std::atomic<uint64_t> issued[kPairs] = {};
  {
    Table table(recorder, placing(lanes));
    Threads(2 * kPairs, [&](uint32_t i) {
      const uint32_t producer = i / 2;
      const bool issues = i % 2 == 0;
      for (uint64_t number = 0; number < kPerProducer; ++number) {
        const uint64_t key = number * kPairs + producer;
        if (issues) {
          table.issued(key, operation(numbered(producer, number)));
          issued[producer].store(number + 1);
          continue;
        }
        while (issued[producer].load() + kAhead < number) std::this_thread::yield();
        if (completes(number)) {
          table.completed(key, static_cast<int64_t>(7 * key));
        }
      }
    }).join();
    CHECK(recorder.recorded() == kPairs * kPerProducer * 9 / 10);
  }
  CHECK(recorder.recorded() == kPairs * kPerProducer);
  CHECK(recorder.dropped() == 0);
  std::vector<std::vector<bool>> seen(kPairs, std::vector<bool>(kPerProducer));
  for (const Record& record : drain_all(recorder)) {
    CHECK(record.group < kPairs && record.sequence < kPerProducer);
    CHECK(!seen[record.group][record.sequence]);
    seen[record.group][record.sequence] = true;
    Record expected = numbered(record.group, record.sequence);
    if (completes(record.sequence)) {
      const auto device_ns = static_cast<int64_t>(7 * (record.sequence * kPairs + record.group));
      CHECK(completed_as(record, expected, device_ns));
      continue;
    }
    expected.status = Status::kIncomplete;
    CHECK(same(record, expected));
  }
}

Record issued_at(uint64_t sequence, int64_t issue_ns, Op op = Op::kAllreduce, int32_t peer = -1) {
  Record record;
  record.sequence = sequence;
  record.issue_ns = issue_ns;
  record.op = op;
  record.peer = peer;
  return record;
}

std::vector<Record> placed(Recorder& recorder, Lanes& lanes, PlainOperation&& done,
                           int64_t device_ns) {
  lanes.finish(done, device_ns);
  return drain_all(recorder);
}

// Begins when its stream has come to it and the one before has ended, by the device's clock.
void operations_of_a_communicator_follow_each_other() {
  Recorder recorder(64);
  Lanes lanes(recorder);
  const auto end_of = [&](PlainOperation&& done, int64_t device_ns) {
    const std::vector<Record> records = placed(recorder, lanes, std::move(done), device_ns);
    CHECK(records.size() == 1 && records[0].device_ns == device_ns);
    return records[0].end_ns;
  };
  // Issued long before the device comes to it.
  CHECK(end_of(operation(issued_at(0, 10), 1000), 100) == 1100);
  CHECK(end_of(operation(issued_at(1, 20), 1050), 100) == 1200);
  CHECK(end_of(operation(issued_at(2, 30), 1500), 10) == 1510);
  // What was told too late pushes nothing that came before it.
  CHECK(end_of(operation(issued_at(4, 50), 1700), 100) == 1800);
  CHECK(end_of(operation(issued_at(3, 40), 1600), 50) == 1650);
  CHECK(end_of(operation(issued_at(5, 60), 1600), 50) == 1850);
  // Both ends of a transfer have a stream of their own.
  CHECK(end_of(operation(issued_at(0, 70, Op::kSend, 1), 1600), 300) == 1900);
  CHECK(end_of(operation(issued_at(1, 80, Op::kRecv, 2), 1600), 10) == 1610);
  CHECK(end_of(operation(issued_at(2, 80, Op::kRecv, 1), 1600), 10) == 1910);
}

void what_the_device_does_not_tell_stays_unknown() {
  Recorder recorder(64);
  Lanes lanes(recorder);
  std::vector<Record> records = placed(recorder, lanes, operation(issued_at(0, 10)), 100);
  CHECK(records[0].start_ns == 10 && records[0].end_ns == 110);
  CHECK((records[0].flags & kDeviceClock) == 0);
  records = placed(recorder, lanes, operation(issued_at(1, 20), 500), kUnknownTime);
  CHECK(records[0].start_ns == 500 && records[0].end_ns == kUnknownTime);
  CHECK((records[0].flags & kDeviceClock) != 0);
  // Whom nobody has timed holds up nobody.
  records = placed(recorder, lanes, operation(issued_at(2, 30), 600), 5);
  CHECK(records[0].end_ns == 605);
}

void parts_of_a_block_have_its_times() {
  Recorder recorder(64);
  Lanes lanes(recorder);
  PlainOperation block = operation(issued_at(3, 10, Op::kCoalesced), 50);
  for (int i = 0; i < 3; ++i) {
    Record part = issued_at(static_cast<uint64_t>(i), 5);
    part.bytes = 100 + i;
    part.flags = kInCoalescedGroup;
    block.parts.push_back(part);
  }
  const std::vector<Record> records = placed(recorder, lanes, std::move(block), 20);
  CHECK(records.size() == 4);
  for (int i = 0; i < 4; ++i) {
    CHECK(records[i].start_ns == 50 && records[i].end_ns == 70 && records[i].device_ns == 20);
    CHECK(((records[i].flags & kInCoalescedGroup) != 0) == (i < 3));
    if (i < 3) CHECK(records[i].bytes == 100 + i);
  }
}

class CountingGate final : public Gate {
 public:
  uint64_t enter(uint32_t, int64_t bytes) noexcept override {
    return bytes == 0 ? 0 : entered_.fetch_add(1) + 1;
  }
  void leave(uint64_t ticket) noexcept override {
    CHECK(ticket != 0 && ticket <= entered_.load());
    left_.fetch_add(1);
  }
  uint64_t entered() const { return entered_.load(); }
  uint64_t left() const { return left_.load(); }

 private:
  std::atomic<uint64_t> entered_{0};
  std::atomic<uint64_t> left_{0};
};

void a_gate_is_left_once() {
  static CountingGate gate;
  {
    const GateTicket nothing(&gate, 0, 0);
  }
  CHECK(gate.entered() == 0 && gate.left() == 0);
  {
    GateTicket first(&gate, 0, 1);
    CHECK(static_cast<bool>(first));
    GateTicket second(std::move(first));
    CHECK(!static_cast<bool>(first) && static_cast<bool>(second));
    second.leave();
    CHECK(gate.left() == 1);
    second.leave();
  }
  CHECK(gate.entered() == 1 && gate.left() == 1);
  {
    GateTicket held(&gate, 0, 1);
    held = GateTicket(&gate, 0, 2);
    CHECK(gate.left() == 2);
    held = GateTicket();
    CHECK(gate.left() == 3);
  }
  CHECK(gate.entered() == 3 && gate.left() == 3);
  // A forked process holds nothing that is its own.
  GateTicket parents(&gate, 0, 1);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    parents.leave();
    GateTicket own(&gate, 0, 1);
    own.leave();
    _exit(gate.left() == 4 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  parents.leave();
  CHECK(gate.left() == 4);
}

void clock_does_not_go_back() {
  int64_t before = monotonic_ns();
  CHECK(before > 0);
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = monotonic_ns();
    CHECK(now >= before);
    before = now;
  }
}

}  // namespace
}  // namespace crux

int main() {
  using namespace crux;
  clock_does_not_go_back();
  ring_is_first_in_first_out_and_refuses_when_full();
  ring_gives_exactly_what_it_took();
  recorder_drains_or_counts_every_record(2);
  recorder_drains_or_counts_every_record(512);
  recorder_drains_or_counts_every_record(kProducers * kPerProducer);
  full_recorder_keeps_the_oldest_and_blocks_nobody();
  groups_are_renamed_while_read();
  group_keeps_what_a_renaming_does_not_tell();
  completion_after_issue_and_before_it_are_the_same();
  completions_of_nothing_are_forgotten();
  a_key_that_is_used_again_leaves_its_first_operation_incomplete();
  what_never_completes_is_recorded_at_the_end();
  issues_and_completions_race();
  operations_of_a_communicator_follow_each_other();
  what_the_device_does_not_tell_stays_unknown();
  parts_of_a_block_have_its_times();
  a_gate_is_left_once();
  std::puts("recorder: ok");
  return 0;
}
