// What this process knows: its connections and the routes in force.
#pragma once

#include <atomic>

#include "crux_transport.h"
#include "path_probe.h"
#include "registry.h"
#include "routes.h"

namespace crux::transport {

struct Transport {
  Registry registry;
  Routes routes;
  bool enabled = true;              // false: CRUX_TRANSPORT=0 or CRUX_DISABLE
  bool steer_all = false;           // CRUX_TRANSPORT_STEER_ALL
  bool log = false;                 // CRUX_TRANSPORT_LOG
  ProbeLimits limits;               // CRUX_TRANSPORT_PROBE_MS
  std::atomic<bool> called{false};  // a connect() has come through
};

// Null before this library was initialised; never destroyed, as connections are made until the
// process has ended.
Transport* transport();

// The owner that this thread pushed last, null where there is none.
const char* current_owner();

}  // namespace crux::transport
