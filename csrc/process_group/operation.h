// An operation on an accelerator, and how its begin and end are computed.
//
// Its backend reports its exact duration, but late. A mark on the stream that it was issued on
// tells when the device reached it. The operations of a communicator run one after the other, so
//
//   begin_i = max(reached_i, end_{i-1}),   end_i = begin_i + duration_i.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "record.h"
#include "recorder.h"

namespace crux {

// Mark: reached_ns() gives CLOCK_MONOTONIC in ns, kUnknownTime if the device does not tell.
template <typename Mark>
struct Operation {
  Record whole;
  std::vector<Record> parts;  // of a coalesced block, which the device runs as one
  Mark mark;
};

// The parts of a block get the times of the whole block, because nothing tells them apart.
inline void push(Recorder& recorder, const Record& whole, std::vector<Record>& parts) {
  for (Record& part : parts) {
    part.start_ns = whole.start_ns;
    part.end_ns = whole.end_ns;
    part.device_ns = whole.device_ns;
    part.status = whole.status;
    part.flags |= whole.flags;
    recorder.push(part);
  }
  recorder.push(whole);
}

// The operations of one inner backend.
class Lanes {
 public:
  static constexpr int32_t kCollectives = -1;

  explicit Lanes(Recorder& recorder) : recorder_(recorder) {}

  // Records an operation that has ended, or whose end nobody will report.
  template <typename Mark>
  void finish(Operation<Mark>& operation, int64_t device_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    place(operation.whole, operation.mark.reached_ns(), device_ns);
    push(recorder_, operation.whole, operation.parts);
  }

  // Each pair of ranks has its own stream for transfers; collectives share one.
  static int32_t lane_of(const Record& record) noexcept {
    const bool is_transfer = record.op == Op::kSend || record.op == Op::kRecv;
    return is_transfer ? record.peer : kCollectives;
  }

 private:
  // At most this many are reported out of order at a time.
  static constexpr size_t kKnownEnds = 1024;

  // Sets `whole.start_ns` to when its stream reached it, or to when it was issued if that is
  // unknown. Its begin is `end_ns - device_ns`. If the duration is unknown, so is the end.
  void place(Record& whole, int64_t reached_ns, int64_t device_ns) {
    whole.start_ns = reached_ns != kUnknownTime ? reached_ns : whole.issue_ns;
    if (reached_ns != kUnknownTime) whole.flags |= kDeviceClock;
    whole.device_ns = device_ns;
    if (device_ns == kUnknownTime) return;
    // Ends are not always reported in order, because backends have a queue for each stream.
    auto& ends = ends_[lane_of(whole)];
    const auto next = ends.lower_bound(whole.sequence);
    const int64_t before_ns = next == ends.begin() ? kUnknownTime : std::prev(next)->second;
    whole.end_ns = std::max(whole.start_ns, before_ns) + device_ns;
    ends.emplace_hint(next, whole.sequence, whole.end_ns);
    if (ends.size() > kKnownEnds) ends.erase(ends.begin());
  }

  Recorder& recorder_;
  std::mutex mutex_;
  std::map<int32_t, std::map<uint64_t, int64_t>> ends_;  // by lane and sequence
};

// Matches operations in flight with the completions that a backend's watchdog reports later.
template <typename Operation>
class CompletionTable {
 public:
  // Receives each completed operation, with its duration in ns or kUnknownTime. Called on the
  // thread that reports, which may be the one that issues, so it must be quick.
  using Done = std::function<void(Operation&&, int64_t device_ns)>;

  CompletionTable(Recorder& recorder, Done done) : recorder_(recorder), done_(std::move(done)) {}

  // Records operations that never completed as incomplete, so that none is missing.
  ~CompletionTable() {
    for (auto& [key, operation] : pending_) push_incomplete(operation);
  }

  CompletionTable(const CompletionTable&) = delete;
  CompletionTable& operator=(const CompletionTable&) = delete;

  void issued(uint64_t key, Operation&& operation) {
    int64_t device_ns = kUnknownTime;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto early = early_.find(key);
      if (early == early_.end()) {
        const auto [found, inserted] = pending_.try_emplace(key, std::move(operation));
        if (inserted) return;
        // The backend reuses the key, so the operation that had it will never be reported.
        push_incomplete(found->second);
        found->second = std::move(operation);
        return;
      }
      device_ns = early->second;
      early_.erase(early);
    }
    done_(std::move(operation), device_ns);
  }

  // May be called before issued(), if the watchdog is faster than the issuing thread.
  void completed(uint64_t key, int64_t device_ns) {
    typename std::unordered_map<uint64_t, Operation>::node_type node;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      node = pending_.extract(key);
      if (node.empty()) {
        // Operations that were issued while nobody recorded or timed also complete here.
        if (!recorder_.timing()) return;
        if (early_.size() >= kMaxEarly) early_.clear();
        early_[key] = device_ns;
        return;
      }
    }
    done_(std::move(node.mapped()), device_ns);
  }

 private:
  static constexpr size_t kMaxEarly = 4096;

  void push_incomplete(Operation& operation) {
    operation.whole.status = Status::kIncomplete;
    push(recorder_, operation.whole, operation.parts);
  }

  Recorder& recorder_;
  const Done done_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Operation> pending_;
  std::unordered_map<uint64_t, int64_t> early_;
};

}  // namespace crux
