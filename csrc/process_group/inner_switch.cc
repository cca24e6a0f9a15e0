#include "inner_switch.h"

#include <algorithm>
#include <iterator>

#include "gil_release.h"

namespace crux {
namespace {

struct Switches {
  std::mutex mutex;
  std::vector<std::weak_ptr<InnerSwitch>> members;
};

Switches& switches() {
  // Never destroyed: a backend may outlive static objects.
  static auto& made = *new std::unique_ptr<Switches>(std::make_unique<Switches>());
  return *made;
}

}  // namespace

InnerSwitch::InnerSwitch(BackendPtr first, c10::DeviceType device, int64_t hook_id,
                         Recorder& recorder, uint32_t group)
    : recorder_(recorder),
      device_(device),
      hook_id_(hook_id),
      group_(group),
      tags_match_(first->getBackendName().rfind("nccl", 0) != 0),
      point_(std::make_shared<Inner>(std::move(first), device, hook_id, recorder)) {}

std::vector<std::shared_ptr<InnerSwitch>> InnerSwitch::all() {
  Switches& known = switches();
  std::vector<std::shared_ptr<InnerSwitch>> found;
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

InnerSwitch::Ticket InnerSwitch::cleared(Ticket ticket) {
  if (!ticket.inner()) {
    const GilRelease release;
    ticket.wait();
  }
  return ticket;
}

InnerSwitch::Ticket InnerSwitch::transfer(int peer, int tag, bool sends) {
  return cleared(point_.transfer({peer, tags_match_ ? tag : 0, sends}));
}

void InnerSwitch::before_issue(const Ticket& ticket) {
  Inner* last = last_inner_.load();
  if (!last || last == ticket.inner()) return;
  const std::lock_guard<std::mutex> lock(last_mutex_);
  // Makes the current stream wait, because the operations of two communicators must begin in the
  // same order on all devices.
  if (last_) last_->synchronize();
  last_.reset();
  last_inner_.store(nullptr);
}

void InnerSwitch::issued(Ticket& ticket, const WorkPtr& work) {
  ticket.issued();
  if (device_ == c10::DeviceType::CPU || !work || !point_.armed()) return;
  const std::lock_guard<std::mutex> lock(last_mutex_);
  last_ = work;
  last_inner_.store(ticket.inner());
}

void InnerSwitch::captured(Ticket& ticket) {
  ticket.issued();
  if (!ticket.inner()->in_graph.exchange(true)) refuse("operations were captured into a graph");
}

InnerSwitch::BackendPtr InnerSwitch::backend() const {
  const auto inner = point_.current();
  TORCH_CHECK(inner != nullptr, "crux: the process group has ended");
  return inner->backend;
}

void InnerSwitch::forget_last(const Inner* inner) {
  WorkPtr last;
  const std::lock_guard<std::mutex> lock(last_mutex_);
  if (!inner || last_inner_.load() != inner) return;
  last = std::move(last_);
  last_inner_.store(nullptr);
}

std::vector<std::shared_ptr<Inner>> InnerSwitch::inners() const {
  std::vector<std::shared_ptr<Inner>> all = point_.in_use();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retired_) all.push_back(retired_);
    all.insert(all.end(), kept_.begin(), kept_.end());
  }
  return all;
}

void InnerSwitch::unwatch(std::chrono::milliseconds patience) const {
  for (const auto& inner : inners()) inner->unwatch(patience);
}

void InnerSwitch::apply(const Setting& setting) const {
  for (const auto& inner : inners()) setting(*inner->backend);
}

void InnerSwitch::configure(const std::string& name, Setting setting) {
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

void InnerSwitch::forget(const std::string& name) {
  std::shared_ptr<const Setting> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = settings_.begin(); it != settings_.end(); ++it) {
    if (it->first != name) continue;
    dropped = std::move(it->second);
    settings_.erase(it);
    return;
  }
}

uint64_t InnerSwitch::configure_like_current(c10d::Backend& next) const {
  Settings settings;
  uint64_t changes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    settings = settings_;
    changes = changes_;
  }
  for (const auto& [name, setting] : settings) (*setting)(next);
  return changes;
}

uint64_t InnerSwitch::sequence_number() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t number = retired_sequence_;
  for (const auto& inner : point_.in_use()) number += inner->backend->getSequenceNumberForGroup();
  return number;
}

void InnerSwitch::publish(StorePtr store, int64_t born) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    store_ = std::move(store);
    born_ = born;
  }
  Switches& known = switches();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.members.push_back(shared_from_this());
}

int64_t InnerSwitch::born() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return born_;
}

InnerSwitch::StorePtr InnerSwitch::store() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return store_;
}

void InnerSwitch::refuse(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    refusal_ = reason;
  }
  point_.let_go();
}

std::string InnerSwitch::refusal() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return refusal_;
}

Counts InnerSwitch::arm(const BackendPtr& next, uint64_t margin, std::chrono::milliseconds limit) {
  const std::string refused = refusal();
  TORCH_CHECK(refused.empty(), refused);
  TORCH_CHECK(next != nullptr, "crux: arm needs a backend");
  auto inner = std::make_shared<Inner>(next, device_, hook_id_, recorder_);
  // Gloo's monitoredBarrier uses the numbers of its collectives as tags, and they start anew. They
  // must not match a message of the script.
  if (next->getBackendName() == "gloo") inner->tag_flip = 1 << 30;
  // On a device, the next backend's first operation is ordered behind the last one seen here.
  if (device_ != c10::DeviceType::CPU) margin = std::max<uint64_t>(margin, 2);
  Counts hold;
  for (;;) {
    const uint64_t changes = configure_like_current(*next);
    const std::lock_guard<std::mutex> lock(mutex_);
    // From here on, settings reach the next backend too.
    if (changes != changes_) continue;
    TORCH_CHECK(point_.arm(std::move(inner), margin, limit, &hold),
                "a switch is under way, or the process group has ended");
    return hold;
  }
}

void InnerSwitch::cancel() {
  const auto unused = point_.cancel();
  forget_last(point_.current().get());
}

bool InnerSwitch::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Inner> retired;
  if (!point_.finish(&retired)) return false;
  if (!retired) return true;
  try {
    retired_sequence_ += retired->backend->getSequenceNumberForGroup();
  } catch (const std::exception&) {
    // A backend without sequence numbers has none to continue from.
  }
  retired_ = std::move(retired);
  return true;
}

void InnerSwitch::release() {
  std::shared_ptr<Inner> retired;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    retired = std::move(retired_);
    if (retired && retired->in_graph.load()) kept_.push_back(retired);
  }
  if (!retired) return;
  forget_last(retired.get());
  if (retired->in_graph.load()) return;
  retired->unwatch(kUnwatchPatience);
  retired->backend->shutdown();
}

void InnerSwitch::close() {
  std::vector<std::shared_ptr<Inner>> all = point_.close();
  Settings settings;
  StorePtr store;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retired_) all.push_back(std::move(retired_));
    std::move(kept_.begin(), kept_.end(), std::back_inserter(all));
    kept_.clear();
    settings.swap(settings_);
    store = std::move(store_);
  }
  for (const auto& inner : all) forget_last(inner.get());
}

}  // namespace crux
