#pragma once

#include <cstdint>
#include <vector>

#include "spec.h"

namespace crux::fluid {

using JobId = std::uint32_t;

// Which jobs cross which links, and on which links they can meet at all.
//
// A link is contended when the jobs on it, each at the rate it would have alone, want more than its
// capacity. On any other link no job ever waits for another, whatever the levels: such links are
// left out of the allocation, and jobs that share only such links are independent.
class Sharing {
 public:
  struct User {
    JobId job;
    double peak_Bps;
  };

  explicit Sharing(const Network& network);

  // Both return the links whose contention changed.
  const std::vector<LinkId>& add(JobId job, const std::vector<Footprint>& footprint);
  const std::vector<LinkId>& remove(JobId job, const std::vector<Footprint>& footprint);

  bool contended(LinkId link) const { return links_[link].contended; }
  // Whether the link would be contended with this much more on it.
  bool contended_with(LinkId link, double peak_Bps) const;
  const std::vector<User>& users(LinkId link) const { return links_[link].users; }

 private:
  struct Link {
    double capacity_Bps;
    bool contended = false;
    std::vector<User> users;
  };

  static double demand(const Link& link);
  void refresh(LinkId link);

  std::vector<Link> links_;
  std::vector<LinkId> flipped_;
};

}  // namespace crux::fluid
