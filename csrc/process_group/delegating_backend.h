// The "crux" c10d backend. It passes every operation to an inner backend, which the stock creator
// made, and records it. The caller gets the inner backend's results, handles and errors.
// Inner backends can be replaced while the job runs: see handover.h.
//
// The same source builds against every torch from 2.11 on. Methods that newer headers added are
// guarded by the macros CRUX_C10D_HAS_*, which setup.py derives from Backend.hpp and Work.hpp.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "gate_ticket.h"
#include "handover.h"
#include "operation_log.h"
#include "stream_gate.h"

namespace crux {

// ProcessGroupGloo's first members, in its layout. DDP's logger casts a group's backend of type
// GLOO to ProcessGroupGloo and reads its options; no header that torch ships whole tells where they
// are.
class LikeGloo : public c10d::Backend {
 protected:
  using Backend::Backend;

  // True if torch's ProcessGroupGloo, of which `gloo` is one, has this layout.
  bool has_layout_of(c10d::Backend& gloo) const {
    const auto offset =
        reinterpret_cast<const char*>(&options_) - reinterpret_cast<const char*>(backend());
    const void* found = nullptr;
    std::memcpy(&found, reinterpret_cast<const char*>(&gloo) + offset, sizeof(found));
    return found == gloo.getBackendOptions().get();
  }
  // torch's C++ reads these from now on.
  void set_options(c10::intrusive_ptr<Options> options) { options_ = std::move(options); }
  const c10::intrusive_ptr<Options>& options() const { return options_; }

 private:
  const Backend* backend() const { return this; }

  std::shared_ptr<void> rendezvous_;
  c10::intrusive_ptr<Options> options_;
};

// A function that makes the call on an inner backend.
#define CALL(call) [=](c10d::Backend& inner) { inner.call; }

class DelegatingBackend final : public LikeGloo {
 public:
  using Device = c10::DeviceType;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // `name` is what the backend answers to: "crux", or the name of the stock backend that it stands
  // in for, so that code that looks at the name finds what it expects.
  DelegatingBackend(std::string name, int rank, int size, Recorder& recorder);
  ~DelegatingBackend() override;

  // Operations on tensors of `device` go to `inner` from now on. Called before the first operation.
  void add_inner(Device device, BackendPtr inner);
  // Throws c10::Error if no inner backend serves `device`.
  BackendPtr inner(Device device) const;
  // The accelerator's inner backend if there is one, otherwise the CPU's. Questions about
  // capabilities go to it.
  BackendPtr default_inner() const { return default_handover().backend(); }
  // The inner backends of all types of device, each once.
  std::vector<std::shared_ptr<Handover>> handovers() const;
  // Lets a group know it by type GLOO, with `options` like those of its inner backend, which is a
  // ProcessGroupGloo. False if torch's class has another layout; then it must not be registered so.
  bool stand_as_gloo(OptionsPtr options);
  // Lets inner backends be replaced; see Handover::publish.
  void publish(const c10::intrusive_ptr<c10d::Store>& store, int64_t born) {
    for (const auto& inners : handovers()) inners->publish(store, born);
  }
  uint32_t group_index() const noexcept { return log_.group(); }

  const std::string getBackendName() const override { return name_; }
  OptionsPtr getBackendOptions() override { return default_inner()->getBackendOptions(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  // The names with an underscore exist in every torch; newer canonical names forward to them.
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
#ifdef CRUX_C10D_HAS_GATHER_INTO_TENSOR
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  bool supportsCoalescing() const override { return default_inner()->supportsCoalescing(); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return default_inner()->supportsSplitting(); }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>& store, const OptionsPtr& opts,
                   const int& rank, const int& size) override;
  bool supportsShrinking() const override { return default_inner()->supportsShrinking(); }
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const OptionsPtr& opts_override) override;

