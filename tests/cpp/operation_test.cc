// Operations of a device without torch: they meet their completions in any order and get their
// places in time, and the gate is left once.

#include "../../csrc/process_group/operation.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/process.h"
#include "../../csrc/process_group/gate_ticket.h"
#include "check.h"
#include "records.h"

namespace crux {
namespace {

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
  const Route* route(uint32_t, int64_t bytes) noexcept override {
    return bytes == 0 ? nullptr : &route_;
  }
  bool outranked(const Route&) noexcept override { return true; }
  uint64_t enter(uint32_t, int64_t bytes) noexcept override {
    return bytes == 0 ? 0 : entered_.fetch_add(1) + 1;
  }
  uint64_t try_enter(Attempt& attempt) noexcept override { return busy.load() ? 0 : pass(attempt); }
  uint64_t pass(Attempt&) noexcept override { return entered_.fetch_add(1) + 1; }
  void give_up(Attempt&) noexcept override { given_up_.fetch_add(1); }
  int64_t wait_ns() const noexcept override { return 1'000'000'000'000; }
  void leave(uint64_t ticket) noexcept override {
    CHECK(ticket != 0 && ticket <= entered_.load());
    left_.fetch_add(1);
  }
  uint64_t entered() const { return entered_.load(); }
  uint64_t left() const { return left_.load(); }
  uint64_t given_up() const { return given_up_.load(); }

  std::atomic<bool> busy{false};

 private:
  std::atomic<uint64_t> entered_{0};
  std::atomic<uint64_t> left_{0};
  std::atomic<uint64_t> given_up_{0};
  const Route route_;
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

void an_instant_is_known_ever_better() {
  std::mt19937 random(1);
  for (int trial = 0; trial < 1000; ++trial) {
    // Each bracket holds the truth somewhere: a host that looked seldom, or often.
    int64_t truth_ns = 1'000'000'000;
    const auto around = [&random](int64_t at_least) {
      return at_least + static_cast<int64_t>(random() % (1u << (random() % 24)));
    };
    Instant known = between(truth_ns - around(0), truth_ns + around(1));
    for (int bracket = 0; bracket < 20; ++bracket) {
      CHECK(std::abs(known.ns - truth_ns) <= known.error_ns);
      const int64_t later_ns = around(0);
      truth_ns += later_ns;
      const Instant predicted{known.ns + later_ns, known.error_ns};
      known = between(truth_ns - around(0), truth_ns + around(1), predicted);
      CHECK(known.error_ns <= predicted.error_ns);
    }
  }
  // Clocks that drifted apart by more than was thought possible.
  const Instant drifted = between(2000, 2100, Instant{1000, 10});
  CHECK(drifted.ns == 2000 && drifted.error_ns == 100);
}

template <typename Condition>
void until(Condition&& holds) {
  while (!holds()) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// The device of these tests is this thread, which writes to the words.
class Passages {
 public:
  DeviceGate::PassagePtr issue(bool holds, int32_t lane = 0) {
    auto made = owner_->make(gate, route_, {this, lane}, [] {});
    if (made) owner_->expect(made, holds);
    return made;
  }
  static void reach(DeviceGate::Passage& passage) {
    passage.words().reached.store(passage.number());
  }
  static bool is_open(DeviceGate::Passage& passage) {
    return passage.words().open.load() >= passage.number();
  }
  // Until the thread has looked at everything a few times.
  static void settle() {
    std::this_thread::sleep_for(std::chrono::nanoseconds(10 * DeviceGate::kPeriodNs));
  }
  void stop() { owner_->stop(); }

  CountingGate gate;

 private:
  std::vector<DeviceGate::Words> words_ = std::vector<DeviceGate::Words>(2);
  const Gate::Route route_;
  DeviceGate* const owner_ = new DeviceGate(words_.data(), words_.size());
};

void a_passage_enters_when_the_device_comes_to_it() {
  static auto* const at = new Passages;
  const auto passage = at->issue(true);
  Passages::settle();
  CHECK(!passage->entered() && !Passages::is_open(*passage) && at->gate.entered() == 0);
  at->gate.busy.store(true);
  Passages::reach(*passage);
  Passages::settle();
  CHECK(!passage->entered() && !Passages::is_open(*passage));
  at->gate.busy.store(false);
  until([&] { return Passages::is_open(*passage); });
  CHECK(at->gate.entered() == 1 && at->gate.left() == 0);
  passage->leave();
  passage->leave();
  CHECK(at->gate.left() == 1 && at->gate.given_up() == 0);
  // Who is not held enters whoever is there.
  at->gate.busy.store(true);
  const auto free = at->issue(false);
  Passages::reach(*free);
  until([&] { return free->entered(); });
}

void a_passage_waits_for_the_end_of_the_one_before_in_its_lane() {
  static auto* const at = new Passages;
  const auto first = at->issue(true, 1);
  const auto second = at->issue(true, 1);
  CHECK(at->issue(true, 2) == nullptr);  // no words are left
  Passages::reach(*first);
  Passages::reach(*second);
  until([&] { return first->entered(); });
  Passages::settle();
  CHECK(!second->entered() && !Passages::is_open(*second));
  // Its words are free, and it is in flight.
  const auto other = at->issue(true, 2);
  Passages::reach(*other);
  until([&] { return other->entered(); });
  first->leave();
  until([&] { return second->entered(); });
}

void what_is_given_up_is_let_go_and_keeps_its_words_until_the_device_came() {
  static auto* const at = new Passages;
  at->gate.busy.store(true);
  const auto unreached = at->issue(true, 1);
  const auto waiting = at->issue(true, 2);
  Passages::reach(*waiting);
  Passages::settle();
  waiting->leave();
  unreached->leave();
  CHECK(Passages::is_open(*waiting) && Passages::is_open(*unreached));
  CHECK(at->gate.given_up() == 2 && at->gate.entered() == 0);
  DeviceGate::PassagePtr next;
  until([&] { return (next = at->issue(true)) != nullptr; });
  CHECK(at->issue(true) == nullptr);
  Passages::reach(*unreached);
  DeviceGate::PassagePtr last;
  until([&] { return (last = at->issue(true)) != nullptr; });
  CHECK(!Passages::is_open(*last));
  at->stop();
  CHECK(Passages::is_open(*last) && Passages::is_open(*next));
  CHECK(at->issue(true) == nullptr);
}

}  // namespace
}  // namespace crux

int main() {
  using namespace crux;
  completion_after_issue_and_before_it_are_the_same();
  completions_of_nothing_are_forgotten();
  a_key_that_is_used_again_leaves_its_first_operation_incomplete();
  what_never_completes_is_recorded_at_the_end();
  issues_and_completions_race();
  operations_of_a_communicator_follow_each_other();
  what_the_device_does_not_tell_stays_unknown();
  parts_of_a_block_have_its_times();
  a_gate_is_left_once();
  a_passage_enters_when_the_device_comes_to_it();
  a_passage_waits_for_the_end_of_the_one_before_in_its_lane();
  what_is_given_up_is_let_go_and_keeps_its_words_until_the_device_came();
  an_instant_is_known_ever_better();
  std::puts("operation: ok");
  return 0;
}
