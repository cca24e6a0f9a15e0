// The interface of the queue-pair half (verbs/), which is built only if <infiniband/verbs.h> is
// installed. Otherwise the weak functions in exports.cc answer.
#pragma once

#include <vector>

#include "crux_transport.h"

namespace crux::transport {

// Whether ibv_modify_qp() of this process goes through the stand-in.
bool sees_queue_pairs();
// Appends the queue pairs of this process to `out`.
void list_queue_pairs(std::vector<crux_connection>& out);

}  // namespace crux::transport
