#include "wiped.h"

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>

namespace crux::transport {
namespace {

// For a kernel that can't wipe memory (before Linux 4.14, gVisor): the child of a fork() does it.
struct ByHand {
  std::atomic<void*> memory{nullptr};
  std::atomic<size_t> size{0};
};
std::array<ByHand, 16> by_hand;

void wipe() {
  for (ByHand& each : by_hand) {
    if (void* const memory = each.memory.load()) std::memset(memory, 0, each.size.load());
  }
}

bool wipe_by_hand(void* memory, size_t size) {
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

}  // namespace

void* map_wiped(size_t size) {
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (::madvise(memory, size, MADV_WIPEONFORK) == 0 || wipe_by_hand(memory, size)) return memory;
  ::munmap(memory, size);
  throw std::bad_alloc();
}

void unmap_wiped(void* memory, size_t size) {
  for (ByHand& each : by_hand) {
    void* mine = memory;
    each.memory.compare_exchange_strong(mine, nullptr);
  }
  ::munmap(memory, size);
}

}  // namespace crux::transport
