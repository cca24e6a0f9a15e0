#include <algorithm>
#include <stdexcept>

#include "schedule.h"

namespace crux::schedule {
namespace {

// Sums are taken over whole steps of 2^-32, which doubles add exactly: the order of a path's links
// does not matter then.
constexpr double kSteps = 4294967296.0;
// From here on every double is whole.
constexpr double kWhole = 4503599627370496.0;

// The nearest whole number, the even one of two; x is not negative.
double rounded(double x) { return x < kWhole ? (x + kWhole) - kWhole : x; }

class Loads {
 public:
  Loads(const Candidates& candidates, View<double> capacity_Bps)
      : candidates_(candidates), links_(capacity_Bps.size()) {
    std::transform(capacity_Bps.begin(), capacity_Bps.end(), links_.begin(),
                   [](double capacity) { return Link{0.0, 1.0 / capacity}; });
  }

  // The best path of a set for one more flow of that rate.
  std::int64_t best(std::int64_t set, double rate_Bps) const {
    const std::int64_t first = candidates_.set_start[set];
    const std::int64_t end = candidates_.set_start[set + 1];
    std::int64_t taken = first;
    double least = busiest(first, rate_Bps);
    double least_sum = -1.0;
    for (std::int64_t path = first + 1; path < end; ++path) {
      const double here = busiest(path, rate_Bps);
      if (here > least) continue;
      // Sums only decide between equals, which are few.
      if (here == least) {
        if (least_sum < 0.0) least_sum = sum(taken, rate_Bps);
        const double here_sum = sum(path, rate_Bps);
        if (!(here_sum < least_sum)) continue;
        least_sum = here_sum;
      } else {
        least_sum = -1.0;
      }
      taken = path;
      least = here;
    }
    return taken;
  }

  void add(std::int64_t path, double rate_Bps) {
    for (const std::int32_t* link = begin(path); link != end(path); ++link) {
      links_[*link].load_Bps += rate_Bps;
    }
  }

 private:
  const std::int32_t* begin(std::int64_t path) const {
    return candidates_.path_links.begin() + candidates_.path_start[path];
  }
  const std::int32_t* end(std::int64_t path) const { return begin(path + 1); }

  double utilisation(std::int32_t link, double rate_Bps) const {
    return (links_[link].load_Bps + rate_Bps) * links_[link].per_Bps;
  }

  // The highest utilisation of the path's links.
  double busiest(std::int64_t path, double rate_Bps) const {
    double highest = 0.0;
    for (const std::int32_t* link = begin(path); link != end(path); ++link) {
      highest = std::max(highest, utilisation(*link, rate_Bps));
    }
    return highest;
  }

  double sum(std::int64_t path, double rate_Bps) const {
    double total = 0.0;
    for (const std::int32_t* link = begin(path); link != end(path); ++link) {
      total += rounded(utilisation(*link, rate_Bps) * kSteps);
    }
    return total;
  }

  struct Link {
    double load_Bps;
    double per_Bps;  // one over the capacity
  };
  const Candidates& candidates_;
  std::vector<Link> links_;
};

}  // namespace

std::vector<std::int64_t> place(const Candidates& candidates, View<double> capacity_Bps,
                                View<std::int64_t> flow_set, View<double> rate_Bps, int sweeps) {
  candidates.check(capacity_Bps.size());
  if (flow_set.size() != rate_Bps.size()) throw std::invalid_argument("every flow needs a rate");
  candidates.check_flows(flow_set);

  Loads loads(candidates, capacity_Bps);
  std::vector<std::int64_t> path(flow_set.size());
  for (std::size_t f = 0; f < path.size(); ++f) {
    path[f] = loads.best(flow_set[f], rate_Bps[f]);
    loads.add(path[f], rate_Bps[f]);
  }
  bool moved = true;
  for (int sweep = 0; sweep < sweeps && moved; ++sweep) {
    moved = false;
    for (std::size_t f = 0; f < path.size(); ++f) {
      loads.add(path[f], -rate_Bps[f]);
      const std::int64_t better = loads.best(flow_set[f], rate_Bps[f]);
      moved = moved || better != path[f];
      path[f] = better;
      loads.add(better, rate_Bps[f]);
    }
  }
  for (std::size_t f = 0; f < path.size(); ++f) path[f] -= candidates.set_start[flow_set[f]];
  return path;
}

}  // namespace crux::schedule
