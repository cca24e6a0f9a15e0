#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace crux::fluid {

// A binary heap with at most one time for each id; equal times come out in the order of ids.
class EventQueue {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double next_time() const { return heap_.empty() ? kNever : heap_.front().time; }
  std::uint32_t next_id() const { return heap_.front().id; }

  void grow(std::uint32_t id) {
    if (id >= position_.size()) position_.resize(id + 1, kAbsent);
  }

  // Sets the time of id; kNever takes it out.
  void set(std::uint32_t id, double time) {
    if (time == kNever) {
      remove(id);
      return;
    }
    std::uint32_t at = position_[id];
    if (at == kAbsent) {
      at = static_cast<std::uint32_t>(heap_.size());
      heap_.push_back({time, id});
      rise(at, {time, id});
    } else {
      place({time, id}, at);
    }
  }

  void remove(std::uint32_t id) {
    const std::uint32_t at = position_[id];
    if (at == kAbsent) return;
    position_[id] = kAbsent;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (last.id != id) place(last, at);
  }

 private:
  struct Entry {
    double time;
    std::uint32_t id;
    bool operator<(const Entry& other) const {
      return time != other.time ? time < other.time : id < other.id;
    }
  };
  static constexpr std::uint32_t kAbsent = UINT32_MAX;

  void place(Entry entry, std::uint32_t at) {
    if (at > 0 && entry < heap_[(at - 1) / 2]) {
      rise(at, entry);
    } else {
      sink(at, entry);
    }
  }

  void rise(std::uint32_t at, Entry entry) {
    while (at > 0) {
      const std::uint32_t parent = (at - 1) / 2;
      if (!(entry < heap_[parent])) break;
      put(at, heap_[parent]);
      at = parent;
    }
    put(at, entry);
  }

  void sink(std::uint32_t at, Entry entry) {
    const auto size = static_cast<std::uint32_t>(heap_.size());
    for (std::uint32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < entry)) break;
      put(at, heap_[child]);
      at = child;
    }
    put(at, entry);
  }

  void put(std::uint32_t at, Entry entry) {
    heap_[at] = entry;
    position_[entry.id] = at;
  }

  std::vector<Entry> heap_;
  std::vector<std::uint32_t> position_;
};

}  // namespace crux::fluid
