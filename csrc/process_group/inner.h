// An inner backend of a process group, and who says that its operations have ended.
#pragma once

#include <atomic>
#include <chrono>
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
  kPolled,  // the handle, which is asked until it has a duration, if its backend times
};

struct Inner {
  using Table = CompletionTable<DeviceOperation>;

  // `hook_id` names the completion hook of the one who records, where the backend has such hooks.
  Inner(c10::intrusive_ptr<c10d::Backend> backend, c10::DeviceType device, int64_t hook_id,
        Recorder& recorder);
  // The tag under which a message travels that the script gave `tag`.
  int tag_of(int tag) const noexcept { return tag ^ tag_flip; }
  // Who looks after the device on which it issues; null where its futures tell all there is.
  DeviceWatch* watch(c10::Device device) const noexcept;
  // Before the first operation that is to be timed: a backend that times pays for it from then on.
  // Returns whether its handles will have durations.
  bool enable_timing();
  // Before the backend's communicators are destroyed: their handles must not be asked any more.
  // Operations in flight lose their times where they take longer than `patience`.
  void unwatch(std::chrono::milliseconds patience) const noexcept;

  // Runs where the backend's own destructor can end: see teardown.h.
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
};

}  // namespace crux
