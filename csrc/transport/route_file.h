// Routes as text, for programs without Python.
//
//   # destination   what is wanted, in any order; the rest of a line after # is ignored
//   10.1.0.2        via 2:10.100.0.2,10.100.16.2 dscp 40 qp_dscp 26 rate 25000000 ports 49152,49153
//   2001:db8::7     via 2:2001:db8:100::2 via 3:2001:db8:200::2
//   *               dscp 10    every other destination but loopback; it takes no via and no ports
//
// via TTL:ADDRESS[,ADDRESS]...  the router at hop TTL (1 to 255) must be one of these; may be given
//                               for several TTLs
// dscp N                        of TCP connections, 0 to 63
// qp_dscp N                     of queue pairs whose program asks for DSCP 0
// overrides 0|1                 1: qp_dscp is for all queue pairs
// rate N                        bytes per second at most
// ports N[,N]...                UDP source ports of RoCEv2 queue pairs that lead over the path
#pragma once

#include <cstddef>
#include <istream>
#include <string>
#include <vector>

#include "routes.h"

namespace crux::transport {

struct RouteFile {
  std::vector<Route> routes;
  size_t ignored = 0;  // lines that could not be understood
  std::string error;   // of the first of them: its number and why
};

RouteFile parse_routes(std::istream& text);

// Reads the regular file at `path`, up to kMaxRoutesBytes. False if it can't be read or is
// something else, such as a FIFO, whose reading would wait for a writer; `why` says which.
constexpr size_t kMaxRoutesBytes = size_t{16} << 20;
bool read_routes_file(const char* path, std::string& text, std::string& why);

}  // namespace crux::transport
