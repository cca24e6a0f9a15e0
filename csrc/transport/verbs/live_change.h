// Changing a queue pair that is in use, and stopping its sends for that.
#pragma once

#include <chrono>
#include <cstdint>

#include "queue_pairs.h"

namespace crux::transport::verbs {

struct Wanted {
  int dscp = -1;                   // -1: leave
  uint16_t udp_port = 0;           // 0: leave
  uint64_t rate_Bps = UINT64_MAX;  // UINT64_MAX: leave; 0: no limit
};

struct Outcome {
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  bool is_applied = false;  // the new setting is in force; else the old one
  const char* reason = "";  // of an outcome other than the wish
};

// Stops its sends until release(), or until `lease` is over, and waits until those that are out are
// done. 0, ETIMEDOUT (then they go on), EBUSY, EOPNOTSUPP where they are not followed, ENOTCONN.
int hold(QueuePair& pair, std::chrono::milliseconds timeout, std::chrono::milliseconds lease);
// 0, or EINVAL for one that is not held.
int release(QueuePair& pair);
// By the best means: the device's own call, else by a reset where its owner allows that.
Outcome change(QueuePair& pair, const Wanted& wanted, std::chrono::milliseconds timeout);

}  // namespace crux::transport::verbs
