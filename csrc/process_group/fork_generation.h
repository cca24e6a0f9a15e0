#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace crux {

namespace internal {
inline std::atomic<uint32_t> forks{0};
}  // namespace internal

// Differs between a process and those forked from it: threads, and locks that they held, stay with
// the parent, and what the parent has borrowed is not the child's to give back.
inline uint32_t fork_generation() noexcept {
  // It fails only for want of memory; then a forked process takes itself for its parent.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++internal::forks; });
  (void)registered;
  return internal::forks.load(std::memory_order_relaxed);
}

}  // namespace crux
