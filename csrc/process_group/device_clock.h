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
    // Whether the device has reached it. Throws if the device refuses.
    bool reached() const { return event_->query(); }
    // When the device reached it; kUnknownTime if it has not, or if the clock has no anchor.
    int64_t reached_ns() const noexcept;
    // The device's time from `earlier` to here; kUnknownTime if it has not reached both.
    int64_t since_ns(const Mark& earlier) const noexcept;

   private:
    friend class DeviceClock;
    void release() noexcept;

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
  Mark mark(const c10::Stream& stream, int64_t now_ns, bool& looks);

  // Looks whether the device has reached the place of the next anchor. Call it from one thread
  // only. Returns whether to look again.
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
