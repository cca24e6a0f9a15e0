#include "sharing.h"

#include <algorithm>

namespace crux::fluid {
namespace {

// Demands that fill a link exactly must not count as contention because of rounding.
constexpr double kRounding = 1.0 + 1e-12;

}  // namespace

Sharing::Sharing(const Network& network) {
  links_.reserve(network.size());
  for (LinkId link = 0; link < network.size(); ++link) {
    links_.push_back({network.capacity(link).value(), false, {}});
  }
}

double Sharing::demand(const Link& link) {
  double sum = 0.0;
  for (const User& user : link.users) sum += user.peak_Bps;
  return sum;
}

bool Sharing::contended_with(LinkId link, double peak_Bps) const {
  const Link& l = links_[link];
  return l.contended || (!l.users.empty() && demand(l) + peak_Bps > l.capacity_Bps * kRounding);
}

void Sharing::refresh(LinkId link) {
  Link& l = links_[link];
  const bool contended = l.users.size() > 1 && demand(l) > l.capacity_Bps * kRounding;
  if (contended == l.contended) return;
  l.contended = contended;
  flipped_.push_back(link);
}

const std::vector<LinkId>& Sharing::add(JobId job, const std::vector<Footprint>& footprint) {
  flipped_.clear();
  for (const Footprint& f : footprint) {
    links_[f.link].users.push_back({job, f.peak_Bps});
    refresh(f.link);
  }
  return flipped_;
}

const std::vector<LinkId>& Sharing::remove(JobId job, const std::vector<Footprint>& footprint) {
  flipped_.clear();
  for (const Footprint& f : footprint) {
    std::vector<User>& users = links_[f.link].users;
    const auto it =
        std::find_if(users.begin(), users.end(), [job](const User& u) { return u.job == job; });
    *it = users.back();
    users.pop_back();
    refresh(f.link);
  }
  return flipped_;
}

}  // namespace crux::fluid
