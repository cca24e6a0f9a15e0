#include "communicator.h"

#include <chrono>
#include <cstring>
#include <new>

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

void Counters::begin_send(uint64_t bytes) noexcept {
  const uint64_t now = now_ns();
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  add(sent_bytes_, bytes);
  if (sending_.begin(now) && !Registry::instance().sending().begin(now)) sending_.end(now);
}

void Counters::end_send() noexcept {
  uint64_t open = in_flight_.load(std::memory_order_relaxed);
  do {
    if (open == 0) return;
  } while (!in_flight_.compare_exchange_weak(open, open - 1, std::memory_order_relaxed));
  const uint64_t now = now_ns();
  // It may have been abandoned meanwhile.
  if (sending_.end(now)) Registry::instance().sending().end(now);
  add(sends_);
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

std::array<std::atomic<Communicator*>, Registry::kMost> Registry::communicators_{};

Registry& Registry::instance() {
  static Registry& registry = *new Registry;
  return registry;
}

Registry::Registry() noexcept
    // Differs between processes of one host, whatever their numbers are.
    : salt_(((now_ns() ^ reinterpret_cast<uintptr_t>(this)) * 0x9e3779b97f4a7c15u) >> 32) {}

void* Registry::add(uint64_t id, const char* name, int nodes, int ranks, int rank) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t index = count_.load(std::memory_order_relaxed);
  if (index == kMost) return nullptr;
  auto* made = new (std::nothrow) Communicator(id, name, nodes, ranks, rank);
  if (made == nullptr) return nullptr;
  communicators_[index].store(made, std::memory_order_release);
  count_.store(index + 1, std::memory_order_release);
  return reinterpret_cast<void*>(salt_ << 32 | (index + 1));
}

Communicator* Registry::find(const void* context) const noexcept {
  const auto bits = reinterpret_cast<uintptr_t>(context);
  const uint64_t number = bits & UINT32_MAX;
  if (bits >> 32 != salt_ || number == 0 || number > kMost) return nullptr;
  return communicators_[number - 1].load(std::memory_order_acquire);
}

void Registry::end(Communicator* communicator) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (communicator->identity_.ended) return;
  communicator->counters.abandon_sends();
  communicator->identity_.ended = 1;
  if (++ended_shown_ > kEndedShown) hide_oldest_ended();
}

void Registry::hide_oldest_ended() noexcept {
  for (uint32_t i = 0; i < count_; ++i) {
    Communicator& one = *communicators_[i];
    // Of an aborted one NCCL may tell late.
    if (one.hidden_ || !one.identity_.ended || one.counters.sends_open()) continue;
    one.hidden_ = true;
    --ended_shown_;
    return;
  }
}

int32_t Registry::read(crux_nccl_communicator* out, int32_t capacity) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  int32_t found = 0;
  for (uint32_t i = 0; i < count_; ++i) {
    Communicator& one = *communicators_[i];
    if (one.hidden_) continue;
    if (found < capacity) {
      out[found] = one.identity_;
      one.counters.read(out[found].traffic);
    }
    ++found;
  }
  return found;
}

void Registry::read_totals(crux_nccl_traffic& out) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  forwarded_.read(out);
  crux_nccl_traffic part;
  for (uint32_t i = 0; i < count_; ++i) {
    (*communicators_[i]).counters.read(part);
    accumulate(out, part);
  }
  out.sending_ns = reader_.ns(sending_, now_ns());
}

void Registry::read_forwarded(crux_nccl_traffic& out) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  forwarded_.read(out);
}

}  // namespace crux::nccl_profiler
