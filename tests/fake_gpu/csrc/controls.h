// What tests turn: settings of the fake NCCL, faults to inject, deliberately broken contracts, and
// the log of what was issued. No torch in here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "stream.h"

namespace fake_gpu {

// Of the communicators that are made from now on.
struct Settings {
  // torch's ProcessGroupNCCL instead of nccl2.
  bool legacy = false;
  int64_t watchdog_period_ns = 20'000'000;
  // TORCH_NCCL_ENABLE_TIMING.
  bool timing = false;
  // Completion hooks run while another thread holds the GIL.
  bool strict_hooks = false;
};

struct Fault {
  std::string kind;  // delay, late, hold, error, refuse
  std::string op;    // empty: any
  double seconds = 0;
  int64_t count = 1;
  int rank = -1;  // -1: any
};

// What is known of an operation of a communicator.
struct Issued {
  std::string op;
  uint64_t sequence = 0;
  std::string group;
  int rank = 0;
  int size = 0;
  int device = 0;
  int64_t stream = 0;
  int64_t on_stream = 0;
  int64_t bytes = 0;
  int peer = -1;
  int tag = 0;
  int64_t timeout_ms = 0;
  bool async = true;
  bool captured = false;
  bool coalesced = false;
  uint64_t thread = 0;
  int64_t issue_ns = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

class Controls {
 public:
  static Controls& instance();

  Settings settings() const;
  void set(const Settings& settings);

  void inject(const Fault& fault);
  // The faults that meet this operation, each counted down.
  std::vector<Fault> take(const std::string& op, int rank);
  // Lets go of what "hold" holds back, and forgets the faults that are left.
  void release();
  // Which hold is in force; what was held before the next release() is let go by it.
  uint64_t holds() const;
  void wait_for_release(uint64_t held, const std::atomic<bool>& aborted);

  size_t log(const Issued& issued);
  void started(size_t index, int64_t ns);
  void ended(size_t index, int64_t ns);
  std::vector<Issued> issued() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::condition_variable released_;
  Settings settings_;
  std::vector<Fault> faults_;
  std::vector<Issued> issued_;
  size_t forgotten_ = 0;
  uint64_t releases_ = 0;
};

}  // namespace fake_gpu
