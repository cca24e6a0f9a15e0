// Records the operations of a process group whose backend is torch's own, by torch's hooks around
// each operation (torch 2.15 and newer). docs/frameworks.md says what the hooks don't tell.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#ifdef C10D_BACKEND_HAS_HOOKS
#include <cstdint>
#include <memory>

#include "inner.h"
#include "operation_log.h"

namespace crux {

class HookedGroup {
 public:
  using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Whether the hooks tell all of a backend's operations, and when they end.
  static bool suffices(c10d::Backend& backend) { return backend.supportsCompletionHooks(); }
  // Records what `group` issues on tensors of `device`, which `backend` serves, as long as it
  // lives. Called before the first operation. `alone`: the group has no other backend.
  static std::shared_ptr<HookedGroup> attach(const GroupPtr& group, BackendPtr backend,
                                             c10::DeviceType device, bool alone,
                                             Recorder& recorder);

  HookedGroup(BackendPtr backend, c10::DeviceType device, bool alone, int rank, int size,
              Recorder& recorder);
  HookedGroup(const HookedGroup&) = delete;
  HookedGroup& operator=(const HookedGroup&) = delete;

  // Around a block of coalesced operations, for which torch has no hooks. One thread calls all of
  // them, and the last with the block's handle, or if its end could not be issued.
  void start_block();
  void end_block();
  void block_ended(const WorkPtr& work);
  void block_failed();

 private:
  void before(const c10d::PreHookArgs& args);
  void after(const c10d::PostHookArgs& args);
  // What the record says of it; kUnknown for what is not recorded.
  Call call_of(const c10d::PreHookArgs& args) const;

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
