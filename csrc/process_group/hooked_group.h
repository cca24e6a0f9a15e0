// Records the operations of a process group whose backend is torch's own, by torch's hooks around
// each operation (torch 2.15 and newer). docs/start/frameworks.md says what the hooks don't tell.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
#include <cstdint>
#include <memory>

#include "inner.h"
#include "operation_log.h"

namespace crux {

class HookedGroup;

namespace internal {

inline const Call kBlockEnd{Op::kCoalesced, 0};

// The operation between whose two hooks this thread is.
struct Issuing {
  const HookedGroup* group = nullptr;
  int64_t number = 0;  // torch's
  Call call{Op::kUnknown, 0};
  OperationLog::Pending pending;
};

// Never destroyed: an event must not be released while the process ends.
inline Issuing& issuing() {
  thread_local Issuing* const made = new Issuing();
  return *made;
}

}  // namespace internal

class HookedGroup {
 public:
  using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // True if the hooks report all of a backend's operations and their ends.
  static bool suffices(c10d::Backend& backend) { return backend.supportsCompletionHooks(); }
  // Records what `group` issues on tensors of `device`, which `backend` serves, as long as it
  // lives. Called before the first operation. `alone`: the group has no other backend.
  static std::shared_ptr<HookedGroup> attach(const GroupPtr& group, BackendPtr backend,
                                             c10::DeviceType device, bool alone,
                                             Recorder& recorder) {
    std::vector<int64_t> ranks;
    const auto& members = backend->getBackendOptions()->global_ranks_in_group;
    ranks.assign(members.begin(), members.end());
    auto made = std::make_shared<HookedGroup>(std::move(backend), device, alone, group->getRank(),
                                              group->getSize(), recorder);
    made->log_.name(group->getGroupName(), std::move(ranks));
    // Its own address, so that no other hook has the number.
    const auto id = reinterpret_cast<int64_t>(made.get());
    group->registerPreHook(id, [made](const c10d::PreHookArgs& args) { made->before(args); });
    group->registerPostHook(id, [made](const c10d::PostHookArgs& args) { made->after(args); });
    return made;
  }

  HookedGroup(BackendPtr backend, c10::DeviceType device, bool alone, int rank, int size,
              Recorder& recorder)
      : log_(rank, size, recorder),
        device_(device),
        alone_(alone),
        size_(size),
        inner_(std::move(backend), device, reinterpret_cast<int64_t>(this), recorder),
        block_device_(device) {}
  HookedGroup(const HookedGroup&) = delete;
  HookedGroup& operator=(const HookedGroup&) = delete;

  // Around a block of coalesced operations, for which torch has no hooks. One thread calls all of
  // them, and the last with the block's handle, or if its end could not be issued.
  void start_block() {
    in_block_ = true;
    block_device_ = c10::Device(device_);
    log_.start_block();
  }
  void end_block() {
    DeviceWatch* const watch = inner_.watch(block_device_);
    if (log_.is_captured(watch, internal::kBlockEnd)) {
      block_ = {};
      return;
    }
    block_ = log_.begin(inner_, block_device_, internal::kBlockEnd, watch, GateTicket());
  }
  void block_ended(const WorkPtr& work) {
    // Nothing was begun for what went into a graph.
    if (block_.records) (void)log_.issued(inner_, internal::kBlockEnd, std::move(block_), work);
    block_ = {};
    in_block_ = false;
    log_.end_block();
  }
  void block_failed() {
    log_.failed(block_);
    block_ = {};
    in_block_ = false;
    log_.fail_block();
  }

 private:
  void before(const c10d::PreHookArgs& args) {
    try {
      const auto& tensors = args.input_tensors.empty() ? args.output_tensors : args.input_tensors;
      // A barrier's hook does not tell the device. With several backends it may be another one's.
      if (tensors.empty() && !alone_) return;
      const c10::Device device = tensors.empty() ? c10::Device(device_) : device_holding(tensors);
      if (device.type() != device_) return;
      Call call = call_of(args);
      if (call.op == Op::kUnknown) return;
      DeviceWatch* const watch = inner_.watch(device);
      if (log_.is_captured(watch, call)) return;
      if (in_block_) block_device_ = device;
      internal::Issuing& now = internal::issuing();
      // torch calls no second hook for an operation that was refused.
      if (now.group) log_.failed(now.pending);
      now.pending = log_.begin(inner_, device, call, watch, GateTicket());
      now.call = call;
      now.number = args.op_id;
      now.group = this;
    } catch (const std::exception&) {
      // An operation that can't be recorded must still be issued.
    }
  }
  void after(const c10d::PostHookArgs& args) {
    try {
      internal::Issuing& now = internal::issuing();
      if (now.group != this || now.number != args.op_id) return;
      now.group = nullptr;
      (void)log_.issued(inner_, now.call, std::move(now.pending), args.work);
    } catch (const std::exception&) {
      // The operation is under way, and the script need not learn that it leaves no record.
    }
  }
  // Returns the operation as it is recorded; kUnknown if it is not.
  Call call_of(const c10d::PreHookArgs& args) const {
    using Name = c10d::HookOpName;
    const auto peer = static_cast<int>(args.root);
    const auto in = [&] { return bytes_of(args.input_tensors); };
    const auto out = [&] { return bytes_of(args.output_tensors); };
    const bool sync = !args.async_op;
    switch (args.name) {
      case Name::SEND:
        return {Op::kSend, in(), false, peer};
      case Name::RECV:
        return {Op::kRecv, out(), false, peer};
      case Name::BROADCAST:
        return {Op::kBroadcast, in(), sync, peer};
      case Name::ALLREDUCE: {
        const bool sparse = !args.input_tensors.empty() && args.input_tensors.front().is_sparse();
        return {sparse ? Op::kAllreduceSparse : Op::kAllreduce, in(), sync};
      }
      case Name::ALLREDUCE_COALESCED:
        return {Op::kAllreduceCoalesced, in(), sync};
      case Name::REDUCE:
        return {Op::kReduce, in(), sync, peer};
      case Name::ALLGATHER:
        return {Op::kAllgather, in() * size_, sync};
      case Name::ALLGATHER_BASE:
        return {Op::kAllgatherSingle, out(), sync};
      case Name::ALLGATHER_COALESCED:
        return {Op::kAllgatherCoalesced, in() * size_, sync};
      case Name::ALLGATHER_INTO_TENSOR_COALESCED:
        return {Op::kAllgatherCoalesced, out(), sync};
      case Name::GATHER:
        return {Op::kGather, in() * size_, sync, peer};
      case Name::SCATTER:
        return {Op::kScatter, out() * size_, sync, peer};
      case Name::REDUCE_SCATTER:
        return {Op::kReduceScatter, out() * size_, sync};
      case Name::REDUCE_SCATTER_BASE:
        return {Op::kReduceScatterSingle, in(), sync};
      case Name::REDUCE_SCATTER_TENSOR_COALESCED:
        return {Op::kReduceScatterCoalesced, in(), sync};
      case Name::ALLTOALL_BASE:
        return {Op::kAlltoallSingle, in(), sync};
      case Name::ALLTOALL:
        return {Op::kAlltoall, in(), sync};
      case Name::BARRIER:
        return {Op::kBarrier, 0, sync};
      default:
        return {Op::kUnknown, 0};
    }
  }

  OperationLog log_;
  const c10::DeviceType device_;
  const bool alone_;
  const int size_;
  Inner inner_;
  bool in_block_ = false;
  c10::Device block_device_;
  OperationLog::Pending block_;
};

}  // namespace crux
#endif
