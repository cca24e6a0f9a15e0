// The functions that this library interposes, from the next library in the search order.
#pragma once

#include <sys/socket.h>

namespace crux::transport {

struct RealCalls {
  int (*connect)(int, const sockaddr*, socklen_t);
  int (*accept)(int, sockaddr*, socklen_t*);
  int (*accept4)(int, sockaddr*, socklen_t*, int);
};

// Found by the first call, which may come before this library is initialised. Takes no lock of its
// own.
RealCalls real_calls();

}  // namespace crux::transport
