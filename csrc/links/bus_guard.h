// Survives another program that cuts a file short which is mapped here.
#pragma once

#include <cstddef>

namespace crux {

// The kernel sends SIGBUS to whoever touches a page that its file no longer has. While a range is
// watched, such a fault puts empty memory of this process alone in place of the whole range, and
// the access goes on. All other faults go to the handler that was there before.
class BusGuard {
 public:
  static constexpr size_t kRanges = 256;

  // Throws std::runtime_error if too many are watched, or the handler can't be set.
  BusGuard(void* memory, size_t size);
  ~BusGuard();
  BusGuard(const BusGuard&) = delete;
  BusGuard& operator=(const BusGuard&) = delete;

  // Whether the range is no longer the file's.
  bool lost() const noexcept;

 private:
  size_t range_;
};

}  // namespace crux
