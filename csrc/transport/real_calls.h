// The functions that this library interposes, from the next library in the search order.
#pragma once

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace crux::transport {

// Found by the first call, which may come before this library is initialised, and from several
// threads or a signal handler at once: all find the same. Takes no lock of its own. If no other
// library defines the function, `raw` is called.
template <class Function>
Function* real_call(std::atomic<Function*>& known, const char* name, Function* raw) {
  Function* found = known.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  found = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
  if (found == nullptr) found = raw;
  known.store(found, std::memory_order_release);
  return found;
}

inline auto* real_connect() {
  static std::atomic<int (*)(int, const sockaddr*, socklen_t)> known{nullptr};
  return real_call(
      known, "connect", +[](int fd, const sockaddr* address, socklen_t size) {
        return static_cast<int>(::syscall(SYS_connect, fd, address, size));
      });
}

inline auto* real_accept4() {
  static std::atomic<int (*)(int, sockaddr*, socklen_t*, int)> known{nullptr};
  return real_call(
      known, "accept4", +[](int fd, sockaddr* address, socklen_t* size, int flags) {
        return static_cast<int>(::syscall(SYS_accept4, fd, address, size, flags));
      });
}

inline auto* real_accept() {
  static std::atomic<int (*)(int, sockaddr*, socklen_t*)> known{nullptr};
  return real_call(
      known, "accept", +[](int fd, sockaddr* address, socklen_t* size) {
        return static_cast<int>(::syscall(SYS_accept4, fd, address, size, 0));
      });
}

}  // namespace crux::transport
