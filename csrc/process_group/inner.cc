#include "inner.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "gil_release.h"
#include "teardown.h"

namespace crux {

Inner::Inner(c10::intrusive_ptr<c10d::Backend> made, c10::DeviceType device, int64_t id,
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
  table = std::make_shared<Table>(recorder,
                                  [lanes = lanes](DeviceOperation&& operation, int64_t device_ns) {
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

bool Inner::enable_timing() {
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

c10::Stream Inner::aside(c10::Device device) {
  const std::lock_guard<std::mutex> lock(asides_mutex_);
  const auto found = asides_.find(device.index());
  if (found != asides_.end()) return found->second;
  const c10::Stream made = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  return asides_.emplace(device.index(), made).first->second;
}

DeviceWatch* Inner::watch(c10::Device device) const noexcept {
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

void Inner::unwatch(std::chrono::milliseconds patience) const noexcept {
  if (completion == Completion::kFuture) return;
  // Polling a handle may run Python callbacks.
  const GilRelease release;
  DeviceWatch::forget(this, patience);
}

Inner::~Inner() {
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

}  // namespace crux
