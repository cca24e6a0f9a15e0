// What a DelegatingBackend passes on unrecorded: child groups, hooks, timeouts, devices, its end.
#include <utility>

#include "delegating_backend.h"

namespace crux {

void DelegatingBackend::publish(const c10::intrusive_ptr<c10d::Store>& store, int64_t born) {
  for (const auto& inners : switches()) inners->publish(store, born);
}

DelegatingBackend::BackendPtr DelegatingBackend::wrap(
    const BackendPtr& child, const c10::intrusive_ptr<c10d::Store>& store) const {
  if (!child) return child;
  auto wrapper =
      c10::make_intrusive<DelegatingBackend>(name_, child->getRank(), child->getSize(), recorder_);
  for (const auto& [device, inners] : inners_) {
    if (inners.get() == &default_switch()) wrapper->add_inner(device, child);
  }
  if (store) wrapper->publish(store, 0);
  return wrapper;
}

DelegatingBackend::BackendPtr DelegatingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::vector<int>& ranks,
                                                       const OptionsPtr& opts) {
  return wrap(default_inner()->split(store, ranks, opts), store);
}

DelegatingBackend::BackendPtr DelegatingBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const OptionsPtr& opts, const int& rank,
                                                       const int& size) {
  return wrap(default_inner()->merge(store, opts, rank, size), store);
}

DelegatingBackend::BackendPtr DelegatingBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const OptionsPtr& opts_override) {
  return wrap(default_inner()->shrink(ranks_to_exclude, shrink_flags, opts_override), nullptr);
}

#ifdef CRUX_C10D_HAS_STARTTIMEESTIMATE
void DelegatingBackend::startTimeEstimate() {
  default_inner()->startTimeEstimate();
  estimating_ = true;
}

float DelegatingBackend::endTimeEstimate() {
  estimating_ = false;
  return default_inner()->endTimeEstimate();
}
#endif

void DelegatingBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& inners : switches()) {
    inners->configure("timeout", [=](c10d::Backend& inner) { inner.setTimeout(timeout); });
  }
}

#ifdef CRUX_C10D_HAS_ADDEPHEMERALTIMEOUT
void DelegatingBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& inners : switches()) {
    inners->apply([=](c10d::Backend& inner) { inner.addEphemeralTimeout(timeout); });
  }
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSRECONFIGURE
c10d::ReconfigureHandle DelegatingBackend::get_reconfigure_handle() const {
  return default_inner()->get_reconfigure_handle();
}

DelegatingBackend::WorkPtr DelegatingBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  // Ranks that join have counted nothing of what the others did.
  for (const auto& inners : switches()) inners->refuse("the group's members were changed");
  auto work = default_inner()->reconfigure(opts);
  rank_ = default_inner()->getRank();
  size_ = default_inner()->getSize();
  return work;
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSWINDOW
c10::intrusive_ptr<c10d::Window> DelegatingBackend::new_window(
    const std::optional<at::Tensor>& tensor) {
  default_switch().refuse("memory windows are bound to the inner backend");
  return default_inner()->new_window(tensor);
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSABORTHOOKS
void DelegatingBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  default_switch().configure("abort hook " + std::to_string(id),
                             [=](c10d::Backend& inner) { inner.registerAbortHook(id, hook); });
}

void DelegatingBackend::unregisterAbortHook(int64_t id) {
  default_switch().forget("abort hook " + std::to_string(id));
  default_switch().apply([=](c10d::Backend& inner) { inner.unregisterAbortHook(id); });
}
#endif

#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
void DelegatingBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  default_switch().configure("completion hook " + std::to_string(id),
                             [=](c10d::Backend& inner) { inner.registerCompletionHook(id, hook); });
}

void DelegatingBackend::unregisterCompletionHook(int64_t id) {
  default_switch().forget("completion hook " + std::to_string(id));
  default_switch().apply([=](c10d::Backend& inner) { inner.unregisterCompletionHook(id); });
}
#endif

void DelegatingBackend::setSequenceNumberForGroup() {
#ifndef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  // Newer torch starts every group at 0 and warns of this call.
  for (const auto& inners : switches()) inners->backend()->setSequenceNumberForGroup();
#endif
}

uint64_t DelegatingBackend::getSequenceNumberForGroup() {
  return default_switch().sequence_number();
}

void DelegatingBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  default_switch().configure("on completion", [hook = std::move(hook)](c10d::Backend& inner) {
    auto copy = hook;
    inner.registerOnCompletionHook(std::move(copy));
  });
}

void DelegatingBackend::waitForPendingWorks() {
  default_switch().apply([](c10d::Backend& inner) { inner.waitForPendingWorks(); });
}

void DelegatingBackend::enableCollectivesTiming() {
  default_switch().configure("timing",
                             [](c10d::Backend& inner) { inner.enableCollectivesTiming(); });
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  std::vector<int64_t> ranks;
  for (const auto& inners : switches()) {
    inners->configure("uid", [=](c10d::Backend& inner) { inner.setGroupUid(uid); });
    try {
      const auto& members = inners->backend()->getBackendOptions()->global_ranks_in_group;
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
  if (found == inners_.end()) return;
  found->second->configure("device", [=](c10d::Backend& inner) { inner.setBoundDeviceId(device); });
}
#endif

void DelegatingBackend::eagerConnectSingleDevice(at::Device device) {
  const auto found = inners_.find(device.type());
  if (found == inners_.end()) return;
#ifndef CRUX_C10D_HAS_SETBOUNDDEVICEID
  const auto bound = getBoundDeviceId();
  found->second->configure("device", [=](c10d::Backend& inner) { inner.setBoundDeviceId(bound); });
#endif
  found->second->configure("connected",
                           [=](c10d::Backend& inner) { inner.eagerConnectSingleDevice(device); });
}

at::Tensor DelegatingBackend::allocateTensor(long size, at::TensorOptions options) {
  return default_inner()->allocateTensor(size, options);
}

void DelegatingBackend::abort() {
  for (const auto& inners : switches()) {
    inners->let_go();
    inners->apply([](c10d::Backend& inner) { inner.abort(); });
  }
}

void DelegatingBackend::shutdown() {
  for (const auto& inners : switches()) {
    inners->let_go();
    inners->apply([](c10d::Backend& inner) { inner.shutdown(); });
  }
}

}  // namespace crux
