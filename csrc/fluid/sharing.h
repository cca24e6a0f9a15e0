#pragma once

#include <cstdint>
#include <vector>

#include "spec.h"

namespace crux::fluid {

// The jobs that cross each link, and the links that can hold anybody up.
//
// A link is contended when the jobs on it, each at the rate it would have alone, want more than its
// capacity, unless another link dominates it: one that all its jobs cross too, and that each of
// them fills at least as much. No job ever waits for a link that is not contended, whatever the
// levels: such links are left out of the allocation, and jobs that share only such links are
// independent.
class Sharing {
 public:
  struct User {
    JobId job;
    double peak_Bps;
    double least_Bps;
  };

  explicit Sharing(const Network& network);

  // Both return the links whose contention changed.
  const std::vector<LinkId>& add(JobId job, const std::vector<Footprint>& footprint);
  const std::vector<LinkId>& remove(JobId job, const std::vector<Footprint>& footprint);

  bool contended(LinkId link) const { return links_[link].contended; }
  // True if jobs could meet on the link with this much more on it.
  bool contended_with(LinkId link, double peak_Bps) const;
  // Ascending.
  const std::vector<User>& users(LinkId link) const { return links_[link].users; }

 private:
  struct Link {
    double capacity_Bps;
    bool overbooked = false;
    bool dominated = false;
    bool contended = false;
    std::vector<User> users;
  };
  struct Overbooked {
    LinkId link;
    std::uint64_t users;  // as bits
  };

  static double demand(const Link& link);
  static bool dominates(const Link& a, const Link& b);
  void book(LinkId link);
  void refresh(LinkId link);

  std::vector<Link> links_;
  std::vector<Overbooked> overbooked_;  // of the job that is added
  std::vector<LinkId> flipped_;
};

}  // namespace crux::fluid
