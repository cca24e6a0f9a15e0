// What a DelegatingBackend passes on unrecorded: child groups, hooks, timeouts, devices, its end.
#include <utility>

#include "delegating_backend.h"

namespace crux {

DelegatingBackend::BackendPtr DelegatingBackend::wrap(const BackendPtr& child,
                                                      Device device) const {
  if (!child) return child;
  auto wrapper =
      c10::make_intrusive<DelegatingBackend>(name_, child->getRank(), child->getSize(), recorder_);
  for (const auto& [other, inner] : inners_) {
    if (inner.backend == at(device).backend) wrapper->add_inner(other, child);
  }
  return wrapper;
}

DelegatingBackend::BackendPtr DelegatingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::vector<int>& ranks,
                                                       const OptionsPtr& opts) {
  return wrap(default_inner()->split(store, ranks, opts), default_device());
}

DelegatingBackend::BackendPtr DelegatingBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const OptionsPtr& opts, const int& rank,
                                                       const int& size) {
  return wrap(default_inner()->merge(store, opts, rank, size), default_device());
}

DelegatingBackend::BackendPtr DelegatingBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const OptionsPtr& opts_override) {
  return wrap(default_inner()->shrink(ranks_to_exclude, shrink_flags, opts_override),
              default_device());
}

#ifdef CRUX_C10D_HAS_STARTTIMEESTIMATE
void DelegatingBackend::startTimeEstimate() { default_inner()->startTimeEstimate(); }
float DelegatingBackend::endTimeEstimate() { return default_inner()->endTimeEstimate(); }
#endif

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& backend : backends()) backend->setTimeout(timeout);
}

#ifdef CRUX_C10D_HAS_ADDEPHEMERALTIMEOUT
void DelegatingBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& backend : backends()) backend->addEphemeralTimeout(timeout);
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSRECONFIGURE
c10d::ReconfigureHandle DelegatingBackend::get_reconfigure_handle() const {
  return default_inner()->get_reconfigure_handle();
}

DelegatingBackend::WorkPtr DelegatingBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  auto work = default_inner()->reconfigure(opts);
  rank_ = default_inner()->getRank();
  size_ = default_inner()->getSize();
  return work;
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSWINDOW
c10::intrusive_ptr<c10d::Window> DelegatingBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  return default_inner()->new_window(tensor);
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSABORTHOOKS
void DelegatingBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  default_inner()->registerAbortHook(id, std::move(hook));
}

void DelegatingBackend::unregisterAbortHook(int64_t id) {
  default_inner()->unregisterAbortHook(id);
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
void DelegatingBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  default_inner()->registerCompletionHook(id, std::move(hook));
}

void DelegatingBackend::unregisterCompletionHook(int64_t id) {
  default_inner()->unregisterCompletionHook(id);
}
#endif

void DelegatingBackend::setSequenceNumberForGroup() {
#ifndef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  // Newer torch starts every group at 0 and warns of this call.
  for (const auto& backend : backends()) backend->setSequenceNumberForGroup();
#endif
}

uint64_t DelegatingBackend::getSequenceNumberForGroup() {
  return default_inner()->getSequenceNumberForGroup();
}

void DelegatingBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  default_inner()->registerOnCompletionHook(std::move(hook));
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  std::vector<int64_t> ranks;
  for (const auto& backend : backends()) {
    backend->setGroupUid(uid);
    try {
      const auto& members = backend->getBackendOptions()->global_ranks_in_group;
      ranks.assign(members.begin(), members.end());
    } catch (const c10::Error&) {
      // A backend without options does not tell its members: they count as the whole world.
    }
  }
  recorder_.rename_group(group_, uid, std::move(ranks));
}

#ifdef CRUX_C10D_HAS_SETBOUNDDEVICEID
void DelegatingBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  const auto found = device ? inners_.find(device->type()) : inners_.end();
  if (found != inners_.end()) found->second.backend->setBoundDeviceId(device);
}
#endif

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  const auto found = inners_.find(device.type());
  if (found == inners_.end()) return;
#ifndef CRUX_C10D_HAS_SETBOUNDDEVICEID
  found->second.backend->setBoundDeviceId(getBoundDeviceId());
#endif
  found->second.backend->eagerConnectSingleDevice(device);
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return default_inner()->allocateTensor(size, options);
}

void DelegatingBackend::abort() {
  for (const auto& backend : backends()) backend->abort();
}

void DelegatingBackend::shutdown() {
  for (const auto& backend : backends()) backend->shutdown();
}

}  // namespace crux
