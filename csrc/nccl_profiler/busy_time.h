// For how long at least one of many overlapping intervals was open, without a lock.
#pragma once

#include <atomic>
#include <cstdint>

namespace crux::nccl_profiler {

// Intervals begin and end on any threads. One word holds how many are open and the sum of (end −
// begin) of the spans in which some were, less the begin of the present one; so each change is one
// compare-and-swap, and a reader never sees one half of it.
class BusyTime {
 public:
  // Nanoseconds of one tick; sums wrap after 2^44 of them, 26 days of busy time.
  static constexpr uint64_t kTickNs = 128;
  static constexpr int kSumBits = 44;
  static constexpr uint64_t kSumMask = (uint64_t{1} << kSumBits) - 1;
  static constexpr uint64_t kMostOpen = (uint64_t{1} << (64 - kSumBits)) - 1;

  // False where too many intervals are open: then this one did not begin.
  bool begin(uint64_t now_ns) noexcept {
    uint64_t seen = word_.load(std::memory_order_relaxed), next;
    do {
      const uint64_t open = seen >> kSumBits;
      if (open == kMostOpen) return false;
      next = pack(open + 1, open == 0 ? seen - now_ns / kTickNs : seen);
    } while (!word_.compare_exchange_weak(seen, next, std::memory_order_relaxed));
    return true;
  }

  // False where none was open.
  bool end(uint64_t now_ns) noexcept {
    uint64_t seen = word_.load(std::memory_order_relaxed), next;
    do {
      const uint64_t open = seen >> kSumBits;
      if (open == 0) return false;
      next = pack(open - 1, open == 1 ? seen + now_ns / kTickNs : seen);
    } while (!word_.compare_exchange_weak(seen, next, std::memory_order_relaxed));
    return true;
  }

  // Ends all that are open, and returns how many that were.
  uint64_t end_all(uint64_t now_ns) noexcept {
    uint64_t seen = word_.load(std::memory_order_relaxed), next;
    do {
      if (seen >> kSumBits == 0) return 0;
      next = pack(0, seen + now_ns / kTickNs);
    } while (!word_.compare_exchange_weak(seen, next, std::memory_order_relaxed));
    return seen >> kSumBits;
  }

  // The sum so far in ticks, modulo 2^44, the open span included.
  uint64_t ticks(uint64_t now_ns) const noexcept {
    const uint64_t word = word_.load(std::memory_order_relaxed);
    return (word >> kSumBits == 0 ? word : word + now_ns / kTickNs) & kSumMask;
  }

 private:
  static uint64_t pack(uint64_t open, uint64_t sum) noexcept {
    return open << kSumBits | (sum & kSumMask);
  }

  std::atomic<uint64_t> word_{0};
};

// Makes a sum that only grows of what a BusyTime shows; for one reader at a time.
class BusyTimeReader {
 public:
  uint64_t ns(const BusyTime& busy, uint64_t now_ns) noexcept {
    const uint64_t ticks = busy.ticks(now_ns);
    const uint64_t grown = (ticks - last_) & BusyTime::kSumMask;
    // Threads read the clock before they take part, so the sum may step back by that much.
    if (grown < uint64_t{1} << (BusyTime::kSumBits - 1)) {
      total_ += grown;
      last_ = ticks;
    }
    return total_ * BusyTime::kTickNs;
  }

 private:
  uint64_t last_ = 0;
  uint64_t total_ = 0;
};

}  // namespace crux::nccl_profiler
