// The inner backends that serve one type of device in a process group: the current one and, while
// switching, the next. Operations take their way by SwitchPoint's counts; the rest of this class
// makes the next backend like the current one, and closes what is no longer used.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "inner.h"
#include "switch_point.h"

namespace crux {

// How long the end of a communicator waits for the times of its last operations.
constexpr std::chrono::milliseconds kUnwatchPatience{1000};

class InnerSwitch : public std::enable_shared_from_this<InnerSwitch> {
 public:
  using Point = SwitchPoint<Inner>;
  using Ticket = Point::Ticket;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Setting = std::function<void(c10d::Backend&)>;

  InnerSwitch(BackendPtr first, c10::DeviceType device, int64_t hook_id, Recorder& recorder,
              uint32_t group);
  ~InnerSwitch() { close(); }
  InnerSwitch(const InnerSwitch&) = delete;
  InnerSwitch& operator=(const InnerSwitch&) = delete;

  // Those of this process that were published and are not closed, oldest first.
  static std::vector<std::shared_ptr<InnerSwitch>> all();

  // For the threads that issue operations. Each may wait for a decision: see SwitchPoint.
  Ticket collective() { return cleared(point_.collective()); }
  Ticket transfer(int peer, int tag, bool sends);
  Ticket any_source(int tag) { return cleared(point_.any_source(tag)); }
  Ticket uncounted() { return point_.uncounted(); }
  void count_collective() { point_.count_collective(); }
  void keep_transfers() { point_.keep_transfers(); }
  // Orders a device's work on the next backend behind its last on the current one.
  void issued(Ticket& ticket, const WorkPtr& work);
  void before_issue(const Ticket& ticket);
  // An operation went into a graph, which may be replayed as long as the process group lives: what
  // it was captured on is kept so long, and no switch begins any more.
  void captured(Ticket& ticket);

  // The current inner backend; throws c10::Error once closed.
  BackendPtr backend() const;
  // Ends the watch over the operations of all: see Inner::unwatch.
  void unwatch(std::chrono::milliseconds patience) const;
  // Done to all inner backends that there are.
  void apply(const Setting& setting) const;
  // Done to all, and to each that is made later, in the order in which the names came up; a later
  // setting of a name takes the place of the earlier.
  void configure(const std::string& name, Setting setting);
  void forget(const std::string& name);
  // Counted over all inner backends that have served the group.
  uint64_t sequence_number() const;

  // Lets it be switched, with the store that the group was given. `born` is the newest switch that
  // was known when its first backend was made.
  void publish(StorePtr store, int64_t born);
  StorePtr store() const;
  int64_t born() const;
  // No switch from now on, because of `reason`. One that is decided goes on.
  void refuse(const std::string& reason);
  // Why no switch can begin; empty where one can.
  std::string refusal() const;

  // For the one thread that switches; see SwitchPoint. arm() throws c10::Error with the refusal.
  Counts arm(const BackendPtr& next, uint64_t margin, std::chrono::milliseconds limit);
  bool decide(Counts counts) { return point_.decide(std::move(counts)); }
  void cancel();
  bool finish();
  // Closes the backend that finish() took out of use; waits for its operations.
  void release();

  // From now on it is empty; whoever waits in it goes on. Called with the process group's end.
  void close();
  void let_go() { point_.let_go(); }
  bool closed() const { return point_.closed(); }

  const Point& point() const { return point_; }
  c10::DeviceType device() const { return device_; }
  uint32_t group() const { return group_; }

 private:
  using Settings = std::vector<std::pair<std::string, std::shared_ptr<const Setting>>>;

  std::vector<std::shared_ptr<Inner>> inners() const;
  Ticket cleared(Ticket ticket);
  // Returns the number of changes that it took into account.
  uint64_t configure_like_current(c10d::Backend& next) const;
  void forget_last(const Inner* inner);

  Recorder& recorder_;
  const c10::DeviceType device_;
  const int64_t hook_id_;
  const uint32_t group_;
  const bool tags_match_;  // whether the backend tells messages apart by tag
  Point point_;

  mutable std::mutex mutex_;
  Settings settings_;
  uint64_t changes_ = 0;
  StorePtr store_;
  int64_t born_ = 0;
  std::string refusal_;
  std::shared_ptr<Inner> retired_;
  uint64_t retired_sequence_ = 0;
  std::vector<std::shared_ptr<Inner>> kept_;  // for graphs

  std::mutex last_mutex_;
  std::atomic<Inner*> last_inner_{nullptr};
  WorkPtr last_;
};

}  // namespace crux
