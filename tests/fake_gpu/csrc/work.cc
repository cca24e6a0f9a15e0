#include "work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <thread>
#include <utility>

#include "torch_error.h"
#include "violations.h"

namespace fake_gpu {
namespace {

#define FAKE_GPU_CALL(method, forbidden) \
  Violations::instance().call(method, __builtin_return_address(0), forbidden)

bool terminal(Status status) { return status != Status::kRunning; }

}  // namespace

Operation::Operation() : result(c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())) {}

Status Operation::check(std::optional<std::chrono::milliseconds> limit) {
  if (terminal(status_)) return status_;
  if (has_ended()) {
    settle(Status::kCompleted, nullptr);
    return status_;
  }
  const auto waited = std::chrono::nanoseconds(now_ns() - issue_ns);
  if (!captured && waited >= limit.value_or(timeout)) {
    fail(Status::kTimedOut, "NCCL operation timed out");
  }
  return status_;
}

void Operation::fail(Status status, const std::string& why) {
  settle(status, std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, why)));
}

void Operation::settle(Status status, std::exception_ptr exception) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (terminal(status_)) return;
    exception_ = std::move(exception);
    status_ = status;
  }
  const auto outcome = status == Status::kCompleted  ? c10d::WorkResult::SUCCESS
                       : status == Status::kTimedOut ? c10d::WorkResult::TIMEOUT
                                                     : c10d::WorkResult::COMM_ERROR;
  result->markCompleted(c10::IValue(static_cast<int64_t>(outcome)));
}

std::exception_ptr Operation::exception() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

void Operation::rethrow() const { std::rethrow_exception(exception()); }

float Operation::duration_ms() const {
  const int64_t began_ns = first ? first->start_ns : start_ns;
  return static_cast<float>(static_cast<double>(end->ns() - began_ns) / 1e6);
}

void Operation::stash(std::vector<at::Tensor> tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stash_ = std::move(tensors);
}

void Operation::unstash() {
  std::vector<at::Tensor> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(stash_);
}

Work::Work(int rank, OperationPtr operation, std::vector<at::Tensor> outputs, bool host_blocking)
    : c10d::Work(rank, operation->type),
      operation_(std::move(operation)),
      outputs_(std::move(outputs)),
      host_blocking_(host_blocking) {}

bool Work::isCompleted() {
  FAKE_GPU_CALL("is_completed", "");
  with_torch_errors([] { Streams::instance().unsafe_call("a handle is queried"); });
  return terminal(operation_->check());
}

bool Work::isSuccess() const {
  const Status status = operation_->status();
  return status != Status::kFailed && status != Status::kTimedOut;
}

std::vector<at::Tensor> Work::result() {
  if (!has_outputs_) {
    Violations::instance().add("null_result", "a coalesced operation is asked for its outputs");
  }
  return outputs_;
}

void Work::forget_outputs() {
  has_outputs_ = false;
  outputs_.clear();
}

void Work::block() {
  if (terminal(operation_->status()) && operation_->status() != Status::kCompleted) return;
  Stream& current = Streams::instance().current(operation_->device);
  with_torch_errors([&] { current.wait_for(operation_->end); });
  if (host_blocking_ && !current.capturing()) with_torch_errors([&] { current.synchronize(); });
  operation_->unstash();
}

bool Work::wait(std::chrono::milliseconds timeout) {
  FAKE_GPU_CALL("wait", "");
  block();
  const bool capturing = Streams::instance().current(operation_->device).capturing();
  if (timeout != kNoTimeout) {
    while (!terminal(operation_->check(timeout))) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  } else if (!capturing) {
    operation_->check();
  }
  const Status status = operation_->status();
  if (status == Status::kFailed || status == Status::kTimedOut) operation_->rethrow();
  return true;
}

void Work::synchronize() {
  FAKE_GPU_CALL("synchronize", "work_synchronize");
  block();
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  // The legacy class made it at issue, and gives it away without waiting for anything.
  FAKE_GPU_CALL("get_future", operation_->legacy ? "" : "work_get_future");
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  block();
  std::vector<c10::Device> devices;
  for (const at::Tensor& output : outputs_) {
    if (output.device().type() == c10::DeviceType::PrivateUse1) {
      devices.push_back(output.device());
      break;
    }
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     devices);
  future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

void Work::make_future(Stream& stream) {
  const c10::Device device(c10::DeviceType::PrivateUse1,
                           static_cast<c10::DeviceIndex>(stream.device()));
  const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream.id()));
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{device});
  future_->markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  FAKE_GPU_CALL("get_future_result", "");
  operation_->check();
  return operation_->result;
}

float Work::getDuration() const {
  FAKE_GPU_CALL("get_duration", "");
  with_torch_errors([] { Streams::instance().unsafe_call("a duration is asked for"); });
  TORCH_CHECK(operation_->timing, "getDuration only works if timing was enabled");
  TORCH_CHECK(operation_->has_ended(), "getDuration only works after the work has completed");
  return operation_->duration_ms();
}

}  // namespace fake_gpu
