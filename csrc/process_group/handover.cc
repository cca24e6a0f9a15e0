#include "handover.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>

#include "cuda.h"
#include "python_threads.h"

namespace crux {
namespace {

constexpr const char* kCaptured = "operations were captured into a graph";

// A backend without sequence numbers has none to continue from.
uint64_t sequence_of(c10d::Backend& backend) noexcept {
  try {
    return backend.getSequenceNumberForGroup();
  } catch (const std::exception&) {
    return 0;
  }
}

struct Handovers {
  std::mutex mutex;
  std::vector<std::weak_ptr<Handover>> members;
};

Handovers& handovers() {
  // Never destroyed: a backend may outlive static objects.
  static auto& made = *new std::unique_ptr<Handovers>(std::make_unique<Handovers>());
  return *made;
}

}  // namespace

Handover::Handover(BackendPtr first, c10::DeviceType device, int64_t hook_id, Recorder& recorder,
                   uint32_t group)
    : recorder_(recorder),
      device_(device),
      hook_id_(hook_id),
      group_(group),
      tags_match_(first->getBackendName().rfind("nccl", 0) != 0),
      point_(std::make_shared<Inner>(std::move(first), device, hook_id, recorder)) {}

std::vector<std::shared_ptr<Handover>> Handover::all() {
  Handovers& known = handovers();
  std::vector<std::shared_ptr<Handover>> found;
  const std::lock_guard<std::mutex> lock(known.mutex);
  auto& members = known.members;
  members.erase(
      std::remove_if(members.begin(), members.end(), [](const auto& m) { return m.expired(); }),
      members.end());
  for (const auto& member : members) {
    auto alive = member.lock();
    if (alive && !alive->closed()) found.push_back(std::move(alive));
  }
  return found;
}

Handover::Ticket Handover::cleared(Ticket ticket, c10::Device device) {
  if (ticket.inner()) return ticket;
  const GilRelease release;
  if (device_ != c10::DeviceType::CPU) look_at(device);
  RECORD_USER_SCOPE("crux: wait for the handover");
  ticket.wait();
  return ticket;
}

void Handover::look_at(c10::Device device) noexcept {
  try {
    const c10::impl::VirtualGuardImpl guard(device_);
    if (!device.has_index()) device = guard.getDevice();
    waits_on_.store(device.index());
    if (is_capturing(guard.getStream(device))) refuse(kCaptured);
  } catch (const std::exception&) {
    // A device that can't be asked will not become idle for the handover either.
  }
}

Handover::Ticket Handover::transfer(int peer, int tag, bool sends, c10::Device device) {
  return cleared(point_.transfer({peer, tags_match_ ? tag : 0, sends}), device);
}

void Handover::captured(Ticket& ticket) {
  ticket.issued();
  if (!ticket.inner()->in_graph.exchange(true)) refuse(kCaptured);
}

Handover::BackendPtr Handover::backend() const {
  const auto inner = point_.current();
  TORCH_CHECK(inner != nullptr, "crux: the process group has ended");
  return inner->backend;
}

std::vector<std::shared_ptr<Inner>> Handover::inners() const {
  std::vector<std::shared_ptr<Inner>> all = point_.in_use();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retired_) all.push_back(retired_);
    all.insert(all.end(), kept_.begin(), kept_.end());
  }
  return all;
}

void Handover::apply(const Setting& setting) const {
  for (const auto& inner : inners()) setting(*inner->backend);
}

void Handover::configure(const std::string& name, Setting setting) {
  apply(setting);
  // Settings may hold Python objects: none is copied or destroyed while mutex_ is held.
  auto kept = std::make_shared<const Setting>(std::move(setting));
  const std::lock_guard<std::mutex> lock(mutex_);
  ++changes_;
  for (auto& [known, value] : settings_) {
    if (known == name) {
      kept.swap(value);
      return;
    }
  }
  settings_.emplace_back(name, kept);
}

void Handover::forget(const std::string& name) {
  std::shared_ptr<const Setting> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = settings_.begin(); it != settings_.end(); ++it) {
    if (it->first != name) continue;
    dropped = std::move(it->second);
    settings_.erase(it);
    return;
  }
}

