#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "../links/device_gate.h"
#include "../links/gate.h"
#include "../process.h"

namespace crux {

// Leaves the process's gate for an operation that entered with a ticket, or by a passage when its
// device came to it. It is left once, at the latest when it is destroyed, and only by the
// process that took it.
class GateTicket {
 public:
  GateTicket() = default;
  // May wait for a bounded time, so call it without the GIL.
  GateTicket(Gate* gate, uint32_t group, int64_t bytes) noexcept
      : gate_(gate), ticket_(gate->enter(group, bytes)), generation_(fork_generation()) {}
  explicit GateTicket(DeviceGate::PassagePtr passage) noexcept
      : passage_(std::move(passage)), generation_(fork_generation()) {}
  ~GateTicket() { leave(); }

  GateTicket(GateTicket&& other) noexcept
      : gate_(other.gate_),
        ticket_(std::exchange(other.ticket_, 0)),
        passage_(std::move(other.passage_)),
        generation_(other.generation_) {}
  GateTicket& operator=(GateTicket&& other) noexcept {
    if (this == &other) return *this;
    leave();
    gate_ = other.gate_;
    ticket_ = std::exchange(other.ticket_, 0);
    passage_ = std::move(other.passage_);
    generation_ = other.generation_;
    return *this;
  }

  explicit operator bool() const noexcept { return ticket_ != 0 || passage_; }
  // True if the operation is in flight, so that others may wait for its end.
  bool entered() const noexcept { return passage_ ? passage_->entered() : ticket_ != 0; }

  void leave() noexcept {
    const uint64_t ticket = std::exchange(ticket_, 0);
    const DeviceGate::PassagePtr passage = std::move(passage_);
    if (generation_ != fork_generation()) return;
    if (ticket != 0) gate_->leave(ticket);
    if (passage) passage->leave();
  }

 private:
  Gate* gate_ = nullptr;
  uint64_t ticket_ = 0;
  DeviceGate::PassagePtr passage_;
  uint32_t generation_ = 0;
};

}  // namespace crux
