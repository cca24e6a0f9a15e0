// A bounded queue that many threads push into without a lock and one thread drains.
//
// Each cell carries a ticket: cell i is free for position p when its ticket is p, and full when it
// is p + 1 (D. Vyukov's bounded MPMC queue). A push into a full ring fails immediately;
// the caller counts it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace crux {

inline constexpr size_t kCacheLine = 64;

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
  alignas(kCacheLine) std::atomic<size_t> head_{0};
  alignas(kCacheLine) size_t tail_ = 0;
};

}  // namespace crux
