#include "waited_work.h"

#include <utility>

namespace crux {

WaitedWork::WaitedWork(c10::intrusive_ptr<c10d::Work> inner, Recorder& recorder,
                       const Record& record)
    : Work(-1, inner->retrieveOpType()),
      inner_(std::move(inner)),
      recorder_(recorder),
      record_(record) {
  record_.flags |= kEndAtWait;
}

WaitedWork::~WaitedWork() { record_once(Status::kIncomplete, kUnknownTime); }

bool WaitedWork::isCompleted() {
  const bool completed = inner_->isCompleted();
  if (completed) {
    record_once(inner_->isSuccess() ? Status::kOk : Status::kFailed, monotonic_ns());
  }
  return completed;
}

bool WaitedWork::wait(std::chrono::milliseconds timeout) {
  try {
    const bool done = inner_->wait(timeout);
    record_once(done ? Status::kOk : Status::kFailed, monotonic_ns());
    return done;
  } catch (...) {
    record_once(Status::kFailed, monotonic_ns());
    throw;
  }
}

void WaitedWork::record_once(Status status, int64_t end_ns) noexcept {
  if (recorded_.exchange(true, std::memory_order_relaxed)) return;
  record_.status = status;
  record_.end_ns = end_ns;
  recorder_.push(record_);
}

}  // namespace crux
