// Matches records of operations in flight with completions that a backend's watchdog reports later.
#pragma once

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

  void issued(uint64_t key, Record record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto early = early_.find(key);
    if (early == early_.end()) {
      pending_[key] = record;
      return;
    }
    record.device_ns = early->second;
    early_.erase(early);
    recorder_.push(record);
  }

  // May come before issued(): the watchdog can win the race against the issuing thread.
  void completed(uint64_t key, int64_t device_ns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(key);
    if (found == pending_.end()) {
      early_[key] = device_ns;
      return;
    }
    found->second.device_ns = device_ns;
    recorder_.push(found->second);
    pending_.erase(found);
  }

 private:
  Recorder& recorder_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, Record> pending_;
  std::unordered_map<uint64_t, int64_t> early_;
};

}  // namespace crux
