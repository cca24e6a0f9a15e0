#include "traffic.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "link_set.h"

namespace crux::schedule {

Traffic traffic(const Candidates& candidates, View<double> capacity_Bps,
                View<std::int64_t> flow_start, View<std::int64_t> flow_set, View<double> flow_bytes,
                View<std::int64_t> choice) {
  candidates.check(capacity_Bps.size());
  candidates.check_flows(flow_set);
  if (flow_set.size() != flow_bytes.size()) throw std::invalid_argument("every flow needs bytes");
  if (flow_set.size() != choice.size()) throw std::invalid_argument("every flow needs a choice");
  check_starts(flow_start, flow_set.size());

  Traffic found;
  std::vector<double> moved(capacity_Bps.size(), 0.0);
  LinkSet touched(capacity_Bps.size());
  for (std::size_t job = 0; job + 1 < flow_start.size(); ++job) {
    for (auto f = flow_start[job]; f < flow_start[job + 1]; ++f) {
      const std::int64_t set = flow_set[f], path = candidates.set_start[set] + choice[f];
      if (choice[f] < 0 || path >= candidates.set_start[set + 1]) {
        throw std::invalid_argument("a flow takes a path that it does not have");
      }
      if (!(flow_bytes[f] > 0.0)) continue;
      for (auto at = candidates.path_start[path]; at < candidates.path_start[path + 1]; ++at) {
        const std::int32_t link = candidates.path_links[at];
        if (!std::isfinite(capacity_Bps[link])) continue;
        touched.add(link);
        moved[link] += flow_bytes[f];
      }
    }
    touched.drain([&](std::int32_t link) {
      found.links.push_back(link);
      found.bytes.push_back(std::exchange(moved[link], 0.0));
    });
    if (found.links.size() > std::numeric_limits<std::int32_t>::max()) {
      throw std::invalid_argument("too many links in use");
    }
    found.start.push_back(static_cast<std::int32_t>(found.links.size()));
  }
  return found;
}

}  // namespace crux::schedule
