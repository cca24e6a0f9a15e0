// The gate of one process. It knows which PCIe links the operations of each group cross, and makes
// an operation wait for those of jobs with higher levels.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../process.h"
#include "gate.h"
#include "link_table.h"

namespace crux {

class LinkGate final : public Gate {
 public:
  static constexpr size_t kMaxGroups = 4096;
  // After a wait has timed out, the job is exempt for this many times the longest wait.
  static constexpr int64_t kExemptWaits = 4;

  // The gate of this process; a forked child gets its own.
  static LinkGate& process();

  LinkGate() = default;
  LinkGate(const LinkGate&) = delete;
  LinkGate& operator=(const LinkGate&) = delete;

  const Route* route(uint32_t group, int64_t bytes) noexcept override;
  bool outranked(const Route& route) noexcept override;
  uint64_t enter(uint32_t group, int64_t bytes) noexcept override;
  uint64_t try_enter(Attempt& attempt) noexcept override;
  uint64_t pass(Attempt& attempt) noexcept override;
  void give_up(Attempt& attempt) noexcept override;
  void leave(uint64_t ticket) noexcept override;
  int64_t wait_ns() const noexcept override { return wait_ns_.load(std::memory_order_relaxed); }

  // Takes a place on the link; the index is what cross() takes. Throws as LinkTable does.
  size_t join(const std::string& folder, const std::string& cluster, const std::string& link,
              const std::string& job);
  // Leaves the order: it waits for nobody and makes nobody wait. Operations in flight may still
  // leave.
  void retire();

  // Level -1: out of the order. The priority orders jobs of one level.
  void set_level(int level, double priority = 0.0);
  void set_wait_ns(int64_t wait_ns) noexcept { wait_ns_.store(wait_ns); }
  // Operations of the group cross these links from now on. Throws std::invalid_argument.
  void cross(uint32_t group, const std::vector<size_t>& links);

  std::vector<Holder> holders(size_t link) { return at(link).holders(); }
  // True if the link's file was cut short. join() makes another table of it.
  bool lost(size_t link) { return at(link).lost(); }
  // True if another job is on the link.
  bool shared(size_t link) { return at(link).shared(); }

  struct Waits {
    uint64_t count = 0;
    uint64_t ran_out = 0;
    int64_t total_ns = 0;
    int64_t longest_ns = 0;
  };
  Waits waits() const noexcept {
    return {waited_.load(), ran_out_.load(), waited_ns_.load(), longest_ns_.load()};
  }

 private:
  LinkTable& at(size_t link) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *tables_.at(link);
  }
  void count_wait(int64_t waited_ns) noexcept;
  bool forked() const noexcept { return fork_generation() != generation_; }

  const uint32_t generation_ = fork_generation();
  std::atomic<int64_t> wait_ns_{500'000'000};
  std::array<std::atomic<const Route*>, kMaxGroups> routes_{};

  std::mutex mutex_;
  std::vector<std::unique_ptr<LinkTable>> tables_;
  std::set<Route> known_routes_;
  uint32_t rank_ = 0;

  std::atomic<uint64_t> waited_{0};
  std::atomic<uint64_t> ran_out_{0};
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<int64_t> longest_ns_{0};
};

}  // namespace crux
