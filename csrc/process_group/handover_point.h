// The point at which operations move from one inner backend to the next, the same on all ranks.
//
// Every operation is counted when it is issued. Collectives have one counter, because all ranks
// issue them in the same order. Point-to-point operations ("transfers") have a counter for each key
// of peer, tag and direction, because both ends issue those of one key in the same order. A
// handover is
//
//   arm      this rank announces how far it goes before the decision: its hold point;
//   decide   all ranks learn the same counts: an operation whose number is below its count stays
//            with the current inner backend, any other takes the next;
//   finish   this rank has passed all of these counts; the next becomes the current.
//
// A device's next backend is made when nothing runs. So arm() gets none, and instead of finish come
//
//   stopped  every collective below this count was issued, and at least one other waits;
//   replace  the next becomes the current, still waited for, so that the old one can be freed;
//   cancel   whoever waits goes on.
//
// Transfers need no counts then: on a device that is idle, each one has met its other end.
//
// An operation that reaches one of these points waits there, for a limited time.
// The counts are at least every rank's hold points, so no rank has passed them when they become
// known. This file does not depend on torch; Inner is any type that serves operations.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace crux {

// The key of a point-to-point operation, the same at both ends.
struct Transfer {
  int peer = -1;
  int tag = 0;
  bool sends = false;

  bool operator<(const Transfer& other) const {
    return std::tie(peer, tag, sends) < std::tie(other.peer, other.tag, other.sends);
  }
};

// Numbers of operations that were issued, or may be issued before the handover.
struct Counts {
  uint64_t collectives = 0;
  std::map<Transfer, uint64_t> transfers;
  // Transfers stay with the current inner backend: counts can't match their ends.
  bool transfers_stay = false;
};

template <typename Inner>
class HandoverPoint {
 public:
  using InnerPtr = std::shared_ptr<Inner>;
  using Clock = std::chrono::steady_clock;
  // With more keys (for example a new tag for each message) transfers are no longer counted.
  static constexpr size_t kMaxKeys = 4096;

  // One operation on its way to an inner backend. While it exists, no inner backend is retired.
  class Ticket {
   public:
    Ticket(Ticket&& other) noexcept : Ticket(other) { other.point_ = nullptr; }
    Ticket& operator=(Ticket&&) = delete;
    // The operation was refused, so it did not happen; the next one gets its number.
    ~Ticket() {
      if (point_) point_->leave(*this);
    }

    // Null if the operation must wait() first.
    Inner* inner() const noexcept { return inner_; }
    void wait() { point_->wait(*this); }
    void issued() noexcept { issued_ = true; }

   private:
    friend class HandoverPoint;
    enum class Kind : uint8_t { kCollective, kTransfer, kAnySource, kUncounted };

    Ticket(HandoverPoint* point, Kind kind) : point_(point), kind_(kind) {}
    Ticket(const Ticket&) = default;

    HandoverPoint* point_;
    Inner* inner_ = nullptr;
    uint64_t number_ = 0;
    Transfer key_;
    Kind kind_;
    bool issued_ = false;
  };

  explicit HandoverPoint(InnerPtr first)
      : fast_(first.get()), current_(std::move(first)), transfers_(current_) {}

  HandoverPoint(const HandoverPoint&) = delete;
  HandoverPoint& operator=(const HandoverPoint&) = delete;

  // Called by the threads that issue operations:

  Ticket collective() {
    Ticket ticket(this, Ticket::Kind::kCollective);
    // In this order, either arm() sees the number or this thread sees armed_.
    ticket.number_ = collectives_of(issuing_.fetch_add(kActive + 1));
    if (!armed_.load()) {
      ticket.inner_ = fast_.load();
      return ticket;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket.inner_ = route(ticket);
    return ticket;
  }

  Ticket transfer(const Transfer& key) {
    Ticket ticket(this, Ticket::Kind::kTransfer);
    issuing_.fetch_add(kActive);
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket.key_ = key;
    if (!count_.transfers_stay || (phase_ != Phase::kIdle && !hold_.transfers_stay)) {
      ticket.number_ = count_.transfers[key]++;
    }
    if (phase_ == Phase::kIdle && count_.transfers.size() > kMaxKeys) {
      count_.transfers_stay = true;
      count_.transfers.clear();
    }
    ticket.inner_ = route(ticket);
    return ticket;
  }

  // A receive from any source: no count tells which sender it meets.
  Ticket any_source(int tag) {
    Ticket ticket(this, Ticket::Kind::kAnySource);
    issuing_.fetch_add(kActive);
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket.key_.tag = tag;
    ticket.inner_ = route(ticket);
    return ticket;
  }

  // An operation that not all ranks issue: goes to the current inner backend, uncounted.
  Ticket uncounted() {
    Ticket ticket(this, Ticket::Kind::kUncounted);
    issuing_.fetch_add(kActive);
    const std::lock_guard<std::mutex> lock(mutex_);
    ticket.inner_ = current_.get();
    return ticket;
  }

  // Counts a collective that goes to the inner backend of the ones before it.
  void count_collective() { issuing_.fetch_add(1); }

  // From the next handover on, transfers stay with their inner backend.
  void keep_transfers() {
    const std::lock_guard<std::mutex> lock(mutex_);
    count_.transfers_stay = true;
  }

  bool has_transfers() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_.transfers_stay || !count_.transfers.empty();
  }

