// Where an operation may have to wait for a host's links before it is issued. This is the interface
// that the backend calls; link_gate.h implements it.
#pragma once

#include <atomic>
#include <cstdint>

namespace crux {

class Gate {
 public:
  // Before an operation of the group (its index in the recorder) is issued; without the GIL, from
  // any thread. May wait, for a bounded time. `bytes` is what the operation moves, negative if that
  // is unknown. An operation that moves nothing (a barrier) passes. Don't call it for receives,
  // which are posted long before their data comes and would hold idle links, nor during capture.
  // Returns the ticket for leave(); 0: there is nothing to leave.
  virtual uint64_t enter(uint32_t group, int64_t bytes) noexcept = 0;
  // The operation has ended on this rank, failed, or was never issued. From any thread, once for
  // each ticket, on the gate that gave it.
  virtual void leave(uint64_t ticket) noexcept = 0;

 protected:
  ~Gate() = default;
};

namespace internal {
inline std::atomic<Gate*> installed_gate{nullptr};
}  // namespace internal

// The gate of this process, or null. A gate is never destroyed, because a ticket can be left after
// another gate, or none, has been set.
inline Gate* gate() noexcept { return internal::installed_gate.load(std::memory_order_acquire); }
inline void set_gate(Gate* gate) noexcept {
  internal::installed_gate.store(gate, std::memory_order_release);
}

}  // namespace crux
