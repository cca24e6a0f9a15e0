// Records the operations of one process group as they are issued, and when they end. Whoever issues
// them says so: a DelegatingBackend, or torch's hooks around an operation (hooked_group.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "gate_ticket.h"
#include "inner.h"
#include "recorder.h"

namespace crux {

// An operation that is being issued.
struct Call {
  Op op;
  int64_t bytes;
  // The caller waits for it immediately.
  bool synchronous = false;
  int peer = -1;
  // Whether the inner handle has a future. If it has none, the end is when wait() returns.
  bool has_future = true;
  int tag = 0;

  bool is_transfer() const noexcept { return op == Op::kSend || op == Op::kRecv; }
  // Whether it waits for the host's links: a receive is posted long before its data comes, and a
  // barrier moves nothing.
  bool is_gated() const noexcept {
    return op != Op::kRecv && op != Op::kBarrier && op != Op::kCoalesced;
  }
};

// Bytes of a record.
int64_t bytes_of(const at::Tensor& tensor);
int64_t bytes_of(const std::vector<at::Tensor>& tensors);
// The CPU if there is no tensor.
c10::Device device_holding(const std::vector<at::Tensor>& tensors);

class OperationLog {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // An operation between begin() and issued() or failed().
  struct Pending {
    Record record;
    bool records = false;
    std::optional<DeviceOperation> operation;  // if it is timed
    DeviceWatch* watch = nullptr;
    GateTicket gated;
  };

  OperationLog(int rank, int size, Recorder& recorder);

  uint32_t group() const noexcept { return group_; }
  Recorder& recorder() const noexcept { return recorder_; }
  void name(const std::string& name, std::vector<int64_t> ranks);
  // While set, operations are only simulated, and not recorded.
  void set_estimating(bool estimating) noexcept { estimating_ = estimating; }
  bool estimating() const noexcept { return estimating_; }

  // Whether it goes into a graph. If so, it is counted and must be issued without begin().
  bool is_captured(DeviceWatch* watch, const Call& call);
  // Called just before the operation is issued on `inner`.
  Pending begin(Inner& inner, c10::Device device, const Call& call, DeviceWatch* watch,
                GateTicket&& gated);
  void failed(Pending& pending);
  // Returns the handle for the caller. When the operation ends, it is recorded and leaves the gate.
  WorkPtr issued(Inner& inner, const Call& call, Pending&& pending, const WorkPtr& work);
  // A record that nothing else completes; the caller pushes it.
  Record record_of(const Call& call, c10::DeviceType device);

  // Around a block of operations that the device runs as one. Its end is an operation of its own.
  void start_block();
  void end_block() noexcept { coalescing_ = Coalescing::kNo; }
  // Ends a block whose end could not be issued.
  void fail_block();

 private:
  enum class Coalescing : uint8_t { kNo, kUntimed, kTimed };

  bool is_part(const Call& call) const {
    return coalescing_ != Coalescing::kNo && call.op != Op::kCoalesced;
  }
  bool is_timed() const {
    // A block is timed if its begin was.
    if (coalescing_ != Coalescing::kNo) return coalescing_ == Coalescing::kTimed;
    return recorder_.timing();
  }
  // Without an operation, it only leaves the gate.
  WorkPtr finish_later(Inner& inner, const Call& call, std::optional<DeviceOperation> operation,
                       DeviceWatch* watch, const WorkPtr& work, GateTicket&& gated);
  WorkPtr finish_by_future(const Call& call, std::optional<DeviceOperation> operation,
                           const WorkPtr& work, GateTicket&& gated);
  // Gives an operation that no hook reports, or only its gate ticket, to the device's watch.
  void hand_over(Inner& inner, const Call& call, std::optional<DeviceOperation>& operation,
                 DeviceWatch& watch, const WorkPtr& work, GateTicket&& gated);

  Recorder& recorder_;
  const int size_;
  const uint32_t group_;
  std::atomic<uint64_t> collectives_{0};
  std::atomic<uint64_t> transfers_{0};
  bool estimating_ = false;
  Coalescing coalescing_ = Coalescing::kNo;
  std::vector<Record> coalesced_;
};

}  // namespace crux
