// A group's members, its name and device, and the groups that are split from it.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "delegating_backend.h"

namespace crux {
namespace {

using Options = c10d::Backend::Options;

// Options for a child of `inner`, with the values of `asked`, which are another backend's. Null if
// this torch can't copy them; then the child gets its defaults.
template <typename Asked>
auto like(const Asked& asked, c10d::Backend& inner, int) -> decltype(asked.clone()) {
  c10::intrusive_ptr<Asked> own = inner.getBackendOptions();
  own = own->clone();
  own->timeout = asked.timeout;
  own->group_name = asked.group_name;
  own->group_desc = asked.group_desc;
  return own;
}

[[maybe_unused]] c10::intrusive_ptr<Options> like(const Options&, c10d::Backend&, long) {
  return nullptr;
}

// The members of a group's backend that c10d reads directly.
template <typename Backend>
auto follow(Backend& wrapper, Backend& inner, int)
    -> decltype(wrapper.setUsePgForSymmMemRendezvous(true)) {
  if (inner.getUsePgForSymmMemRendezvous()) wrapper.setUsePgForSymmMemRendezvous(true);
}

[[maybe_unused]] void follow(c10d::Backend&, c10d::Backend&, long) {}

}  // namespace

DelegatingBackend::BackendPtr DelegatingBackend::wrap(
    const Children& children, const c10::intrusive_ptr<c10d::Store>& store) const {
  c10::intrusive_ptr<DelegatingBackend> wrapper;
  for (const auto& [parent, child] : children) {
    if (!child) continue;
    if (!wrapper) {
      wrapper = c10::make_intrusive<DelegatingBackend>(name_, child->getRank(), child->getSize(),
                                                       log_.recorder());
      wrapper->set_options(options());
    }
    for (const auto& [device, inners] : inners_) {
      if (inners == parent) wrapper->add_inner(device, child);
    }
    follow(static_cast<c10d::Backend&>(*wrapper), *child, 0);
  }
  if (wrapper && store) wrapper->publish(store, 0);
  return wrapper;
}

template <typename Make>
DelegatingBackend::BackendPtr DelegatingBackend::derive(
    const c10::intrusive_ptr<c10d::Store>& store, const OptionsPtr& opts, Make&& make) {
  const bool named = opts && !opts->group_name.empty();
  if (named && opts->group_name == derived_name_) {
    return derived_ ? derived_->lock() : nullptr;
  }
  const auto all = handovers();
  Children children;
  for (const auto& inners : all) {
    const bool leads = inners.get() == &default_handover();
    const auto prefix = c10::DeviceTypeName(inners->device(), /*lower_case=*/true) + "/";
    c10::intrusive_ptr<c10d::Store> part = store;
    if (all.size() > 1 && store) part = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
    const OptionsPtr own = leads || !opts ? opts : like(*opts, *inners->backend(), 0);
    BackendPtr child = make(*inners, part, own);
    if (child && !own && opts) {
      child->setTimeout(opts->timeout);
      child->getBackendOptions()->group_name = opts->group_name;
    }
    children.emplace_back(inners, std::move(child));
  }
  BackendPtr wrapper = wrap(children, store);
  derived_name_ = named ? opts->group_name : "";
  derived_.reset();
  if (wrapper) derived_.emplace(wrapper);
  return wrapper;
}

auto DelegatingBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                              const std::vector<int>& ranks, const OptionsPtr& opts) -> BackendPtr {
  return derive(store, opts, [&](Handover& inners, const auto& part, const OptionsPtr& own) {
    // All ranks of the parent split the same inner backend, so this counts as a collective.
    Handover::Ticket ticket = inners.collective(inners.device());
    ticket.issued();
    return ticket.inner()->backend->split(part, ranks, own);
  });
}

auto DelegatingBackend::merge(const c10::intrusive_ptr<c10d::Store>& store, const OptionsPtr& opts,
                              const int& rank, const int& size) -> BackendPtr {
  return derive(store, opts, [&](Handover& inners, const auto& part, const OptionsPtr& own) {
    return inners.backend()->merge(part, own, rank, size);
  });
}

DelegatingBackend::BackendPtr DelegatingBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const OptionsPtr& opts_override) {
  for (const auto& inners : handovers()) {
    if (inners.get() != &default_handover()) continue;
    return wrap(
        {{inners, inners->backend()->shrink(ranks_to_exclude, shrink_flags, opts_override)}},
        nullptr);
  }
  return nullptr;
}

#ifdef CRUX_C10D_HAS_SUPPORTSRECONFIGURE
DelegatingBackend::WorkPtr DelegatingBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  // Ranks that join have not counted the operations of the others.
  for (const auto& inners : handovers()) inners->refuse("the group's members were changed");
  auto work = default_inner()->reconfigure(opts);
  rank_ = default_inner()->getRank();
  size_ = default_inner()->getSize();
  return work;
}
#endif

void DelegatingBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  default_handover().configure("on completion", [hook = std::move(hook)](c10d::Backend& inner) {
    auto copy = hook;
    inner.registerOnCompletionHook(std::move(copy));
  });
  // c10d asks this member whether there are hooks to wait for when the group ends.
  onCompletionHook_ = [](const std::shared_ptr<c10d::WorkInfo>&) {};
}

void DelegatingBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  std::vector<int64_t> ranks;
  for (const auto& inners : handovers()) {
    inners->configure("uid", [=](c10d::Backend& inner) { inner.setGroupUid(uid); });
    try {
      const auto& members = inners->backend()->getBackendOptions()->global_ranks_in_group;
      ranks.assign(members.begin(), members.end());
    } catch (const c10::Error&) {
      // A backend without options does not tell its members; they count as the whole world.
    }
  }
  log_.name(uid, std::move(ranks));
}

void DelegatingBackend::describe() {
  described_.store(true, std::memory_order_relaxed);
  const std::string desc = getGroupDesc();
  if (desc.empty()) return;
  for (const auto& inners : handovers()) {
    inners->configure("desc", [=](c10d::Backend& inner) { inner.setGroupDesc(desc); });
  }
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
  describe();
#ifndef CRUX_C10D_HAS_SETBOUNDDEVICEID
  const auto bound = getBoundDeviceId();
  found->second->configure("device", [=](c10d::Backend& inner) { inner.setBoundDeviceId(bound); });
#endif
  found->second->configure("connected",
                           [=](c10d::Backend& inner) { inner.eagerConnectSingleDevice(device); });
}

}  // namespace crux
