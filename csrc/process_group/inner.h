// An inner backend of a process group, and how the end of its operations is found.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "device_watch.h"
#include "operation.h"
#include "python_threads.h"
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
  Inner(c10::intrusive_ptr<c10d::Backend> made, c10::DeviceType device, int64_t id,
        Recorder& recorder)
      : backend(std::move(made)), hook_id(id), lanes(std::make_shared<Lanes>(recorder)) {
    // Gloo's futures complete with the operation, also on the accelerator's tensors that it takes.
    if (device == c10::DeviceType::CPU || backend->getBackendName() == "gloo") {
      completion = Completion::kFuture;
      return;
    }
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
    if (!backend->supportsCompletionHooks()) return;
    completion = Completion::kHook;
    table = std::make_shared<Table>(
        recorder, [lanes = lanes](DeviceOperation&& operation, int64_t device_ns) {
          DeviceWatch* const watch = operation.watch;
          watch->measured(std::move(operation), lanes, device_ns);
        });
    // Shared, because the watchdog may report after this backend is gone.
    backend->registerCompletionHook(hook_id, [table = table](const c10d::CompletionHookArgs& args) {
      const int64_t device_ns =
          args.duration_ms ? static_cast<int64_t>(*args.duration_ms * 1e6) : kUnknownTime;
      table->completed(args.completionKey, device_ns);
    });
#endif
  }
  // The tag that a message gets for the script's `tag`.
  int tag_of(int tag) const noexcept { return tag ^ tag_flip; }
  // The watch of the device that it issues on; null if its futures tell everything.
  DeviceWatch* watch(c10::Device device) const noexcept {
    if (completion == Completion::kFuture) return nullptr;
    DeviceWatch* found = last_watch_.load(std::memory_order_relaxed);
    if (found && found->serves(device)) return found;
    try {
      found = &DeviceWatch::of(device);
    } catch (const std::exception&) {
      return nullptr;
    }
    last_watch_.store(found, std::memory_order_relaxed);
    return found;
  }
  // A stream of its own, to issue operations on that wait there.
  c10::Stream aside(c10::Device device) {
    const std::lock_guard<std::mutex> lock(asides_mutex_);
    const auto found = asides_.find(device.index());
    if (found != asides_.end()) return found->second;
    const c10::Stream made = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
    return asides_.emplace(device.index(), made).first->second;
  }
  // To be called before the first operation that is timed, because timing costs the backend from
  // then on. Returns whether its handles will have durations.
  bool enable_timing() {
    std::call_once(timing_once_, [this] {
      try {
        backend->enableCollectivesTiming();
        has_durations_ = true;
      } catch (const std::exception&) {
        // A backend without durations reports ends in its other way.
      }
    });
    return has_durations_;
  }
  // To be called before the backend's communicators are destroyed, because their handles must not
  // be polled afterwards. Operations that take longer than `patience` lose their times.
  void unwatch(std::chrono::milliseconds patience) const noexcept {
    if (completion == Completion::kFuture) return;
    // Polling a handle may run Python callbacks.
    const GilRelease release;
    DeviceWatch::forget(this, patience);
  }

  // Runs on a thread where the backend's destructor can finish: see tear_down.
  ~Inner() {
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
    if (completion == Completion::kHook) {
      try {
        backend->unregisterCompletionHook(hook_id);
      } catch (const std::exception&) {
        // The inner backend is being destroyed too, and its hooks with it.
      }
    }
#endif
    unwatch(std::chrono::milliseconds(0));
    tear_down([backend = std::move(backend)]() mutable { backend.reset(); });
  }
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  c10::intrusive_ptr<c10d::Backend> backend;
  const int64_t hook_id;
  Completion completion = Completion::kPolled;
  const std::shared_ptr<Lanes> lanes;
  std::shared_ptr<Table> table;  // with Completion::kHook
  // True if a graph may run its operations again.
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
