// Which source ports lead over the wanted path, by TTL-limited connection attempts.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "address.h"
#include "routes.h"

namespace crux::transport {

// What the probes must have in common with the connection that they stand for.
struct ProbedConnection {
  Endpoint local;  // its port does not matter; the address may be any
  Endpoint peer;
  int tos = 0;
  int device = 0;  // interface index that it is bound to, 0 for none
};

struct ProbeLimits {
  std::chrono::milliseconds time{250};
  uint32_t probes = 1024;
  uint32_t burst = 16;  // open at once
};

struct PathFound {
  uint16_t port = 0;  // 0: none, and `error` says why as crux_how explains
  int error = 0;
  uint32_t probes = 0;
  int via_ttl = 0;  // of the last answer that counts
  Address via;
};

// Looks for a source port whose SYN passes, at every TTL of `route`, one of the addresses listed
// for it. An ordinary non-blocking connect() with a small TTL dies on its way, and the router that
// dropped it names itself in the socket's error queue: no privilege is needed.
//
// Ports are tried in `ports` from `start` on. Routers limit the ICMP errors that they send, so
// whatever is unanswered is tried again, in smaller bursts and after a pause. `claim` is asked to
// take a port that was found; where it can't (someone else was faster), the search goes on.
PathFound find_port(const ProbedConnection& connection, const Route& route, const Routes& ports,
                    uint16_t start, const ProbeLimits& limits,
                    const std::function<bool(uint16_t)>& claim);

}  // namespace crux::transport
