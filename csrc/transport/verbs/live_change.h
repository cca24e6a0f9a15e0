// Changes a queue pair that is in use, by the device's own call. Only mlx5 has such calls.
#pragma once

#include <cstdint>

#include "queue_pair.h"

namespace crux::transport::verbs {

struct Outcome {
  crux_how how = CRUX_UNTOUCHED;
  int error = 0;
  const char* reason = "";  // why the change was not made
};

// `udp_port` 0 and `rate_Bps` UINT64_MAX leave that setting; `rate_Bps` 0 removes the limit.
Outcome change(QueuePair& pair, uint16_t udp_port, uint64_t rate_Bps);

}  // namespace crux::transport::verbs
