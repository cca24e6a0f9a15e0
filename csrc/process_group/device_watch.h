// The thread that looks after one device: it gives its clock anchors, finds out when operations
// have ended whose backend does not say so, or not soon enough, and turns measured ones into
// records. It never takes the GIL and holds no lock while it destroys what others may be part of.
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

#include "device_clock.h"
#include "fork_generation.h"
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

  // An operation in flight that is watched by its handle or, where it runs on the stream that it
  // was issued on and has no handle, by a mark behind it.
  struct Watched {
    // Whose forget() ends the watch: a backend must be there while its handles are asked.
    const void* owner = nullptr;
    WorkPtr work;
    // What it is a handle of, and that record's bytes.
    Op op = Op::kUnknown;
    int64_t bytes = 0;
    DeviceClock::Mark end;
    // Left as soon as the operation has ended; its passage makes the watch a close one.
    GateTicket gated;
    // Recorded then, with its duration. Null where others record it.
    std::unique_ptr<DeviceOperation> operation;
    std::shared_ptr<Lanes> lanes;
    // The operations of a lane end in order; see Lanes::lane_of.
    int32_t lane = 0;
    // Bytes that only the handle keeps alive any more, as found last.
    int64_t held_bytes = 0;
  };

  // Of this process, never destroyed; a device without an index is the current one. Throws
  // c10::Error where there is no such type of device.
  static DeviceWatch& of(c10::Device device);
  // Ends the watch over all operations of `owner`, which are asked a last time: when they have all
  // ended, or after `patience`. Call it without the GIL.
  static void forget(const void* owner, std::chrono::milliseconds patience) noexcept;
  // Before Python ends: from then on, a tensor of its that is dropped here would end the thread.
  static void stop_all() noexcept;

  DeviceWatch(c10::Device device, uint32_t generation)
      : device_(device), generation_(generation), clock_(device.type()) {}
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  bool serves(c10::Device device) const noexcept { return device == device_; }

  // For the threads that issue operations --------------------------------------------------------

  // Whether what is issued now goes into a graph, or is taken for that.
  bool is_capturing() const noexcept;
  // A mark on the current stream; an empty one where the device refuses.
  DeviceClock::Mark mark(int64_t now_ns) noexcept;
  void watch(Watched&& watched);
  // An operation whose duration is known. From any thread; quick.
  void measured(DeviceOperation&& operation, std::shared_ptr<Lanes> lanes, int64_t device_ns);
  // Drops handles whose operations have ended. They may hold tensors of Python's, which only a
  // thread may destroy that can wait for the GIL.
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
  // One look at everything. Returns the time until the next, zero where nothing is left to do.
  std::chrono::microseconds pass();
  // Whether it has ended; then it is recorded and its ticket is left.
  bool poll(Watched& watched);
  void poll_all(std::vector<WorkPtr>& ended);
  void let_go_of_handles(std::vector<WorkPtr>& dropped);
  bool is_watching(const void* owner);
  void forget_here(const void* owner);
  // Keeps the handles until a thread that may drop them comes by.
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
