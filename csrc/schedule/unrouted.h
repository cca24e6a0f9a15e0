#pragma once

#include <cstdint>
#include <vector>

#include "candidates.h"

namespace crux::schedule {

// Seconds of each job's transfer before any path is chosen: the larger of two estimates from below,
// every flow spread evenly over its candidates, and every flow alone on its best one.
//
// flow_start: flows of job j are flow_start[j] to flow_start[j + 1].
//
// Throws std::invalid_argument for a number out of its range.
std::vector<double> unrouted_transfer_times_s(const Candidates& candidates,
                                              View<double> capacity_Bps,
                                              View<std::int64_t> flow_start,
                                              View<std::int64_t> flow_set, View<double> flow_bytes);

}  // namespace crux::schedule
