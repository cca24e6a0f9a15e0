// What one communicator moves over the network, and the communicators of this process.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>

#include "busy_time.h"
#include "crux_nccl_profiler.h"

namespace crux::nccl_profiler {

uint64_t now_ns() noexcept;

// Counters that NCCL's threads write without waiting for one another or for a reader.
class Counters {
 public:
  void add_collective() noexcept { add(collectives_); }
  void add_point_to_point() noexcept { add(point_to_point_); }
  void add_untracked() noexcept { add(untracked_); }

  // A send is in the network's hands from begin_send, where that returns true, to end_send.
  bool begin_send() noexcept;
  void end_send(uint64_t bytes) noexcept;
  // Those that are still there will never be reported done.
  void abandon_sends() noexcept;
  void add_receive(uint64_t bytes) noexcept;

  // For one reader at a time.
  void read(crux_nccl_traffic& out) noexcept;

 private:
  static void add(std::atomic<uint64_t>& counter, uint64_t by = 1) noexcept {
    counter.fetch_add(by, std::memory_order_relaxed);
  }

  std::atomic<uint64_t> collectives_{0}, point_to_point_{0}, sends_{0}, sent_bytes_{0},
      receives_{0}, received_bytes_{0}, untracked_{0};
  BusyTime sending_;
  BusyTimeReader reader_;
};

class Communicator {
 public:
  Communicator(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Counters counters;
  // Operations of NCCL's proxy that point here.
  std::atomic<int64_t> open_operations{0};

 private:
  friend class Registry;
  crux_nccl_communicator identity_{};
};

// The communicators that are open, and those that ended last.
class Registry {
 public:
  // Never destroyed: NCCL's threads may outlive the exit of main.
  static Registry& instance();

  // Null where there is no memory for it.
  Communicator* add(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept;
  // The communicator may be used no more, but by its operations that are still open.
  void end(Communicator* communicator) noexcept;

  Counters& forwarded() noexcept { return forwarded_; }
  BusyTime& sending() noexcept { return sending_; }

  int32_t read(crux_nccl_communicator* out, int32_t capacity) noexcept;
  void read_totals(crux_nccl_traffic& out) noexcept;
  void read_forwarded(crux_nccl_traffic& out) noexcept;

 private:
  // Ended communicators that are kept to be looked at.
  static constexpr int kEndedKept = 64;

  void forget_oldest_ended() noexcept;

  std::mutex mutex_;
  std::list<Communicator> communicators_;
  int ended_ = 0;
  crux_nccl_traffic forgotten_{};
  Counters forwarded_;
  BusyTime sending_;
  BusyTimeReader reader_;
};

}  // namespace crux::nccl_profiler
