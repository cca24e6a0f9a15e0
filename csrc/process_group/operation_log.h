// Records the operations of one process group as they are issued, and when they end. Whoever issues
// them says so: a DelegatingBackend, or torch's hooks around an operation (hooked_group.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "gate_ticket.h"
#include "inner.h"
#include "recorder.h"
#include "waited_work.h"

namespace crux {

// An operation that is being issued.
struct Call {
  Op op;
  int64_t bytes;
  // The caller waits for it immediately.
  bool synchronous = false;
  int peer = -1;
  // False if the inner handle has no future. Then the end is when wait() returns.
  bool has_future = true;
  int tag = 0;

  bool is_transfer() const noexcept { return op == Op::kSend || op == Op::kRecv; }
  // True if it waits for the host's PCIe links: a receive is posted long before its data comes, and
  // a barrier moves nothing.
  bool is_gated() const noexcept {
    return op != Op::kRecv && op != Op::kBarrier && op != Op::kCoalesced;
  }
};

// Bytes of a record.
inline int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.is_sparse()) return bytes_of(tensor._indices()) + bytes_of(tensor._values());
  return static_cast<int64_t>(tensor.nbytes());
}
inline int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}
// The CPU if there is no tensor.
inline c10::Device device_holding(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? c10::Device(c10::DeviceType::CPU) : tensors.front().device();
}

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

  OperationLog(int rank, int size, Recorder& recorder)
      : recorder_(recorder), size_(size), group_(recorder.add_group({"", {}, rank, size})) {}

  uint32_t group() const noexcept { return group_; }
  Recorder& recorder() const noexcept { return recorder_; }
  void name(const std::string& name, std::vector<int64_t> ranks) {
    recorder_.rename_group(group_, name, std::move(ranks));
  }
  // While set, operations are only simulated, and not recorded.
  void set_estimating(bool estimating) noexcept { estimating_ = estimating; }
  bool estimating() const noexcept { return estimating_; }

  // True if it goes into a graph. Then it is counted and must be issued without begin().
  bool is_captured(DeviceWatch* watch, const Call& call) {
    if (watch) watch->drop_handles();
    if (!watch || !watch->is_capturing()) return false;
    const bool records = recorder_.enabled() && !estimating_;
    if (records && call.op != Op::kCoalesced) recorder_.pass_captured();
    return true;
  }
  // Called just before the operation is issued on `inner`.
  Pending begin(Inner& inner, c10::Device device, const Call& call, DeviceWatch* watch,
                GateTicket&& gated) {
    Pending pending;
    pending.records = recorder_.enabled() && !estimating_;
    pending.watch = watch;
    pending.gated = std::move(gated);
    if (!pending.records) return pending;
    Record& record = pending.record = record_of(call, device.type());
    if (is_part(call)) record.flags |= kInCoalescedGroup;
    if (is_timed()) {
      pending.operation.emplace();
      pending.operation->whole = record;
      pending.operation->watch = watch;
      if (watch) inner.enable_timing();
      // The parts of a block run when it ends.
      if (watch && !is_part(call)) pending.operation->mark = watch->mark(record.issue_ns);
    } else {
      record.flags |= kUntimed;
    }
    return pending;
  }
  void failed(Pending& pending) {
    pending.record.status = Status::kFailed;
    pending.record.end_ns = monotonic_ns();
    if (pending.records) recorder_.push(pending.record);
  }
  // Returns the handle for the caller. When the operation ends, it is recorded and leaves the gate.
  WorkPtr issued(Inner& inner, const Call& call, Pending&& pending, const WorkPtr& work) {
    const bool timed = pending.operation.has_value();
    if (pending.records && !timed) recorder_.push(pending.record);
    if (!timed && !pending.gated) return work;
    try {
      return finish_later(inner, call, std::move(pending.operation), pending.watch, work,
                          std::move(pending.gated));
    } catch (const std::exception&) {
      // The operation is under way, so the caller need not learn that its handle has no future.
      pending.record.status = Status::kIncomplete;
      if (timed) recorder_.push(pending.record);
      return work;
    }
  }
  // A record that nothing else completes; the caller pushes it.
  Record record_of(const Call& call, c10::DeviceType device) {
    Record record;
    record.issue_ns = record.start_ns = monotonic_ns();
    record.sequence =
        (call.is_transfer() ? transfers_ : collectives_).fetch_add(1, std::memory_order_relaxed);
    record.bytes = call.bytes;
    record.group = group_;
    record.world_size = static_cast<uint32_t>(size_);
    record.peer = call.peer;
    record.op = call.op;
    record.device = device == c10::DeviceType::CPU ? 0 : 1;
    record.flags = call.synchronous ? kSynchronous : 0;
    return record;
  }

  // Around a block of operations that the device runs as one. Its end is an operation of its own.
  void start_block() {
    coalescing_ = !recorder_.enabled() ? Coalescing::kNo
                  : recorder_.timing() ? Coalescing::kTimed
                                       : Coalescing::kUntimed;
  }
  void end_block() noexcept { coalescing_ = Coalescing::kNo; }
  // Ends a block whose end could not be issued.
  void fail_block() {
    end_block();
    for (Record& part : coalesced_) {
      part.status = Status::kFailed;
      recorder_.push(part);
    }
    coalesced_.clear();
  }

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
                       DeviceWatch* watch, const WorkPtr& work, GateTicket&& gated) {
    if (operation && is_part(call)) {
      coalesced_.push_back(operation->whole);
      return work;
    }
    if (operation) operation->parts.swap(coalesced_);
    if (inner.completion == Completion::kFuture && work) {
      return finish_by_future(call, std::move(operation), work, std::move(gated));
    }
    const bool is_told_by_hook = inner.completion == Completion::kHook && work;
    if (watch && (gated || !is_told_by_hook)) {
      give_to_watch(inner, call, operation, *watch, work, std::move(gated));
    }
    if (!operation) return work;
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
    if (is_told_by_hook) {
      inner.table->issued(work->getCompletionKey(), std::move(*operation));
      return work;
    }
#endif
    // This rank takes no part in the operation, or nobody reports its end.
    inner.lanes->finish(*operation, kUnknownTime);
    return work;
  }
  WorkPtr finish_by_future(const Call& call, std::optional<DeviceOperation> operation,
                           const WorkPtr& work, GateTicket&& gated) {
    Recorder* const recorder = operation ? &recorder_ : nullptr;
    Record whole = operation ? operation->whole : Record();
    if (!call.has_future) {
      return c10::make_intrusive<WaitedWork>(work, recorder, whole, std::move(gated));
    }
    std::shared_ptr<GateTicket> held;
    if (gated) held = std::make_shared<GateTicket>(std::move(gated));
    std::vector<Record> parts;
    if (operation) parts = std::move(operation->parts);
    // Runs on the thread that completes the operation, without the GIL.
    work->getFuture()->addCallback(
        [recorder, whole, parts = std::move(parts), held](c10::ivalue::Future& future) mutable {
          if (held) held->leave();
          if (!recorder) return;
          whole.end_ns = monotonic_ns();
          whole.status = future.hasError() ? Status::kFailed : Status::kOk;
          for (Record& part : parts) {
            part.end_ns = whole.end_ns;
            part.status = whole.status;
            recorder->push(part);
          }
          recorder->push(whole);
        });
    return work;
  }
  // Gives an operation that no hook reports, or only its gate ticket, to the device's watch.
  void give_to_watch(Inner& inner, const Call& call, std::optional<DeviceOperation>& operation,
                     DeviceWatch& watch, const WorkPtr& work, GateTicket&& gated) {
    DeviceWatch::Watched watched;
    watched.owner = &inner;
    watched.work = work;
    watched.op = call.op;
    watched.bytes = call.bytes;
    watched.gated = std::move(gated);
    watched.lane = call.is_transfer() ? call.peer : Lanes::kCollectives;
    watched.lanes = inner.lanes;
    if (!work) {
      // Without a handle it runs on the stream that it was issued on.
      watched.end = watch.mark(monotonic_ns());
      if (operation) operation->whole.flags |= kSynchronous;
    }
    const bool has_duration =
        work ? inner.completion == Completion::kPolled && inner.enable_timing() : bool(watched.end);
    if (operation && has_duration) {
      watched.operation = std::make_unique<DeviceOperation>(std::move(*operation));
      operation.reset();
    }
    if ((work || watched.end) && (watched.operation || watched.gated)) {
      watch.watch(std::move(watched));
    }
  }

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
