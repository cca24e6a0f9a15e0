// What one communicator moves over the network, and the communicators of this process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "busy_time.h"
#include "crux_nccl_profiler.h"

namespace crux::nccl_profiler {

uint64_t now_ns() noexcept;

// Counters that NCCL's threads write without waiting for one another or for a reader.
class alignas(8) Counters {
 public:
  void add_collective() noexcept { add(collectives_); }
  void add_point_to_point() noexcept { add(point_to_point_); }
  void add_untracked() noexcept { add(untracked_); }

  // A send is in the network's hands from begin_send to end_send; an end without a begin is none.
  void begin_send(uint64_t bytes) noexcept;
  void end_send() noexcept;
  // The time of those that are still there ends: they may never be reported done.
  void abandon_sends() noexcept;
  bool sends_open() const noexcept { return in_flight_.load(std::memory_order_relaxed) != 0; }
  void add_receive(uint64_t bytes) noexcept;

  // For one reader at a time.
  void read(crux_nccl_traffic& out) noexcept;

 private:
  static void add(std::atomic<uint64_t>& counter, uint64_t by = 1) noexcept {
    counter.fetch_add(by, std::memory_order_relaxed);
  }

  std::atomic<uint64_t> collectives_{0}, point_to_point_{0}, sends_{0}, sent_bytes_{0},
      receives_{0}, received_bytes_{0}, untracked_{0}, in_flight_{0};
  BusyTime sending_;
  BusyTimeReader reader_;
};

class Communicator {
 public:
  Communicator(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Counters counters;

 private:
  friend class Registry;
  crux_nccl_communicator identity_{};
  bool hidden_ = false;
};

// All communicators of this process. None is ever freed: one that was aborted may be told of by
// NCCL's threads at any time later.
class Registry {
 public:
  // Never destroyed: NCCL's threads may outlive the exit of main.
  static Registry& instance();

  // What NCCL is given as the communicator's context; null where there is no room for it.
  void* add(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept;
  // Null where the context was given by another process, or is null. A context is no address, so
  // that another process's is told apart without looking there.
  Communicator* find(const void* context) const noexcept;
  void end(Communicator* communicator) noexcept;

  // Sends for other processes, and what belongs to no communicator.
  Counters& forwarded() noexcept { return forwarded_; }
  BusyTime& sending() noexcept { return sending_; }

  // Those that are open, and those that ended last.
  int32_t read(crux_nccl_communicator* out, int32_t capacity) noexcept;
  void read_totals(crux_nccl_traffic& out) noexcept;
  void read_forwarded(crux_nccl_traffic& out) noexcept;

 private:
  static constexpr uint32_t kMost = 1 << 16;
  // Ended communicators that are shown.
  static constexpr uint32_t kEndedShown = 64;

  Registry() noexcept;
  void hide_oldest_ended() noexcept;

  const uint64_t salt_;
  std::mutex mutex_;
  std::atomic<uint32_t> count_{0};
  uint32_t ended_shown_ = 0;
  Counters forwarded_;
  BusyTime sending_;
  BusyTimeReader reader_;
  static std::array<std::atomic<Communicator*>, kMost> communicators_;
};

}  // namespace crux::nccl_profiler
