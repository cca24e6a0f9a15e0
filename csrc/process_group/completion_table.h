// Matches operations in flight with completions that a backend's watchdog reports later.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "operation.h"
#include "record.h"
#include "recorder.h"

namespace crux {

// Operation: see operation.h.
template <typename Operation>
class CompletionTable {
 public:
  // Gets each operation that has completed, with its duration in ns or kUnknownTime. Called where
  // the watchdog reports, which may be on the thread that issues: it must be quick.
  using Done = std::function<void(Operation&&, int64_t device_ns)>;

  CompletionTable(Recorder& recorder, Done done) : recorder_(recorder), done_(std::move(done)) {}

  // What never completed is recorded as such, so that no operation goes missing.
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
        // The backend used its key again: what bore it before will never be heard of.
        push_incomplete(found->second);
        found->second = std::move(operation);
        return;
      }
      device_ns = early->second;
      early_.erase(early);
    }
    done_(std::move(operation), device_ns);
  }

  // May come before issued(): the watchdog can win the race against the issuing thread.
  void completed(uint64_t key, int64_t device_ns) {
    typename std::unordered_map<uint64_t, Operation>::node_type node;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      node = pending_.extract(key);
      if (node.empty()) {
        // What was issued while nobody recorded, or timed, completes here too.
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
