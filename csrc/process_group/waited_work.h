// The handle of an operation whose backend does not report its end, such as Gloo's send, recv and
// reduce_scatter. Its end is when wait() returns. Everything else goes to the inner handle.
#pragma once

#include <atomic>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "../process.h"
#include "gate_ticket.h"
#include "recorder.h"

namespace crux {

class WaitedWork final : public c10d::Work {
 public:
  // Without a recorder, it only holds the gate's ticket until then.
  WaitedWork(c10::intrusive_ptr<c10d::Work> inner, Recorder* recorder, const Record& record,
             GateTicket&& gated)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        recorder_(recorder),
        record_(record),
        gated_(std::move(gated)) {
    record_.flags |= kEndAtWait;
  }
  ~WaitedWork() override { end_once(Status::kIncomplete, kUnknownTime); }

  bool isCompleted() override {
    const bool completed = inner_->isCompleted();
    if (completed) end_once(inner_->isSuccess() ? Status::kOk : Status::kFailed, monotonic_ns());
    return completed;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool done = inner_->wait(timeout);
      end_once(done ? Status::kOk : Status::kFailed, monotonic_ns());
      return done;
    } catch (...) {
      end_once(Status::kFailed, monotonic_ns());
      throw;
    }
  }
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
#ifdef CRUX_C10D_HAS_GETTIMEOUT
  std::chrono::milliseconds getTimeout() const override { return inner_->getTimeout(); }
#endif
#ifdef CRUX_C10D_HAS_GETCOMPLETIONKEY
  uint64_t getCompletionKey() const override { return inner_->getCompletionKey(); }
#endif

 private:
  void end_once(Status status, int64_t end_ns) noexcept {
    if (ended_.exchange(true, std::memory_order_relaxed)) return;
    gated_.leave();
    if (!recorder_) return;
    record_.status = status;
    record_.end_ns = end_ns;
    recorder_->push(record_);
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  Recorder* const recorder_;
  Record record_;
  GateTicket gated_;
  std::atomic<bool> ended_{false};
};

}  // namespace crux