  // Called by the one thread that hands over:

  // This rank's hold point: `margin` collectives from now, and no further transfer.
  // Operations that wait do so for `limit` at most; then this handover is given up, and all go on.
  // Returns false if a handover is under way or the point is closed.
  bool arm(InnerPtr next, uint64_t margin, std::chrono::milliseconds limit, Counts* hold) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::kIdle || next_ || passed_ || closed_) return false;
    next_ = std::move(next);
    stops_ = !next_;
    limit_ = limit;
    waits_ = {};
    armed_.store(true);
    hold_ = count_;
    hold_.collectives = collectives() + margin;
    phase_ = Phase::kHolding;
    *hold = hold_;
    return true;
  }

  // `counts.transfers` holds the keys of this rank for which they differ from its hold point.
  // Returns false if this rank has given up the handover.
  bool decide(Counts counts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::kHolding) return false;
    decided_ = std::move(counts);
    phase_ = Phase::kDecided;
    changed_.notify_all();
    return true;
  }

  // Gives up a handover, unless it is decided and the next backend exists; after replace(), ends
  // it. Returns the backend that would have been next.
  InnerPtr cancel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ == Phase::kDecided && !stops_) return nullptr;
    give_up();
    return std::move(next_);
  }

  // Makes the next inner backend the current one, once no operation of this rank will take the old
  // one. Returns true once for each handover. Then nothing is issued to `retired` any more; it is
  // null if transfers stay with the old one.
  bool finish(InnerPtr* retired) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pass();
    if (!passed_) return false;
    passed_ = false;
    *retired = std::move(retired_);
    return true;
  }

  // True if this rank has come as far as it can without the next backend.
  bool stopped() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return has_stopped();
  }

  // Makes `next` the current inner backend of a rank that has stopped. Operations wait until
  // cancel(). Returns false if this rank has given up the handover.
  bool replace(InnerPtr next, InnerPtr* retired) {
    std::unique_lock<std::mutex> lock(mutex_);
    // Another thread may just be on its way to where it waits.
    while (!has_stopped()) {
      if (phase_ != Phase::kDecided || !stops_) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    *retired = std::move(current_);
    transfers_ = current_ = std::move(next);
    fast_.store(current_.get());
    phase_ = Phase::kReplaced;
    return true;
  }

  // Ends it: nobody waits here any more. Returns all inner backends, each once.
  std::vector<InnerPtr> close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    give_up();
    std::vector<InnerPtr> all;
    for (InnerPtr* inner : {&current_, &transfers_, &next_, &retired_}) {
      if (*inner && (all.empty() || *inner != all.front())) all.push_back(*inner);
      inner->reset();
    }
    fast_.store(nullptr);
    return all;
  }

  // Threads that wait go on with the current inner backend, unless the handover is decided.
  void let_go() {
    const std::lock_guard<std::mutex> lock(mutex_);
    give_up();
  }

  // Called by any thread:

  InnerPtr current() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return current_;
  }

  // The inner backends that finish() has not given out, each once, the current one first.
  std::vector<InnerPtr> in_use() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<InnerPtr> all;
    for (const InnerPtr& inner : {current_, transfers_, next_, retired_}) {
      if (inner && (all.empty() || inner != all.front())) all.push_back(inner);
    }
    return all;
  }

  uint64_t collectives() const noexcept { return collectives_of(issuing_.load()); }

  bool armed() const noexcept { return armed_.load(std::memory_order_relaxed); }

  bool closed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  // Waits of operations in the last handover, and the longest of them.
  struct Waits {
    uint64_t count = 0;
    std::chrono::nanoseconds longest{0};
  };
  Waits waits() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waits_;
  }

 private:
  enum class Phase { kIdle, kHolding, kDecided, kReplaced };
  using Kind = typename Ticket::Kind;

  // All below with mutex_ held, except leave() and wait(), which take it.

  Inner* route(Ticket& ticket) {
    if (phase_ == Phase::kReplaced && ticket.kind_ != Kind::kUncounted) return nullptr;
    switch (ticket.kind_) {
      case Kind::kCollective:
        if (phase_ == Phase::kIdle) return current_.get();
        if (phase_ == Phase::kHolding) {
          return ticket.number_ < hold_.collectives ? current_.get() : nullptr;
        }
        return ticket.number_ < decided_.collectives ? current_.get() : next_.get();
      case Kind::kTransfer:
        if (phase_ == Phase::kIdle || stops_ || hold_.transfers_stay) return transfers_.get();
        if (phase_ == Phase::kHolding) {
          return ticket.number_ < count_at(hold_, ticket.key_) ? transfers_.get() : nullptr;
        }
        if (decided_.transfers_stay) return transfers_.get();
        return ticket.number_ < last_count(ticket.key_) ? transfers_.get() : next_.get();
      case Kind::kAnySource:
        return route_any_source(ticket);
      case Kind::kUncounted:
        break;
    }
    return current_.get();
  }

  Inner* route_any_source(Ticket& ticket) {
    if (phase_ == Phase::kHolding && !stops_ && !hold_.transfers_stay) return nullptr;
    count_.transfers_stay = true;
    if (phase_ != Phase::kDecided || stops_ || decided_.transfers_stay) return transfers_.get();
    // A message that was sent before the handover must be received on the same backend.
    for (const auto& [key, count] : decided_.transfers) {
      if (key.sends || key.tag != ticket.key_.tag) continue;
      if (count_.transfers[key] >= count) continue;
      ++count_.transfers[key];
      return transfers_.get();
    }
    return next_.get();
  }

  static uint64_t count_at(const Counts& counts, const Transfer& key) {
    const auto found = counts.transfers.find(key);
    return found == counts.transfers.end() ? 0 : found->second;
  }

  // A key that the decision does not name had the same count at both ends.
  uint64_t last_count(const Transfer& key) const {
    const auto found = decided_.transfers.find(key);
    return found != decided_.transfers.end() ? found->second : count_at(hold_, key);
  }

  bool has_passed() const {
    // An operation on its way may still be refused, and its number reused. Both values are read at
    // the same moment, because an operation could enter between two reads with the last number.
    return has_passed(issuing_.load());
  }

  bool has_stopped() const {
    if (phase_ != Phase::kDecided || !stops_ || stopped_ == 0) return false;
    // Whoever waits has a number, and is on its way to the next backend.
    return has_passed(issuing_.load() - stopped_ * kActive);
  }

  bool has_passed(uint64_t issuing) const {
    if (issuing >= kActive || collectives_of(issuing) < decided_.collectives) return false;
    if (decided_.transfers_stay) return true;
    for (const auto& [key, count] : decided_.transfers) {
      if (count_at(count_, key) < count) return false;
    }
    return true;
  }

  void pass() {
    if (phase_ != Phase::kDecided || stops_ || !has_passed()) return;
    retired_ = std::move(current_);
    current_ = std::move(next_);
    fast_.store(current_.get());
    if (!decided_.transfers_stay) {
      transfers_ = current_;
    } else if (retired_ == transfers_) {
      retired_.reset();
    }
    passed_ = true;
    phase_ = Phase::kIdle;
    armed_.store(false);
  }

  void give_up() {
    if (phase_ == Phase::kIdle || (phase_ == Phase::kDecided && !stops_)) return;
    phase_ = Phase::kIdle;
    armed_.store(false);
    changed_.notify_all();
  }

  void wait(Ticket& ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto begin = Clock::now();
    while (!(ticket.inner_ = route(ticket))) {
      const uint64_t stops = phase_ == Phase::kDecided ? 1 : 0;
      stopped_ += stops;
      if (changed_.wait_until(lock, begin + limit_) == std::cv_status::timeout) give_up();
      stopped_ -= stops;
    }
    const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
    ++waits_.count;
    if (waited > waits_.longest) waits_.longest = waited;
  }

  void leave(const Ticket& ticket) noexcept {
    const bool gives_back = !ticket.issued_ && ticket.kind_ == Kind::kCollective;
    if (!ticket.issued_ && ticket.kind_ == Kind::kTransfer) {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = count_.transfers.find(ticket.key_);
      if (found != count_.transfers.end() && found->second > 0) --found->second;
    }
    // The last one out checks. A thread that checked from time to time might always find one
    // inside.
    const uint64_t left = kActive + (gives_back ? 1 : 0);
    if (issuing_.fetch_sub(left) - left < kActive && armed_.load()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      pass();
    }
  }

  // Operations on their way times kActive, plus collectives so far: one word, for has_passed().
  static constexpr uint64_t kActive = uint64_t{1} << 48;
  static uint64_t collectives_of(uint64_t issuing) noexcept { return issuing & (kActive - 1); }
  std::atomic<uint64_t> issuing_{0};
  std::atomic<bool> armed_{false};
  std::atomic<Inner*> fast_;  // current_, for threads while there is no handover

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Phase phase_ = Phase::kIdle;
  bool closed_ = false;
  InnerPtr current_;
  InnerPtr transfers_;
  InnerPtr next_;
  InnerPtr retired_;  // until finish() returns it
  bool passed_ = false;
  Counts count_;  // of transfers; issuing_ counts the rest
  Counts hold_;
  Counts decided_;
  bool stops_ = false;    // true: the next backend is made when this rank has stopped
  uint64_t stopped_ = 0;  // operations that wait for it
  std::chrono::milliseconds limit_{0};
  Waits waits_;
};

}  // namespace crux
