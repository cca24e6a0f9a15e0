// The handle of an operation of the fake NCCL, and what outlives the handle.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "controls.h"
#include "stream.h"

namespace fake_gpu {

enum class Status { kRunning, kCompleted, kFailed, kTimedOut };

// Of one operation; the watchdog's queue, the handle and the task on the stream share it.
class Operation {
 public:
  Operation();

  uint64_t key = 0;
  uint64_t sequence = 0;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  int device = 0;
  bool legacy = false;
  bool timing = false;
  bool captured = false;
  int64_t issue_ns = 0;
  std::chrono::milliseconds timeout{0};
  std::atomic<int64_t> start_ns{0};
  // The place in the stream behind it.
  MomentPtr end;
  // Where a group of operations began whose last one this is.
  std::shared_ptr<Operation> first;
  size_t log_index = 0;
  std::chrono::steady_clock::time_point issued_at = std::chrono::steady_clock::now();
  // A WorkResult, once it has one.
  const c10::intrusive_ptr<c10::ivalue::Future> result;

  // Looks at the stream, and at the clock for `limit` or the operation's own timeout.
  Status check(std::optional<std::chrono::milliseconds> limit = std::nullopt);
  Status status() const { return status_; }
  void fail(Status status, const std::string& why);
  // Rethrows what it failed with.
  void rethrow() const;
  std::exception_ptr exception() const;
  float duration_ms() const;
  bool has_ended() const { return end->reached() && !end->captured; }

  // Tensors that must live until the script has waited or the watchdog has seen the end.
  void stash(std::vector<at::Tensor> tensors);
  void unstash();

 private:
  void settle(Status status, std::exception_ptr exception);

  mutable std::mutex mutex_;
  std::atomic<Status> status_{Status::kRunning};
  std::exception_ptr exception_;
  std::vector<at::Tensor> stash_;
};
using OperationPtr = std::shared_ptr<Operation>;

class Work final : public c10d::Work {
 public:
  Work(int rank, OperationPtr operation, std::vector<at::Tensor> outputs, bool host_blocking);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override { return operation_->exception(); }
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override { block(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return operation_->sequence; }
#ifdef FAKE_GPU_HAS_GETTIMEOUT
  std::chrono::milliseconds getTimeout() const override { return operation_->timeout; }
#endif
#ifdef FAKE_GPU_HAS_GETCOMPLETIONKEY
  uint64_t getCompletionKey() const override { return operation_->key; }
#endif
  const OperationPtr& operation() const { return operation_; }
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }
  // As of the legacy class's coalesced operations: result() dereferences a null pointer there.
  void forget_outputs();
  // As the legacy class does at issue, on the operation's stream.
  void make_future(Stream& stream);

 private:
  void block();

  const OperationPtr operation_;
  std::vector<at::Tensor> outputs_;
  bool has_outputs_ = true;
  const bool host_blocking_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace fake_gpu
