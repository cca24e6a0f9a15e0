// The thread that watches one device. It finds anchors for the device's clock, polls operations
// whose backend does not report their end (soon enough), and records measured ones. It never takes
// the GIL, and holds no lock while it destroys shared objects.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "../process.h"
#include "device_clock.h"
#include "gate_ticket.h"
#include "operation.h"

namespace crux {

class DeviceWatch;

struct DeviceOperation : Operation<DeviceClock::Mark> {
  DeviceWatch* watch = nullptr;
};

class DeviceWatch {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // An operation in flight. It is watched by its handle. If it has none and runs on the stream that
  // it was issued on, it is watched by a mark behind it.
  struct Watched {
    // forget() of this owner ends the watch, because a handle needs its backend.
    const void* owner = nullptr;
    WorkPtr work;
    // The kind of operation, and the bytes of its record.
    Op op = Op::kUnknown;
    int64_t bytes = 0;
    DeviceClock::Mark end;
    // Left as soon as the operation has ended. One that has entered is polled more often.
    GateTicket gated;
    // Recorded when it ends, with its duration. Null if others record it.
    std::unique_ptr<DeviceOperation> operation;
    std::shared_ptr<Lanes> lanes;
    // The operations of a lane end in order; see Lanes::lane_of.
    int32_t lane = 0;
    // Bytes that only the handle still keeps alive, as of the last look.
    int64_t held_bytes = 0;
  };

  // The watch of this process, never destroyed. A device without an index is the current one.
  // Throws c10::Error if there is no such type of device.
  static DeviceWatch& of(c10::Device device);
  // Ends the watch over all operations of `owner` when they have ended, or after `patience`. Polls
  // them a last time. Call it without the GIL.
  static void forget(const void* owner, std::chrono::milliseconds patience) noexcept;
  // To be called before Python ends: dropping a Python tensor later would end the thread.
  static void stop_all() noexcept;

  DeviceWatch(c10::Device device, uint32_t generation)
      : device_(device), generation_(generation), clock_(device.type()) {}
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  bool serves(c10::Device device) const noexcept { return device == device_; }

  // Called by the threads that issue operations:

  // True if an operation that is issued now goes into a graph, or counts as captured.
  bool is_capturing() const noexcept;
  // A mark on the current stream; empty if the device refuses.
  DeviceClock::Mark mark(int64_t now_ns) noexcept;
  void watch(Watched&& watched);
  // An operation with a ticket is in flight from now on. From any thread; quick.
  void hurry();
  // An operation whose duration is known. From any thread; quick.
  void measured(DeviceOperation&& operation, std::shared_ptr<Lanes> lanes, int64_t device_ns);
  // Drops handles whose operations have ended. They may hold Python tensors, so the calling thread
  // must be able to wait for the GIL.
  void drop_handles() noexcept;

 private:
  struct Measured {
    DeviceOperation operation;
    std::shared_ptr<Lanes> lanes;
    int64_t device_ns;
  };

  void wake();
  void run();
  void stop() noexcept;
  // Looks at everything once. Returns the time until the next look, zero if nothing is left to do.
  std::chrono::microseconds pass();
  // True if it has ended; then it is recorded and has left the gate.
  bool poll(Watched& watched);
  void poll_all(std::vector<WorkPtr>& ended);
  void let_go_of_handles(std::vector<WorkPtr>& dropped);
  bool is_watching(const void* owner);
  void forget_here(const void* owner);
  // Keeps the handles until a thread that may drop them does so.
  void lay_aside(std::vector<WorkPtr>&& handles);

  const c10::Device device_;
  const uint32_t generation_;
  DeviceClock clock_;

  std::mutex passing_;  // held throughout a pass, and before mutex_
  std::vector<Watched> watched_;
  std::chrono::steady_clock::time_point next_memory_look_{};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Watched> incoming_;
  std::vector<Measured> measured_;
  std::vector<WorkPtr> ended_;
  std::atomic<bool> any_ended_{false};
  bool started_ = false;
  bool idle_ = true;
  bool urgent_ = false;
  bool stopping_ = false;
};

}  // namespace crux
