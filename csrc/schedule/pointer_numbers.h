#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace crux::schedule {

// Numbers of objects by their address: an open-addressing table, for millions of look-ups.
class PointerNumbers {
 public:
  static constexpr std::int64_t kNone = -1;

  // The number of `key`, kNone at first; to be used before the next call.
  std::int64_t& operator[](const void* key) {
    Slot* slot = find(key);
    if (slot->key == nullptr) {
      if (2 * (size_ + 1) > slots_.size()) {
        grow();
        slot = find(key);
      }
      slot->key = key;
      ++size_;
    }
    return slot->number;
  }

 private:
  struct Slot {
    const void* key = nullptr;
    std::int64_t number = kNone;
  };

  Slot* find(const void* key) {
    // Fibonacci hashing: addresses are multiples of 16, so their low bits say nothing.
    const std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(key) * 0x9E3779B97F4A7C15u;
    for (std::size_t at = mixed >> 32;; ++at) {
      Slot& slot = slots_[at & (slots_.size() - 1)];
      if (slot.key == key || slot.key == nullptr) return &slot;
    }
  }

  void grow() {
    const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
    for (const Slot& slot : old) {
      if (slot.key != nullptr) *find(slot.key) = slot;
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);
  std::size_t size_ = 0;
};

}  // namespace crux::schedule
