// Sums over the flows of each job: the traffic of links, and transfer times before paths are
// chosen.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "link_set.h"
#include "schedule.h"

namespace crux::schedule {
namespace {

void check_jobs(const Candidates& candidates, View<double> capacity_Bps,
                View<std::int64_t> flow_start, View<std::int64_t> flow_set,
                View<double> flow_bytes) {
  candidates.check(capacity_Bps.size());
  candidates.check_flows(flow_set);
  if (flow_set.size() != flow_bytes.size()) throw std::invalid_argument("every flow needs bytes");
  check_starts(flow_start, flow_set.size());
}

}  // namespace

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

Traffic traffic(const Candidates& candidates, View<double> capacity_Bps,
                View<std::int64_t> flow_start, View<std::int64_t> flow_set, View<double> flow_bytes,
                View<std::int64_t> choice) {
  check_jobs(candidates, capacity_Bps, flow_start, flow_set, flow_bytes);
  if (flow_set.size() != choice.size()) throw std::invalid_argument("every flow needs a choice");

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

std::vector<double> unrouted_transfer_times_s(const Candidates& candidates,
                                              View<double> capacity_Bps,
                                              View<std::int64_t> flow_start,
                                              View<std::int64_t> flow_set,
                                              View<double> flow_bytes) {
  check_jobs(candidates, capacity_Bps, flow_start, flow_set, flow_bytes);
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
