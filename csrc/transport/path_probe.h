// Finds a source port that leads over the wanted path.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "routes.h"
#include "syn_probe.h"

namespace crux::transport {

struct ProbeLimits {
  std::chrono::milliseconds time{250};
  uint32_t probes = 1024;
};

struct PathFound {
  uint16_t port = 0;  // 0: none, and `error` says why as enum crux_how explains
  int error = 0;
  uint32_t probes = 0;
  int via_ttl = 0;  // of the last answer that counts
  Address via;
};

// Looks for a source port whose SYN passes, at every TTL of `route`, one of the addresses listed
// for it.
//
// It tries the ports in the range of `ports`, from the `start`-th on. Routers limit the rate of
// their ICMP errors, so it repeats unanswered probes in smaller bursts and after a pause. A port
// that was found is probed again. Where another router answers now, packets are sprayed and no port
// leads anywhere. `claim` has to take a port that was found. If it can't, because another socket
// was faster, the search goes on.
PathFound find_port(const ProbedConnection& connection, const Route& route, const Routes& ports,
                    uint16_t start, const ProbeLimits& limits,
                    const std::function<bool(uint16_t)>& claim);

}  // namespace crux::transport
