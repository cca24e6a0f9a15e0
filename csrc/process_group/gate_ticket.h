#pragma once

#include <cstdint>
#include <utility>

#include "../links/gate.h"
#include "fork_generation.h"

namespace crux {

// A ticket of the process's gate. It is left once, at the latest when it is destroyed, and only by
// the process that took it.
class GateTicket {
 public:
  GateTicket() = default;
  // May wait for a bounded time, so call it without the GIL.
  GateTicket(Gate* gate, uint32_t group, int64_t bytes) noexcept
      : gate_(gate), ticket_(gate->enter(group, bytes)), generation_(fork_generation()) {}
  ~GateTicket() { leave(); }

  GateTicket(GateTicket&& other) noexcept
      : gate_(other.gate_),
        ticket_(std::exchange(other.ticket_, 0)),
        generation_(other.generation_) {}
  GateTicket& operator=(GateTicket&& other) noexcept {
    if (this == &other) return *this;
    leave();
    gate_ = other.gate_;
    ticket_ = std::exchange(other.ticket_, 0);
    generation_ = other.generation_;
    return *this;
  }

  explicit operator bool() const noexcept { return ticket_ != 0; }

  void leave() noexcept {
    const uint64_t ticket = std::exchange(ticket_, 0);
    if (ticket != 0 && generation_ == fork_generation()) gate_->leave(ticket);
  }

 private:
  Gate* gate_ = nullptr;
  uint64_t ticket_ = 0;
  uint32_t generation_ = 0;
};

}  // namespace crux
