// When a device reached places on its streams, on CLOCK_MONOTONIC, by its own timing events and
// without waiting for it. Works for every device type whose guard has timing events.
//
// An event has no time of its own; two have a distance. So from time to time one of them is made an
// anchor: it was not reached when it was looked at once, and reached when it was looked at next,
// which is a bracket on the host's clock. A new anchor goes where the last one predicts it, or to
// the nearer end of its bracket: the clocks' drift never adds up, and brackets narrow each other.
// While they leave much open, as on a host too busy to look often, the next is sought soon.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "instant.h"
#include "record.h"

namespace crux {

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
    Mark& operator=(Mark&& other) noexcept;

    explicit operator bool() const noexcept { return event_.has_value(); }
    // Whether the device was there. Throws where the device refuses.
    bool reached() const { return event_->query(); }
    // When the device was there; kUnknownTime where it was not yet, or the clock has no anchor.
    int64_t reached_ns() const noexcept;
    // The device's time from `earlier` to here; kUnknownTime where it was not at both yet.
    int64_t since_ns(const Mark& earlier) const noexcept;

   private:
    friend class DeviceClock;
    void release() noexcept;

    DeviceClock* clock_ = nullptr;
    std::optional<c10::Event> event_;
    AnchorPtr anchor_;
  };

  // A time without an anchor as young as this is still right, but for the clocks' drift since.
  static constexpr int64_t kAnchorPeriod_ns = 1'000'000'000;
  // An anchor that is not known this well is followed by another after the shorter period.
  static constexpr int64_t kTolerated_ns = 500'000;
  static constexpr int64_t kRetryPeriod_ns = 20'000'000;

  explicit DeviceClock(c10::DeviceType device) : device_(device) {}
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // The end of what is on the stream so far, which must not be in a capture. `looks` becomes true
  // where look() is to be called now and until it returns false. Throws where the device refuses.
  Mark mark(const c10::Stream& stream, int64_t now_ns, bool& looks);

  // For one thread: looks whether the device has reached the place that is to be the next anchor.
  // Returns whether it is still to be looked at.
  bool look();

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
