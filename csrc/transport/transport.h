// The state of this process: its connections and the current routes.
#pragma once

#include <atomic>

#include "crux_transport.h"
#include "path_probe.h"
#include "registry.h"
#include "routes.h"
#include "wiped.h"

namespace crux::transport {

struct Transport {
  Wiped<Registry> registry;
  Routes routes;
  bool enabled = true;              // false: CRUX_TRANSPORT=0 or CRUX_DISABLE
  bool steer_all = false;           // CRUX_TRANSPORT_STEER_ALL
  bool log = false;                 // CRUX_TRANSPORT_LOG
  ProbeLimits limits;               // CRUX_TRANSPORT_PROBE_MS
  std::atomic<bool> called{false};  // a connect() has gone through this library
};

// Null before this library is initialised. Never destroyed, because connections are made until the
// process ends.
Transport* transport();

}  // namespace crux::transport
