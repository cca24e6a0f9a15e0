// This process's clock, and its forks.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

namespace crux {

// CLOCK_MONOTONIC in ns: the clock of Python's time.monotonic_ns().
inline int64_t monotonic_ns() noexcept {
  timespec now{};
  // It can only fail for a clock that does not exist.
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// An instant that is known only by its earliest and its latest time.
struct Instant {
  int64_t ns;        // CLOCK_MONOTONIC
  int64_t error_ns;  // how far from `ns` it may have been
};

inline Instant between(int64_t earliest_ns, int64_t latest_ns) noexcept {
  const int64_t ns = earliest_ns + (latest_ns - earliest_ns) / 2;
  return {ns, latest_ns - ns};
}

// The instant between the two times that is nearest to `predicted`. Its error is at most the
// prediction's, unless the two times exclude the whole prediction, because its clocks have drifted
// apart. Then the two times count.
inline Instant between(int64_t earliest_ns, int64_t latest_ns, const Instant& predicted) noexcept {
  const int64_t ns = std::clamp(predicted.ns, earliest_ns, latest_ns);
  const int64_t first_ns = std::max(earliest_ns, predicted.ns - predicted.error_ns);
  const int64_t last_ns = std::min(latest_ns, predicted.ns + predicted.error_ns);
  if (first_ns > last_ns) return {ns, std::max(ns - earliest_ns, latest_ns - ns)};
  return {ns, std::max(ns - first_ns, last_ns - ns)};
}

namespace internal {
inline std::atomic<uint32_t> forks{0};
}  // namespace internal

// Differs between a process and its forked children. Threads, and the locks that they hold, exist
// only in the parent, and the child must not return what the parent has borrowed.
inline uint32_t fork_generation() noexcept {
  // It fails only if memory runs out; then a forked process counts as its parent.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++internal::forks; });
  (void)registered;
  return internal::forks.load(std::memory_order_relaxed);
}

}  // namespace crux
