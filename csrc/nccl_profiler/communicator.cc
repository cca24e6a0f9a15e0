#include "communicator.h"

#include <chrono>
#include <cstring>
#include <exception>

namespace crux::nccl_profiler {
namespace {

// All but sending_ns, which does not add up: communicators send at the same time.
void accumulate(crux_nccl_traffic& sum, const crux_nccl_traffic& part) {
  sum.collectives += part.collectives;
  sum.point_to_point += part.point_to_point;
  sum.sends += part.sends;
  sum.sent_bytes += part.sent_bytes;
  sum.receives += part.receives;
  sum.received_bytes += part.received_bytes;
  sum.untracked += part.untracked;
}

}  // namespace

uint64_t now_ns() noexcept {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

bool Counters::begin_send() noexcept {
  const uint64_t now = now_ns();
  if (!sending_.begin(now)) return false;
  if (Registry::instance().sending().begin(now)) return true;
  sending_.end(now);
  return false;
}

void Counters::end_send(uint64_t bytes) noexcept {
  const uint64_t now = now_ns();
  // It may have been abandoned meanwhile.
  if (sending_.end(now)) Registry::instance().sending().end(now);
  add(sends_);
  add(sent_bytes_, bytes);
}

void Counters::abandon_sends() noexcept {
  const uint64_t now = now_ns();
  for (uint64_t open = sending_.end_all(now); open != 0; --open) {
    Registry::instance().sending().end(now);
  }
}

void Counters::add_receive(uint64_t bytes) noexcept {
  add(receives_);
  add(received_bytes_, bytes);
}

void Counters::read(crux_nccl_traffic& out) noexcept {
  const auto value = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  out.collectives = value(collectives_);
  out.point_to_point = value(point_to_point_);
  out.sends = value(sends_);
  out.sent_bytes = value(sent_bytes_);
  out.receives = value(receives_);
  out.received_bytes = value(received_bytes_);
  out.untracked = value(untracked_);
  out.sending_ns = reader_.ns(sending_, now_ns());
}

Communicator::Communicator(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept {
  identity_.id = id;
  if (name != nullptr) std::strncpy(identity_.name, name, sizeof identity_.name - 1);
  identity_.nodes = nodes;
  identity_.ranks = ranks;
  identity_.rank = rank;
}

Registry& Registry::instance() {
  static Registry& registry = *new Registry;
  return registry;
}

Communicator* Registry::add(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept
    try {
  const std::lock_guard<std::mutex> lock(mutex_);
  return &communicators_.emplace_back(id, name, nodes, ranks, rank);
} catch (const std::exception&) {
  return nullptr;
}

void Registry::end(Communicator* communicator) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (communicator->identity_.ended) return;
  communicator->counters.abandon_sends();
  communicator->identity_.ended = 1;
  if (++ended_ > kEndedKept) forget_oldest_ended();
}

void Registry::forget_oldest_ended() noexcept {
  for (auto it = communicators_.begin(); it != communicators_.end(); ++it) {
    // An aborted one may leave operations that NCCL never stops, or stops late: it stays.
    if (!it->identity_.ended || it->open_operations.load(std::memory_order_acquire) != 0) continue;
    crux_nccl_traffic last;
    it->counters.read(last);
    accumulate(forgotten_, last);
    communicators_.erase(it);
    --ended_;
    return;
  }
}

int32_t Registry::read(crux_nccl_communicator* out, int32_t capacity) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  int32_t written = 0;
  for (auto it = communicators_.begin(); it != communicators_.end() && written < capacity; ++it) {
    out[written] = it->identity_;
    it->counters.read(out[written].traffic);
    ++written;
  }
  return static_cast<int32_t>(communicators_.size());
}

void Registry::read_totals(crux_nccl_traffic& out) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  out = forgotten_;
  crux_nccl_traffic part;
  for (Communicator& communicator : communicators_) {
    communicator.counters.read(part);
    accumulate(out, part);
  }
  forwarded_.read(part);
  accumulate(out, part);
  out.sending_ns = reader_.ns(sending_, now_ns());
}

void Registry::read_forwarded(crux_nccl_traffic& out) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  forwarded_.read(out);
}

}  // namespace crux::nccl_profiler
