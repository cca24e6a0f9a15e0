#include "waited_work.h"

#include <utility>

namespace crux {

WaitedWork::WaitedWork(c10::intrusive_ptr<c10d::Work> inner, Recorder* recorder,
                       const Record& record, GateTicket&& gated)
    : Work(-1, inner->retrieveOpType()),
      inner_(std::move(inner)),
      recorder_(recorder),
      record_(record),
      gated_(std::move(gated)) {
  record_.flags |= kEndAtWait;
}

WaitedWork::~WaitedWork() { end_once(Status::kIncomplete, kUnknownTime); }

bool WaitedWork::isCompleted() {
  const bool completed = inner_->isCompleted();
  if (completed) {
    end_once(inner_->isSuccess() ? Status::kOk : Status::kFailed, monotonic_ns());
  }
  return completed;
}

bool WaitedWork::wait(std::chrono::milliseconds timeout) {
  try {
    const bool done = inner_->wait(timeout);
    end_once(done ? Status::kOk : Status::kFailed, monotonic_ns());
    return done;
  } catch (...) {
    end_once(Status::kFailed, monotonic_ns());
    throw;
  }
}

void WaitedWork::end_once(Status status, int64_t end_ns) noexcept {
  if (ended_.exchange(true, std::memory_order_relaxed)) return;
  gated_.leave();
  if (!recorder_) return;
  record_.status = status;
  record_.end_ns = end_ns;
  recorder_->push(record_);
}

}  // namespace crux
