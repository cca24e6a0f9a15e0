// Matches operations in flight with the completions that a backend's watchdog reports later.
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
