#include "unrouted.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace crux::schedule {

namespace {

// For each candidate set the seconds that a byte takes on the best of its paths.
std::vector<double> best_s_per_byte(const Candidates& candidates,
                                    const std::vector<double>& s_per_byte) {
  std::vector<double> best(candidates.sets());
  for (std::size_t set = 0; set < best.size(); ++set) {
    best[set] = std::numeric_limits<double>::infinity();
    for (auto path = candidates.set_start[set]; path < candidates.set_start[set + 1]; ++path) {
      double slowest = 0.0;
      for (auto at = candidates.path_start[path]; at < candidates.path_start[path + 1]; ++at) {
        slowest = std::max(slowest, s_per_byte[candidates.path_links[at]]);
      }
      best[set] = std::min(best[set], slowest);
    }
  }
  return best;
}

}  // namespace

std::vector<double> unrouted_transfer_times_s(const Candidates& candidates,
                                              View<double> capacity_Bps,
                                              View<std::int64_t> flow_start,
                                              View<std::int64_t> flow_set,
                                              View<double> flow_bytes) {
  candidates.check(capacity_Bps.size());
  candidates.check_flows(flow_set);
  if (flow_set.size() != flow_bytes.size()) throw std::invalid_argument("every flow needs bytes");
  check_starts(flow_start, flow_set.size());

  std::vector<double> s_per_byte(capacity_Bps.size());
  std::transform(capacity_Bps.begin(), capacity_Bps.end(), s_per_byte.begin(),
                 [](double capacity) { return 1.0 / capacity; });
  const std::vector<double> best = best_s_per_byte(candidates, s_per_byte);
  std::vector<double> moved(capacity_Bps.size());
  std::vector<std::int32_t> touched;
  std::vector<double> t_s(flow_start.size() - 1);
  for (std::size_t job = 0; job < t_s.size(); ++job) {
    for (auto f = flow_start[job]; f < flow_start[job + 1]; ++f) {
      const std::int64_t set = flow_set[f];
      const std::int64_t first = candidates.set_start[set], end = candidates.set_start[set + 1];
      t_s[job] = std::max(t_s[job], flow_bytes[f] * best[set]);
      const double share = flow_bytes[f] * (1.0 / static_cast<double>(end - first));
      if (share == 0.0) continue;
      for (auto at = candidates.path_start[first]; at < candidates.path_start[end]; ++at) {
        const std::int32_t link = candidates.path_links[at];
        if (moved[link] == 0.0) touched.push_back(link);
        moved[link] += share;
      }
    }
    for (const std::int32_t link : touched) {
      t_s[job] = std::max(t_s[job], moved[link] * s_per_byte[link]);
      moved[link] = 0.0;
    }
    touched.clear();
  }
  return t_s;
}

}  // namespace crux::schedule
