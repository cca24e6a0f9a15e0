// What the rest of the library asks of the queue-pair half (verbs/), which is built where
// <infiniband/verbs.h> is there. Without it, exports.cc has weak answers.
#pragma once

#include <vector>

#include "crux_transport.h"

namespace crux::transport {

// Whether ibv_modify_qp() of this process goes through the stand-in.
bool sees_queue_pairs();
// Appends the queue pairs of this process.
void list_queue_pairs(std::vector<crux_connection>& out);

}  // namespace crux::transport
