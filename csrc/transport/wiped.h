// Memory that a child finds zeroed, whether fork(), _Fork() or clone() made it.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

namespace crux::transport {

namespace internal {

// Memory that the child of a fork() wipes, since the kernel can't (before Linux 4.14, gVisor).
struct ByHand {
  std::atomic<void*> memory{nullptr};
  std::atomic<size_t> size{0};
};
inline std::array<ByHand, 16> by_hand;

inline void wipe() {
  for (ByHand& each : by_hand) {
    if (void* const memory = each.memory.load()) std::memset(memory, 0, each.size.load());
  }
}

inline bool wipe_by_hand(void* memory, size_t size) {
  static const int refused = ::pthread_atfork(nullptr, nullptr, wipe);
  if (refused != 0) return false;
  for (ByHand& each : by_hand) {
    void* none = nullptr;
    if (!each.memory.compare_exchange_strong(none, memory)) continue;
    each.size.store(size);
    return true;
  }
  return false;
}

}  // namespace internal

// Zeroed, in a child again. Throws std::bad_alloc.
inline void* map_wiped(size_t size) {
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (::madvise(memory, size, MADV_WIPEONFORK) == 0 || internal::wipe_by_hand(memory, size))
    return memory;
  ::munmap(memory, size);
  throw std::bad_alloc();
}
inline void unmap_wiped(void* memory, size_t size) {
  for (internal::ByHand& each : internal::by_hand) {
    void* mine = memory;
    each.memory.compare_exchange_strong(mine, nullptr);
  }
  ::munmap(memory, size);
}

// A T of which the child of this process gets a new one. So a lock that another thread of the
// parent held is free in the child, and nobody has to take locks before a fork, which a signal
// handler may do at any moment. Zeroed memory has to be a T: that of new std::mutex and std::atomic
// is.
template <class T>
class Wiped {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  Wiped() : it_(new (map_wiped(sizeof(T))) T()) {}
  ~Wiped() { unmap_wiped(it_, sizeof(T)); }
  Wiped(const Wiped&) = delete;
  Wiped& operator=(const Wiped&) = delete;

  T* operator->() const { return it_; }
  T& operator*() const { return *it_; }

 private:
  T* const it_;
};

// This process's T. It is never destroyed; a child leaves its parent's alone, because another
// thread may have held its lock.
template <class T>
T& own() {
  static const Wiped<std::atomic<T*>>& known = *new Wiped<std::atomic<T*>>;
  T* at = known->load();
  if (at != nullptr) return *at;
  // Only for a search for leaks, which does not look into mapped memory.
  static std::atomic<T*> reachable;
  T* const made = new T;
  if (known->compare_exchange_strong(at, made)) {
    reachable.store(made);
    return *made;
  }
  delete made;
  return *at;
}

}  // namespace crux::transport
