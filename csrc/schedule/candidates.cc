#include "candidates.h"

#include <algorithm>
#include <stdexcept>

namespace crux::schedule {

void check_starts(View<std::int64_t> starts, std::size_t size) {
  if (starts.size() == 0 || starts[0] != 0 ||
      starts[starts.size() - 1] != static_cast<std::int64_t>(size) ||
      !std::is_sorted(starts.begin(), starts.end())) {
    throw std::invalid_argument("starts must ascend from 0 to the number of what they start");
  }
}

void Candidates::check(std::size_t links) const {
  check_starts(path_start, path_links.size());
  check_starts(set_start, path_start.size() - 1);
  // The top bit of what is below 0 or above the last link; without a branch for each it is fast.
  const auto last = static_cast<std::uint32_t>(links - 1);
  std::uint32_t outside = 0;
  for (const std::int32_t link : path_links) {
    const auto number = static_cast<std::uint32_t>(link);
    outside |= number | (last - number);
  }
  if (outside >> 31 != 0) {
    throw std::invalid_argument("a path crosses a link that there is not");
  }
}

void Candidates::check_flows(View<std::int64_t> flow_set) const {
  for (const std::int64_t set : flow_set) {
    if (set < 0 || static_cast<std::size_t>(set) >= sets() ||
        set_start[set] == set_start[set + 1]) {
      throw std::invalid_argument("a flow has no candidate path");
    }
  }
}

}  // namespace crux::schedule
