#pragma once

#include <cstdint>
#include <vector>

#include "view.h"

namespace crux::schedule {

// Candidate sets, the paths of each and the links of each: paths of set s are set_start[s] to
// set_start[s + 1], links of path p are path_links[path_start[p]] to path_links[path_start[p + 1]].
struct Candidates {
  View<std::int64_t> set_start;
  View<std::int64_t> path_start;
  View<std::int32_t> path_links;

  // Throws std::invalid_argument unless every number is within its range for that many links.
  void check(std::size_t links) const;
};

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
