#pragma once

#include <cstddef>
#include <cstdint>

#include "view.h"

namespace crux::schedule {

// Candidate sets, the paths of each and the links of each: paths of set s are set_start[s] to
// set_start[s + 1], links of path p are path_links[path_start[p]] to path_links[path_start[p + 1]].
struct Candidates {
  View<std::int64_t> set_start;
  View<std::int64_t> path_start;
  View<std::int32_t> path_links;

  std::size_t sets() const { return set_start.size() - 1; }

  // Both throw std::invalid_argument: unless every number is within its range for that many links;
  // unless every flow's set has a path.
  void check(std::size_t links) const;
  void check_flows(View<std::int64_t> flow_set) const;
};

// Throws std::invalid_argument unless `starts` ascend from 0 to the `size` of what they start.
void check_starts(View<std::int64_t> starts, std::size_t size);

}  // namespace crux::schedule
