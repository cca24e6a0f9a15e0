// The state of this process: its connections and the current routes.
#pragma once

#include <atomic>
#include <vector>

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

// The queue-pair half (verbs/) is built only if <infiniband/verbs.h> is installed. Otherwise the
// weak functions in exports.cc answer.
//
// True if ibv_modify_qp() of this process goes through the stand-in.
bool sees_queue_pairs();
// Appends the queue pairs of this process to `out`.
void list_queue_pairs(std::vector<crux_connection>& out);

}  // namespace crux::transport
