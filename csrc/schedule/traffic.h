#pragma once

#include <cstdint>
#include <vector>

#include "candidates.h"

namespace crux::schedule {

// Bytes by job and link: those of job j are entries start[j] to start[j + 1], its links ascending.
struct Traffic {
  std::vector<std::int32_t> start{0};
  std::vector<std::int32_t> links;
  std::vector<double> bytes;
};

// What each job moves on each link of finite capacity when its flows take the `choice`-th of their
// candidates. A link's bytes are added in the order of the flows: another may differ in the last
// bit.
//
// flow_start: flows of job j are flow_start[j] to flow_start[j + 1].
//
// Throws std::invalid_argument for a number out of its range.
Traffic traffic(const Candidates& candidates, View<double> capacity_Bps,
                View<std::int64_t> flow_start, View<std::int64_t> flow_set, View<double> flow_bytes,
                View<std::int64_t> choice);

}  // namespace crux::schedule
