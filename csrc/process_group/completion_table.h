// Matches records of operations in flight with completions that a backend's watchdog reports later.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "record.h"
#include "recorder.h"

namespace crux {

class CompletionTable {
 public:
  explicit CompletionTable(Recorder& recorder) : recorder_(recorder) {}

  // What never completed is recorded as such, so that no operation goes missing.
  ~CompletionTable() {
    for (auto& [key, record] : pending_) {
      record.status = Status::kIncomplete;
      recorder_.push(record);
    }
  }

  CompletionTable(const CompletionTable&) = delete;
  CompletionTable& operator=(const CompletionTable&) = delete;

  void issued(uint64_t key, const Record& record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto early = early_.find(key);
    if (early != early_.end()) {
      finish(record, early->second);
      early_.erase(early);
      return;
    }
    const auto [found, inserted] = pending_.emplace(key, record);
    if (inserted) return;
    // The backend used its key again: what bore it before will never be heard of.
    found->second.status = Status::kIncomplete;
    recorder_.push(found->second);
    found->second = record;
  }

  // May come before issued(): the watchdog can win the race against the issuing thread.
  void completed(uint64_t key, int64_t device_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(key);
    if (found != pending_.end()) {
      finish(found->second, device_ns);
      pending_.erase(found);
      return;
    }
    // What was issued while nobody recorded completes here too.
    if (early_.size() >= kMaxEarly) early_.clear();
    early_[key] = device_ns;
  }

 private:
  static constexpr size_t kMaxEarly = 4096;

  // The report comes late, and only its duration is exact. Operations of one communicator run one
  // after the other, so this one began when it was issued or when the last one ended.
  void finish(Record record, int64_t device_ns) {
    record.device_ns = device_ns;
    if (device_ns != kUnknownTime) {
      record.start_ns = std::max(record.issue_ns, last_end_ns_);
      record.end_ns = last_end_ns_ = record.start_ns + device_ns;
    }
    recorder_.push(record);
  }

  Recorder& recorder_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Record> pending_;
  std::unordered_map<uint64_t, int64_t> early_;
  int64_t last_end_ns_ = kUnknownTime;
};

}  // namespace crux
