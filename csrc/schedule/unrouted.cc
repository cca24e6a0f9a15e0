#include "unrouted.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "link_set.h"

namespace crux::schedule {

std::vector<double> unrouted_transfer_times_s(const Candidates& candidates,
                                              View<double> capacity_Bps,
                                              View<std::int64_t> flow_start,
                                              View<std::int64_t> flow_set,
                                              View<double> flow_bytes) {
  candidates.check(capacity_Bps.size());
  candidates.check_flows(flow_set);
  if (flow_set.size() != flow_bytes.size()) throw std::invalid_argument("every flow needs bytes");
  check_starts(flow_start, flow_set.size());

  // Side by side: what is looked at together, millions of times.
  struct Link {
    double s_per_byte;
    double moved;
  };
  std::vector<Link> links(capacity_Bps.size());
  std::transform(capacity_Bps.begin(), capacity_Bps.end(), links.begin(),
                 [](double capacity) { return Link{1.0 / capacity, 0.0}; });
  LinkSet touched(capacity_Bps.size());
  std::vector<double> t_s(flow_start.size() - 1);
  for (std::size_t job = 0; job < t_s.size(); ++job) {
    for (auto f = flow_start[job]; f < flow_start[job + 1]; ++f) {
      if (flow_bytes[f] == 0.0) continue;
      const std::int64_t first = candidates.set_start[flow_set[f]];
      const std::int64_t end = candidates.set_start[flow_set[f] + 1];
      const double share = flow_bytes[f] * (1.0 / static_cast<double>(end - first));
      double best = std::numeric_limits<double>::infinity();
      for (auto path = first; path < end; ++path) {
        double slowest = 0.0;
        for (auto at = candidates.path_start[path]; at < candidates.path_start[path + 1]; ++at) {
          touched.add(candidates.path_links[at]);
          Link& link = links[candidates.path_links[at]];
          link.moved += share;
          slowest = std::max(slowest, link.s_per_byte);
        }
        best = std::min(best, slowest);
      }
      t_s[job] = std::max(t_s[job], flow_bytes[f] * best);
    }
    touched.drain([&](std::int32_t link) {
      const double moved = std::exchange(links[link].moved, 0.0);
      t_s[job] = std::max(t_s[job], moved * links[link].s_per_byte);
    });
  }
  return t_s;
}

}  // namespace crux::schedule
