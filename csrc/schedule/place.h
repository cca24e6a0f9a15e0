#pragma once

#include <cstdint>
#include <vector>

#include "candidates.h"

namespace crux::schedule {

// The candidate that each flow takes when flows choose one after the other: that whose most
// utilised link is least utilised once the flow is on it, then the one of the smallest sum over its
// links, then the first (Crux, section 4.1).
//
// flow_set: the candidate set of each flow, in the order in which flows choose.
// rate_Bps: what each flow asks for.
// sweeps: times that every flow then chooses again, in the same order, with all others in place.
//
// Throws std::invalid_argument for a number out of its range.
std::vector<std::int64_t> place(const Candidates& candidates, View<double> capacity_Bps,
                                View<std::int64_t> flow_set, View<double> rate_Bps, int sweeps);

}  // namespace crux::schedule
