#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace crux {

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