  // While set, this rank only simulates operations. They are not recorded and take no part in a
  // handover. For backends whose time estimation is not part of c10d's interface.
  void set_estimating(bool estimating) noexcept { log_.set_estimating(estimating); }
  bool supportsTimeEstimation() const override { return default_inner()->supportsTimeEstimation(); }
#ifdef CRUX_C10D_HAS_STARTTIMEESTIMATE
  void startTimeEstimate() override {
    default_inner()->startTimeEstimate();
    log_.set_estimating(true);
  }
  float endTimeEstimate() override {
    log_.set_estimating(false);
    return default_inner()->endTimeEstimate();
  }
#endif
  void setTimeout(std::chrono::milliseconds timeout) override {
    for (const auto& inners : handovers()) inners->configure("timeout", CALL(setTimeout(timeout)));
  }
#ifdef CRUX_C10D_HAS_ADDEPHEMERALTIMEOUT
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override {
    for (const auto& inners : handovers()) inners->apply(CALL(addEphemeralTimeout(timeout)));
  }
#endif
#ifdef CRUX_C10D_HAS_ISINITIALIZED
  bool isInitialized() override { return default_inner()->isInitialized(); }
#endif
#ifdef CRUX_C10D_HAS_SUPPORTSRECONFIGURE
  bool supportsReconfigure() const override { return default_inner()->supportsReconfigure(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    return default_inner()->get_reconfigure_handle();
  }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef CRUX_C10D_HAS_SUPPORTSWINDOW
  bool supportsWindow() const override { return default_inner()->supportsWindow(); }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override {
    default_handover().refuse("memory windows are bound to the inner backend");
    return default_inner()->new_window(tensor);
  }
#endif
#ifdef CRUX_C10D_HAS_SUPPORTSABORTHOOKS
  bool supportsAbortHooks() const override { return default_inner()->supportsAbortHooks(); }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    default_handover().configure("abort hook " + std::to_string(id),
                                 CALL(registerAbortHook(id, hook)));
  }
  void unregisterAbortHook(int64_t id) override {
    default_handover().forget("abort hook " + std::to_string(id));
    default_handover().apply(CALL(unregisterAbortHook(id)));
  }
#endif
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  bool supportsCompletionHooks() const override {
    return default_inner()->supportsCompletionHooks();
  }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    default_handover().configure("completion hook " + std::to_string(id),
                                 CALL(registerCompletionHook(id, hook)));
  }
  void unregisterCompletionHook(int64_t id) override {
    default_handover().forget("completion hook " + std::to_string(id));
    default_handover().apply(CALL(unregisterCompletionHook(id)));
  }
#endif
#ifdef CRUX_C10D_HAS_SUSPEND
  void suspend() override { default_inner()->suspend(); }
  void resume() override { default_inner()->resume(); }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    return default_inner()->getMemoryStats();
  }
#endif

  void setSequenceNumberForGroup() override {
#ifndef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
    // Newer torch starts every group at 0 and warns of this call.
    for (const auto& inners : handovers()) inners->backend()->setSequenceNumberForGroup();
#endif
  }
  uint64_t getSequenceNumberForGroup() override { return default_handover().sequence_number(); }
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { default_handover().apply(CALL(waitForPendingWorks())); }
  void enableCollectivesTiming() override {
    default_handover().configure("timing", CALL(enableCollectivesTiming()));
  }
  void setGroupUid(const std::string& uid) override;
#ifdef CRUX_C10D_HAS_SETBOUNDDEVICEID
  void setBoundDeviceId(std::optional<at::Device> device) override;
#endif
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override { return default_inner()->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return default_inner()->getMemAllocator();
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return default_inner()->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    return default_inner()->supportsTensorAlloc(index);
  }
  void abort() override {
    for (const auto& inners : handovers()) inners->end(std::chrono::milliseconds(0), CALL(abort()));
  }
  void shutdown() override {
    for (const auto& inners : handovers()) inners->end(kUnwatchPatience, CALL(shutdown()));
  }

 private:
  // The operations from startCoalescing to endCoalescing. All go to one inner backend: the one that
  // serves the first of them.
  struct Block {
    std::optional<Handover::Ticket> ticket;
    c10::Device device = c10::DeviceType::CPU;  // of its first operation
    bool passed_gate = false;
    StreamPassage passing;  // once for all of it
  };
  // Issues the operation on an inner backend, under a tag of that backend.
  using IssueRef = c10::function_ref<WorkPtr(c10d::Backend&, int tag)>;

  Handover& at(Device device) const;
  Device default_device() const;
  Handover& default_handover() const { return at(default_device()); }
  using Children = std::vector<std::pair<std::shared_ptr<Handover>, BackendPtr>>;
  // A backend like this one over the children of its inner backends; null if it has none.
  BackendPtr wrap(const Children& children, const c10::intrusive_ptr<c10d::Store>& store) const;
  // Calls `make` for each inner backend, with its own store and options, and wraps the results. A
  // group with several types of device asks once for each, by the same name; one child is enough.
  template <typename Make>
  BackendPtr derive(const c10::intrusive_ptr<c10d::Store>& store, const OptionsPtr& opts,
                    Make&& make);
  // c10d gives a backend its description in a member that can't be overridden.
  void describe();
  // Counts the operation and chooses its inner backend. The ticket is the block's, or the caller's.
  Handover::Ticket& enter(Handover& inners, c10::Device device, const Call& call,
                          std::optional<Handover::Ticket>& own);
  Handover::Ticket count(Handover& inners, c10::Device device, const Call& call) const;
  // May wait for the host's links, unless the device does. Without a ticket if there is nothing to
  // leave, or the block leaves it.
  StreamPassage pass_gate(const Handover& inners, Inner& inner, c10::Device device,
                          const Call& call, DeviceWatch* watch);
  StreamPassage pass_gate(Inner& inner, c10::Device device, const Call& call, DeviceWatch* watch);
  // Issues the operation. When it ends, it is recorded and leaves the gate.
  WorkPtr run(c10::Device device, const Call& call, IssueRef issue);
  const std::string name_;
  OperationLog log_;
  std::map<Device, std::shared_ptr<Handover>> inners_;
  // Set between startCoalescing and endCoalescing, which the same thread calls.
  std::optional<Block> block_;
  // The last group that was split from this one or merged with it.
  std::string derived_name_;
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> derived_;
  std::atomic<bool> described_{false};
};

#undef CALL

}  // namespace crux
