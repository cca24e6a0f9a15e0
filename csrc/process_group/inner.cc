#include "inner.h"

#include <utility>

#include "teardown.h"

namespace crux {

Inner::Inner(c10::intrusive_ptr<c10d::Backend> made, c10::DeviceType device, int64_t id,
             Recorder& recorder)
    : backend(std::move(made)), hook_id(id) {
  // Gloo's futures complete with the operation, also on the accelerator's tensors that it takes.
  const bool tells_by_future =
      device == c10::DeviceType::CPU || backend->getBackendName() == "gloo";
  if (tells_by_future) completion = Completion::kFuture;
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  if (!tells_by_future && backend->supportsCompletionHooks()) {
    completion = Completion::kHook;
    table = std::make_shared<CompletionTable>(recorder);
    backend->enableCollectivesTiming();
    // Shared, for the watchdog may report after this backend is gone.
    backend->registerCompletionHook(hook_id, [table = table](const c10d::CompletionHookArgs& args) {
      const int64_t device_ns =
          args.duration_ms ? static_cast<int64_t>(*args.duration_ms * 1e6) : kUnknownTime;
      table->completed(args.completionKey, device_ns);
    });
  }
#endif
}

Inner::~Inner() {
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  if (completion == Completion::kHook) {
    try {
      backend->unregisterCompletionHook(hook_id);
    } catch (const std::exception&) {
      // The inner backend is being torn down too; its hooks end with it.
    }
  }
#endif
  tear_down([backend = std::move(backend)]() mutable { backend.reset(); });
}

}  // namespace crux
