#include "real_calls.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace crux::transport {
namespace {

// Used if no other library defines these functions.
int raw_connect(int fd, const sockaddr* address, socklen_t size) {
  return static_cast<int>(::syscall(SYS_connect, fd, address, size));
}
int raw_accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  return static_cast<int>(::syscall(SYS_accept4, fd, address, size, flags));
}
int raw_accept(int fd, sockaddr* address, socklen_t* size) {
  return raw_accept4(fd, address, size, 0);
}

template <class Function>
Function next(const char* name, Function otherwise) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  return found == nullptr ? otherwise : reinterpret_cast<Function>(found);
}

}  // namespace

RealCalls real_calls() {
  // Several threads, or a signal handler, may look at once: they find the same.
  static std::atomic<decltype(RealCalls::connect)> connect{nullptr};
  static std::atomic<decltype(RealCalls::accept)> accept{nullptr};
  static std::atomic<decltype(RealCalls::accept4)> accept4{nullptr};
  if (accept4.load(std::memory_order_acquire) == nullptr) {
    connect.store(next("connect", raw_connect), std::memory_order_relaxed);
    accept.store(next("accept", raw_accept), std::memory_order_relaxed);
    accept4.store(next("accept4", raw_accept4), std::memory_order_release);
  }
  return {connect.load(std::memory_order_relaxed), accept.load(std::memory_order_relaxed),
          accept4.load(std::memory_order_relaxed)};
}

}  // namespace crux::transport
