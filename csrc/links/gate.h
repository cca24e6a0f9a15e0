// The gate where an operation may have to wait before it begins: for the PCIe links of a host, not
// for those of the network. This is the interface that the backend calls; link_gate.h implements
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace crux {

class LinkTable;

class Gate {
 public:
  // The links that an operation crosses, ordered by name. Never freed.
  using Route = std::vector<LinkTable*>;

  // An operation that has not entered yet.
  struct Attempt {
    const Route* route = nullptr;
    LinkTable* marked = nullptr;  // where it waits
    int64_t begun_ns = 0;         // of its wait; 0: it has not waited
  };

  // The route of an operation of the group (its index in the recorder); null if it need not enter.
  // `bytes` is what the operation moves, negative if that is unknown. An operation that moves
  // nothing (a barrier) does not enter. Don't ask for receives, which are posted long before their
  // data comes and would hold idle links, nor during capture. From any thread.
  virtual const Route* route(uint32_t group, int64_t bytes) noexcept = 0;
  // True if a job that is on the route now goes first, so that an operation may have to wait.
  virtual bool outranked(const Route& route) noexcept = 0;

  // Enters, and waits for a bounded time. Call it without the GIL, from any thread. Returns the
  // ticket for leave(); 0: there is nothing to leave.
  virtual uint64_t enter(uint32_t group, int64_t bytes) noexcept = 0;
  // The same without waiting: 0 if the operation has to wait, so ask again soon. One thread at a
  // time may ask for an attempt. After the bound it enters.
  virtual uint64_t try_enter(Attempt& attempt) noexcept = 0;
  // Enters, whoever is in the way.
  virtual uint64_t pass(Attempt& attempt) noexcept = 0;
  // The attempt will not enter.
  virtual void give_up(Attempt& attempt) noexcept = 0;
  // The operation has ended on this rank, failed, or was never issued. From any thread, once for
  // each ticket, on the gate that gave it.
  virtual void leave(uint64_t ticket) noexcept = 0;
  // The longest that an operation waits.
  virtual int64_t wait_ns() const noexcept = 0;

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
