// The calls that this library stands in front of, as the next library in line has them.
#pragma once

#include <sys/socket.h>

namespace crux::transport {

struct RealCalls {
  int (*connect)(int, const sockaddr*, socklen_t);
  int (*accept)(int, sockaddr*, socklen_t*);
  int (*accept4)(int, sockaddr*, socklen_t*, int);
};

// Found on the first call, which may come before this library was initialised.
const RealCalls& real_calls();

}  // namespace crux::transport