template <typename Then>
auto Handover::configured(c10d::Backend& next, Then&& then) {
  for (;;) {
    Settings settings;
    uint64_t changes = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      settings = settings_;
      changes = changes_;
    }
    for (const auto& [name, setting] : settings) (*setting)(next);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (changes == changes_) return then();
  }
}

uint64_t Handover::sequence_number() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t number = retired_sequence_;
  for (const auto& inner : point_.in_use()) number += inner->backend->getSequenceNumberForGroup();
  return number;
}

void Handover::publish(StorePtr store, int64_t born) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    store_ = std::move(store);
    born_ = born;
  }
  Handovers& known = handovers();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.members.push_back(shared_from_this());
}

int64_t Handover::born() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return born_;
}

Handover::StorePtr Handover::store() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return store_;
}

void Handover::refuse(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(refusal_mutex_);
    refusal_ = reason;
  }
  point_.let_go();
}

std::string Handover::refusal() const {
  const std::lock_guard<std::mutex> lock(refusal_mutex_);
  return refusal_;
}

Counts Handover::arm(const BackendPtr& next, uint64_t margin, std::chrono::milliseconds limit) {
  const std::string refused = refusal();
  TORCH_CHECK(refused.empty(), refused);
  Counts hold;
  const auto arm = [&](std::shared_ptr<Inner> inner) {
    TORCH_CHECK(point_.arm(std::move(inner), margin, limit, &hold),
                "a handover is under way, or the process group has ended");
    return hold;
  };
  if (!next) return arm(nullptr);
  auto inner = as_inner(next);
  return configured(*next, [&] { return arm(std::move(inner)); });
}

std::shared_ptr<Inner> Handover::as_inner(const BackendPtr& next) const {
  auto inner = std::make_shared<Inner>(next, device_, hook_id_, recorder_);
  // Gloo's monitoredBarrier uses the numbers of its collectives as tags, and they start anew. They
  // must not match a message of the script.
  if (next->getBackendName() == "gloo") inner->tag_flip = 1 << 30;
  return inner;
}

void Handover::cancel() { const auto unused = point_.cancel(); }

bool Handover::replace(const BackendPtr& next) {
  TORCH_CHECK(next != nullptr, "crux: replace needs a backend");
  auto inner = as_inner(next);
  return configured(*next, [&] {
    std::shared_ptr<Inner> retired;
    if (!point_.replace(std::move(inner), &retired)) return false;
    // The operations that connected it were not the script's.
    retired_sequence_ -= sequence_of(*next);
    retire(std::move(retired));
    return true;
  });
}

bool Handover::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Inner> retired;
  if (!point_.finish(&retired)) return false;
  if (retired) retire(std::move(retired));
  return true;
}

void Handover::retire(std::shared_ptr<Inner> retired) {
  retired_sequence_ += sequence_of(*retired->backend);
  retired_ = std::move(retired);
}

void Handover::release() {
  std::shared_ptr<Inner> retired;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    retired = std::move(retired_);
    if (retired && retired->in_graph.load()) kept_.push_back(retired);
  }
  if (!retired || retired->in_graph.load()) return;
  retired->unwatch(kUnwatchPatience);
  retired->backend->shutdown();
  // The script may still wait for a handle, and those of nccl2 point to their backend.
  if (retired->completion != Completion::kHook) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  pointed_to_.push_back(retired->backend);
}

void Handover::close() {
  std::vector<std::shared_ptr<Inner>> all = point_.close();
  Settings settings;
  StorePtr store;
  std::vector<BackendPtr> pointed_to;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retired_) all.push_back(std::move(retired_));
    std::move(kept_.begin(), kept_.end(), std::back_inserter(all));
    kept_.clear();
    pointed_to.swap(pointed_to_);
    settings.swap(settings_);
    store = std::move(store_);
  }
  if (!pointed_to.empty()) {
    tear_down([dropped = std::move(pointed_to)]() mutable { dropped.clear(); });
  }
}

}  // namespace crux
