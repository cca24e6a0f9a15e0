// The recorder of one process. Every collective leaves one record, and nobody waits for that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "record.h"

namespace crux {

// A bounded queue that many threads push into without a lock and one thread drains.
//
// Each cell carries a ticket: cell i is free for position p when its ticket is p, and full when it
// is p + 1 (D. Vyukov's bounded MPMC queue). A push into a full ring fails immediately;
// the caller counts it.
template <typename T>
class Ring {
 public:
  // Rounded up to a power of two, at least 2.
  explicit Ring(size_t capacity) : mask_(round_up(capacity) - 1), cells_(new Cell[mask_ + 1]) {
    for (size_t i = 0; i <= mask_; ++i) cells_[i].ticket.store(i, std::memory_order_relaxed);
  }

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  size_t capacity() const noexcept { return mask_ + 1; }

  bool push(const T& value) noexcept {
    size_t position = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const size_t ticket = cell.ticket.load(std::memory_order_acquire);
      const auto distance = static_cast<intptr_t>(ticket) - static_cast<intptr_t>(position);
      if (distance == 0) {
        if (head_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          cell.value = value;
          cell.ticket.store(position + 1, std::memory_order_release);
          return true;
        }
      } else if (distance < 0) {
        return false;
      } else {
        position = head_.load(std::memory_order_relaxed);
      }
    }
  }

  // Only one thread at a time may pop.
  bool pop(T& out) noexcept {
    Cell& cell = cells_[tail_ & mask_];
    if (cell.ticket.load(std::memory_order_acquire) != tail_ + 1) return false;
    out = cell.value;
    cell.ticket.store(tail_ + mask_ + 1, std::memory_order_release);
    ++tail_;
    return true;
  }

 private:
  struct Cell {
    std::atomic<size_t> ticket;
    T value;
  };

  static size_t round_up(size_t n) noexcept {
    size_t power = 2;
    while (power < n) power *= 2;
    return power;
  }

  const size_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<size_t> head_{0};
  alignas(64) size_t tail_ = 0;
};

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
  void drain(size_t max, std::vector<Record>& out) {
    const std::lock_guard<std::mutex> lock(drain_mutex_);
    Record record;
    for (size_t n = 0; n < max && ring_.pop(record); ++n) out.push_back(record);
  }

  // Counts an operation that went into a graph. It runs when the graph is replayed, unrecorded.
  void pass_captured() noexcept { captured_.fetch_add(1, std::memory_order_relaxed); }

  // Returns the index of the group.
  uint32_t add_group(Group group) {
    const std::lock_guard<std::mutex> lock(groups_mutex_);
    groups_.push_back(std::move(group));
    return static_cast<uint32_t>(groups_.size() - 1);
  }
  void rename_group(uint32_t index, std::string name, std::vector<int64_t> ranks) {
    const std::lock_guard<std::mutex> lock(groups_mutex_);
    groups_.at(index).name = std::move(name);
    if (!ranks.empty()) groups_.at(index).ranks = std::move(ranks);
  }
  std::vector<Group> groups() const {
    const std::lock_guard<std::mutex> lock(groups_mutex_);
    return groups_;
  }

  bool enabled() const noexcept { return enabled_.load(std::memory_order_relaxed); }
  void set_enabled(bool enabled) noexcept { enabled_.store(enabled, std::memory_order_relaxed); }
  // True if operations that are issued from now on are timed. Otherwise only the call is recorded,
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
