#include "real_calls.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

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

const RealCalls& real_calls() {
  static const RealCalls calls{next("connect", raw_connect), next("accept", raw_accept),
                               next("accept4", raw_accept4)};
  return calls;
}

}  // namespace crux::transport
