// The recorder without torch: what many threads push is drained once or counted.

#include "../../csrc/process_group/recorder.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "records.h"

namespace crux {
namespace {

static_assert(std::is_trivially_copyable_v<Record>, "drain hands out bytes");
static_assert(std::is_nothrow_default_constructible_v<Record>);

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

}  // namespace
}  // namespace crux

int main() {
  using namespace crux;
  ring_is_first_in_first_out_and_refuses_when_full();
  ring_gives_exactly_what_it_took();
  recorder_drains_or_counts_every_record(2);
  recorder_drains_or_counts_every_record(512);
  recorder_drains_or_counts_every_record(kProducers * kPerProducer);
  full_recorder_keeps_the_oldest_and_blocks_nobody();
  groups_are_renamed_while_read();
  group_keeps_what_a_renaming_does_not_tell();
  std::puts("recorder: ok");
  return 0;
}
