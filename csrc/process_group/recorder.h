// The recorder of one process. Every collective leaves one record, and nobody waits for that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "record.h"
#include "ring.h"

namespace crux {

// A process group as records refer to it by index.
struct Group {
  std::string name;
  std::vector<int64_t> ranks;  // global ranks in group order; empty: the whole world
  int rank = 0;                // this process's rank in the group
  int size = 0;
};

class Recorder {
 public:
  explicit Recorder(size_t capacity) : ring_(capacity) {}

  // Called where collectives are issued and completed, from any thread, with or without the GIL.
  void push(const Record& record) noexcept {
    if (ring_.push(record)) {
      recorded_.fetch_add(1, std::memory_order_relaxed);
    } else {
      dropped_.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Appends the oldest records, at most `max`, to `out`. Only one thread drains at a time.
  void drain(size_t max, std::vector<Record>& out);

  // Counts an operation that went into a graph. It runs when the graph is replayed, unrecorded.
  void pass_captured() noexcept { captured_.fetch_add(1, std::memory_order_relaxed); }

  uint32_t add_group(Group group);
  void rename_group(uint32_t index, std::string name, std::vector<int64_t> ranks);
  std::vector<Group> groups() const;

  bool enabled() const noexcept { return enabled_.load(std::memory_order_relaxed); }
  void set_enabled(bool enabled) noexcept { enabled_.store(enabled, std::memory_order_relaxed); }
  // Whether operations that are issued from now on are timed. If not, only the call is recorded,
  // which costs a fraction.
  bool timing() const noexcept { return timing_.load(std::memory_order_relaxed); }
  void set_timing(bool timing) noexcept { timing_.store(timing, std::memory_order_relaxed); }

  uint64_t recorded() const noexcept { return recorded_.load(std::memory_order_relaxed); }
  uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }
  uint64_t captured() const noexcept { return captured_.load(std::memory_order_relaxed); }
  size_t capacity() const noexcept { return ring_.capacity(); }

 private:
  Ring<Record> ring_;
  std::atomic<bool> enabled_{true};
  std::atomic<bool> timing_{true};
  std::atomic<uint64_t> recorded_{0};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> captured_{0};
  std::mutex drain_mutex_;
  mutable std::mutex groups_mutex_;
  std::vector<Group> groups_;
};

}  // namespace crux
