#include "device_clock.h"

#include <algorithm>
#include <exception>

namespace crux {
namespace {

// More operations are rarely in flight. Events beyond this number are destroyed.
constexpr size_t kPooledEvents = 1024;
// A stream may never reach a place, or a capture may have taken it. Then the search starts again.
constexpr int64_t kCandidateLimit_ns = 10'000'000'000;

int64_t distance_ns(const c10::Event& from, const c10::Event& to) {
  return static_cast<int64_t>(from.elapsedTime(to) * 1e6);
}

}  // namespace

DeviceClock::Mark& DeviceClock::Mark::operator=(Mark&& other) noexcept {
  if (this == &other) return *this;
  release();
  clock_ = std::exchange(other.clock_, nullptr);
  event_ = std::move(other.event_);
  other.event_.reset();
  anchor_ = std::move(other.anchor_);
  return *this;
}

void DeviceClock::Mark::release() noexcept {
  DeviceClock* const clock = std::exchange(clock_, nullptr);
  if (!clock || !event_) return;
  const std::lock_guard<std::mutex> lock(clock->mutex_);
  if (clock->pool_.size() < kPooledEvents) clock->pool_.push_back(std::move(*event_));
  event_.reset();
}

int64_t DeviceClock::Mark::reached_ns() const noexcept {
  if (!clock_ || !event_) return kUnknownTime;
  AnchorPtr anchor = anchor_;
  if (!anchor) {
    const std::lock_guard<std::mutex> lock(clock_->mutex_);
    anchor = clock_->anchor_;
  }
  if (!anchor) return kUnknownTime;
  try {
    return anchor->reached.ns + distance_ns(anchor->event, *event_);
  } catch (const std::exception&) {
    return kUnknownTime;
  }
}

int64_t DeviceClock::Mark::since_ns(const Mark& earlier) const noexcept {
  if (!event_ || !earlier.event_) return kUnknownTime;
  try {
    return distance_ns(*earlier.event_, *event_);
  } catch (const std::exception&) {
    return kUnknownTime;
  }
}

DeviceClock::Mark DeviceClock::mark(const c10::Stream& stream, int64_t now_ns, bool& looks) {
  Mark made;
  bool anchors = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    made.anchor_ = anchor_;
    if (!pool_.empty()) {
      made.event_.emplace(std::move(pool_.back()));
      pool_.pop_back();
    }
    if (now_ns >= next_anchor_ns_ && !candidate_ && !looking_) {
      next_anchor_ns_ = now_ns + kAnchorPeriod_ns;
      anchors = true;
    }
  }
  if (!made.event_) made.event_.emplace(make_event());
  if (anchors) {
    const int64_t now = monotonic_ns();
    Candidate candidate{make_event(), now, now};
    candidate.event.record(stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    candidate_.emplace(std::move(candidate));
    looks = true;
  }
  made.event_->record(stream);
  made.clock_ = this;
  return made;
}

bool DeviceClock::look() {
  std::optional<Candidate> candidate;
  AnchorPtr last;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!candidate_) return false;
    candidate.emplace(std::move(*candidate_));
    candidate_.reset();
    looking_ = true;
    last = anchor_;
  }
  AnchorPtr found;
  bool again = false;
  try {
    const int64_t before_ns = monotonic_ns();
    if (candidate->event.query()) {
      const int64_t after_ns = monotonic_ns();
      Instant reached = between(candidate->unreached_ns, after_ns);
      if (last) {
        Instant predicted = last->reached;
        predicted.ns += distance_ns(last->event, candidate->event);
        reached = between(candidate->unreached_ns, after_ns, predicted);
      }
      found = std::make_shared<const Anchor>(Anchor{std::move(candidate->event), reached});
    } else {
      candidate->unreached_ns = before_ns;
      again = before_ns < candidate->recorded_ns + kCandidateLimit_ns;
    }
  } catch (const std::exception&) {
    // The next mark that is due tries again.
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  looking_ = false;
  if (found) {
    if (found->reached.error_ns > kTolerated_ns) {
      next_anchor_ns_ = std::min(next_anchor_ns_, monotonic_ns() + kRetryPeriod_ns);
    }
    anchor_ = std::move(found);
  }
  if (again) candidate_.emplace(std::move(*candidate));
  return again;
}

}  // namespace crux
