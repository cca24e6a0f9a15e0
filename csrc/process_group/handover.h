// The inner backends that serve one type of device in a process group: the current one and, during
// a handover, the next. HandoverPoint's counts decide which one an operation takes. This class also
// sets up the next backend like the current one, and closes backends that are no longer used.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "handover_point.h"
#include "inner.h"

namespace crux {

// Longest time that destroying a communicator waits for the times of its last operations.
constexpr std::chrono::milliseconds kUnwatchPatience{1000};

class Handover : public std::enable_shared_from_this<Handover> {
 public:
  using Point = HandoverPoint<Inner>;
  using Ticket = Point::Ticket;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Setting = std::function<void(c10d::Backend&)>;

  Handover(BackendPtr first, c10::DeviceType device, int64_t hook_id, Recorder& recorder,
           uint32_t group);
  ~Handover() { close(); }
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  // All that were published in this process and are not closed, oldest first.
  static std::vector<std::shared_ptr<Handover>> all();

  // Called by the threads that issue operations, on `device`. Each may wait: see HandoverPoint.
  Ticket collective(c10::Device device) { return cleared(point_.collective(), device); }
  Ticket transfer(int peer, int tag, bool sends, c10::Device device);
  Ticket any_source(int tag, c10::Device device) { return cleared(point_.any_source(tag), device); }
  Ticket uncounted() { return point_.uncounted(); }
  void count_collective() { point_.count_collective(); }
  void keep_transfers() { point_.keep_transfers(); }
  // An operation went into a graph, which may be replayed as long as the process group lives. So
  // its backend is kept that long, and no new handover begins.
  void captured(Ticket& ticket);

  // The current inner backend; throws c10::Error once closed.
  BackendPtr backend() const;
  // Applies it to all current inner backends.
  void apply(const Setting& setting) const;
  // Applies it to all, and to each later one, in the order in which the names first came. A later
  // setting replaces an earlier one of the same name.
  void configure(const std::string& name, Setting setting);
  void forget(const std::string& name);
  // Sum of the sequence numbers of all inner backends that the group has had.
  uint64_t sequence_number() const;

  // Allows handovers, with the group's own store. `born` is the newest handover that was known when
  // the first backend was made.
  void publish(StorePtr store, int64_t born);
  StorePtr store() const;
  int64_t born() const;
  // Allows no handover from now on, because of `reason`. A handover that is already decided goes
  // on.
  void refuse(const std::string& reason);
  // Reason why no handover can begin; empty if one can.
  std::string refusal() const;

  // Called by the one thread that hands over; see HandoverPoint. arm() throws c10::Error with the
  // refusal; without `next`, replace() brings it.
  Counts arm(const BackendPtr& next, uint64_t margin, std::chrono::milliseconds limit);
  bool decide(Counts counts) { return point_.decide(std::move(counts)); }
  void cancel();
  bool finish();
  bool replace(const BackendPtr& next);
  // The index of the device that operations wait for; -1 if none has waited.
  int waits_on() const noexcept { return waits_on_.load(); }
  // Shuts down the backend that finish() or replace() retired, after its operations have ended.
  void release();

  // Ends all backends by `last`. Threads that wait here go on; operations that take longer than
  // `patience` lose their times.
  void end(std::chrono::milliseconds patience, const Setting& last) {
    point_.let_go();
    for (const auto& inner : inners()) inner->unwatch(patience);
    apply(last);
  }
  // Drops all backends; threads that wait here go on. Called when the process group ends.
  void close();
  bool closed() const { return point_.closed(); }

  // See HandoverPoint.
  uint64_t collectives() const noexcept { return point_.collectives(); }
  bool has_transfers() const { return point_.has_transfers(); }
  bool armed() const noexcept { return point_.armed(); }
  bool stopped() const { return point_.stopped(); }
  Point::Waits waits() const { return point_.waits(); }

  c10::DeviceType device() const { return device_; }
  uint32_t group() const { return group_; }

 private:
  using Settings = std::vector<std::pair<std::string, std::shared_ptr<const Setting>>>;

  std::vector<std::shared_ptr<Inner>> inners() const;
  Ticket cleared(Ticket ticket, c10::Device device);
  // Before an operation waits on it.
  void look_at(c10::Device device) noexcept;
  std::shared_ptr<Inner> as_inner(const BackendPtr& next) const;
  // Sets `next` up like the current backend, then calls `then` with mutex_ held. Every later
  // setting reaches what `then` has put into use.
  template <typename Then>
  auto configured(c10d::Backend& next, Then&& then);
  // Needs mutex_.
  void retire(std::shared_ptr<Inner> retired);

  Recorder& recorder_;
  const c10::DeviceType device_;
  const int64_t hook_id_;
  const uint32_t group_;
  const bool tags_match_;  // true if the backend tells messages apart by tag
  Point point_;

  mutable std::mutex mutex_;
  Settings settings_;
  uint64_t changes_ = 0;
  StorePtr store_;
  int64_t born_ = 0;
  std::shared_ptr<Inner> retired_;
  uint64_t retired_sequence_ = 0;
  std::vector<std::shared_ptr<Inner>> kept_;  // for graphs
  std::vector<BackendPtr> pointed_to_;        // shut down, for handles that outlive them

  mutable std::mutex refusal_mutex_;  // operations take it on their way, mutex_ never
  std::string refusal_;
  std::atomic<int> waits_on_{-1};
};

}  // namespace crux
