// An inner backend of a process group, and how the end of its operations is found.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "completion_table.h"
#include "device_watch.h"
#include "operation.h"
#include "recorder.h"

namespace crux {

enum class Completion {
  kFuture,  // the handle's future, which completes with the operation
  kHook,    // the backend's completion hook, with a duration
  kPolled,  // the handle, polled until it has ended (and has a duration, if its backend times)
};

struct Inner {
  using Table = CompletionTable<DeviceOperation>;

  // `hook_id` names the recorder's completion hook, if the backend has such hooks.
  Inner(c10::intrusive_ptr<c10d::Backend> backend, c10::DeviceType device, int64_t hook_id,
        Recorder& recorder);
  // The tag that a message gets for the script's `tag`.
  int tag_of(int tag) const noexcept { return tag ^ tag_flip; }
  // The watch of the device that it issues on; null if its futures tell everything.
  DeviceWatch* watch(c10::Device device) const noexcept;
  // A stream of its own, to issue operations on that wait there.
  c10::Stream aside(c10::Device device);
  // To be called before the first operation that is timed, because timing costs the backend from
  // then on. Returns whether its handles will have durations.
  bool enable_timing();
  // To be called before the backend's communicators are destroyed, because their handles must not
  // be polled afterwards. Operations that take longer than `patience` lose their times.
  void unwatch(std::chrono::milliseconds patience) const noexcept;

  // Runs on a thread where the backend's destructor can finish: see teardown.h.
  ~Inner();
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  c10::intrusive_ptr<c10d::Backend> backend;
  const int64_t hook_id;
  Completion completion = Completion::kPolled;
  const std::shared_ptr<Lanes> lanes;
  std::shared_ptr<Table> table;  // with Completion::kHook
  // Whether a graph may run its operations again.
  std::atomic<bool> in_graph{false};
  int tag_flip = 0;

 private:
  std::once_flag timing_once_;
  bool has_durations_ = false;
  mutable std::atomic<DeviceWatch*> last_watch_{nullptr};
  std::mutex asides_mutex_;
  std::map<c10::DeviceIndex, c10::Stream> asides_;
};

}  // namespace crux
