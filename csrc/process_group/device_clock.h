// Tells when a device reached places on its streams, on CLOCK_MONOTONIC, from its timing events and
// without waiting for it. Works for every device type whose guard has timing events.
//
// An event has no absolute time; only the distance of two events is known. So from time to time one
// event becomes an anchor: it was unreached at one look and reached at the next, and these two
// looks bracket it on the host's clock. A new anchor is put where the last one predicts it, or at
// the nearer end of its bracket. So the clocks' drift does not add up, and brackets narrow each
// other. If the bracket is wide, as on a busy host, the next anchor is sought soon.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../process.h"
#include "record.h"

namespace crux {

namespace internal {

// More operations are rarely in flight. Events beyond this number are destroyed.
inline constexpr size_t kPooledEvents = 1024;
// A stream may never reach a place, or a capture may have taken it. Then the search starts again.
inline constexpr int64_t kCandidateLimit_ns = 10'000'000'000;

inline int64_t distance_ns(const c10::Event& from, const c10::Event& to) {
  return static_cast<int64_t>(from.elapsedTime(to) * 1e6);
}

}  // namespace internal

class DeviceClock {
  struct Anchor {
    c10::Event event;
    Instant reached;
  };
  using AnchorPtr = std::shared_ptr<const Anchor>;

 public:
  // A place on a stream. Movable; gives its event back when it is gone, so the clock outlives it.
  class Mark {
   public:
    Mark() = default;
    ~Mark() { release(); }
    Mark(Mark&& other) noexcept
        : clock_(std::exchange(other.clock_, nullptr)),
          event_(std::move(other.event_)),
          anchor_(std::move(other.anchor_)) {
      other.event_.reset();
    }
    Mark& operator=(Mark&& other) noexcept {
      if (this == &other) return *this;
      release();
      clock_ = std::exchange(other.clock_, nullptr);
      event_ = std::move(other.event_);
      other.event_.reset();
      anchor_ = std::move(other.anchor_);
      return *this;
    }

    explicit operator bool() const noexcept { return event_.has_value(); }
    // True if the device has reached it. Throws if the device refuses.
    bool reached() const { return event_->query(); }
    // Time at which the device reached it; kUnknownTime if it has not, or the clock has no anchor.
    int64_t reached_ns() const noexcept {
      if (!clock_ || !event_) return kUnknownTime;
      AnchorPtr anchor = anchor_;
      if (!anchor) {
        const std::lock_guard<std::mutex> lock(clock_->mutex_);
        anchor = clock_->anchor_;
      }
      if (!anchor) return kUnknownTime;
      try {
        return anchor->reached.ns + internal::distance_ns(anchor->event, *event_);
      } catch (const std::exception&) {
        return kUnknownTime;
      }
    }
    // The device's time from `earlier` to here; kUnknownTime if it has not reached both.
    int64_t since_ns(const Mark& earlier) const noexcept {
      if (!event_ || !earlier.event_) return kUnknownTime;
      try {
        return internal::distance_ns(*earlier.event_, *event_);
      } catch (const std::exception&) {
        return kUnknownTime;
      }
    }

   private:
    friend class DeviceClock;
    void release() noexcept {
      DeviceClock* const clock = std::exchange(clock_, nullptr);
      if (!clock || !event_) return;
      const std::lock_guard<std::mutex> lock(clock->mutex_);
      if (clock->pool_.size() < internal::kPooledEvents) clock->pool_.push_back(std::move(*event_));
      event_.reset();
    }

    DeviceClock* clock_ = nullptr;
    std::optional<c10::Event> event_;
    AnchorPtr anchor_;
  };

  // A time from an older anchor is off only by the drift of the clocks since.
  static constexpr int64_t kAnchorPeriod_ns = 1'000'000'000;
  // An anchor with a larger error is followed by the next one after the shorter period.
  static constexpr int64_t kTolerated_ns = 500'000;
  static constexpr int64_t kRetryPeriod_ns = 20'000'000;

  explicit DeviceClock(c10::DeviceType device) : device_(device) {}
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // The end of what is on the stream so far, which must not be in a capture. `looks` becomes true
  // if look() is to be called from now on until it returns false. Throws if the device refuses.
  Mark mark(const c10::Stream& stream, int64_t now_ns, bool& looks) {
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

  // Looks if the device has reached the place of the next anchor. Call it from one thread only.
  // Returns true if it is to be called again.
  bool look() {
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
          predicted.ns += internal::distance_ns(last->event, candidate->event);
          reached = between(candidate->unreached_ns, after_ns, predicted);
        }
        found = std::make_shared<const Anchor>(Anchor{std::move(candidate->event), reached});
      } else {
        candidate->unreached_ns = before_ns;
        again = before_ns < candidate->recorded_ns + internal::kCandidateLimit_ns;
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

 private:
  struct Candidate {
    c10::Event event;
    int64_t unreached_ns;  // when it was last seen unreached
    int64_t recorded_ns;
  };

  c10::Event make_event() const { return c10::Event(device_, c10::EventFlag::BACKEND_DEFAULT); }

  const c10::DeviceType device_;
  mutable std::mutex mutex_;
  std::vector<c10::Event> pool_;
  AnchorPtr anchor_;
  std::optional<Candidate> candidate_;
  bool looking_ = false;
  int64_t next_anchor_ns_ = 0;
};

}  // namespace crux
