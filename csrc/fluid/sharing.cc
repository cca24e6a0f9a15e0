#include "sharing.h"

#include <algorithm>

namespace crux::fluid {
namespace {

// Demands that fill a link exactly must not count as contention because of rounding.
constexpr double kRounding = 1.0 + 1e-12;

bool before(const Sharing::User& user, JobId job) { return user.job < job; }

// A bit for each user, which some share: who has not all of another's bits has not all its users.
std::uint64_t bits(const std::vector<Sharing::User>& users) {
  std::uint64_t all = 0;
  for (const Sharing::User& user : users) all |= std::uint64_t{1} << (user.job % 64);
  return all;
}

}  // namespace

Sharing::Sharing(const Network& network) {
  links_.reserve(network.size());
  for (LinkId link = 0; link < network.size(); ++link) {
    links_.emplace_back();
    links_.back().capacity_Bps = network.capacity(link).value();
  }
}

double Sharing::demand(const Link& link) {
  double sum = 0.0;
  for (const User& user : link.users) sum += user.peak_Bps;
  return sum;
}

// True if a is full whenever b is, and holds up everybody that b holds up.
bool Sharing::dominates(const Link& a, const Link& b) {
  if (a.users.size() < b.users.size()) return false;
  auto at = a.users.begin();
  for (const User& user : b.users) {
    while (at != a.users.end() && at->job < user.job) ++at;
    if (at == a.users.end() || at->job != user.job) return false;
    if (user.peak_Bps * a.capacity_Bps > at->least_Bps * b.capacity_Bps * kRounding) return false;
  }
  return true;
}

bool Sharing::contended_with(LinkId link, double peak_Bps) const {
  const Link& l = links_[link];
  return l.overbooked || (!l.users.empty() && demand(l) + peak_Bps > l.capacity_Bps * kRounding);
}

void Sharing::book(LinkId link) {
  Link& l = links_[link];
  l.overbooked = l.users.size() > 1 && demand(l) > l.capacity_Bps * kRounding;
}

void Sharing::refresh(LinkId link) {
  Link& l = links_[link];
  const bool contended = l.overbooked && !l.dominated;
  if (contended == l.contended) return;
  l.contended = contended;
  flipped_.push_back(link);
}

const std::vector<LinkId>& Sharing::add(JobId job, const std::vector<Footprint>& footprint) {
  flipped_.clear();
  overbooked_.clear();
  for (const Footprint& f : footprint) {
    std::vector<User>& users = links_[f.link].users;
    users.insert(std::lower_bound(users.begin(), users.end(), job, before),
                 {job, f.peak_Bps, f.least_Bps});
    book(f.link);
    if (links_[f.link].overbooked) overbooked_.push_back({f.link, bits(users)});
  }
  // Only a link that the new job crosses can cease to be dominated, and only by another such link
  // can it still be: others do not carry the new job.
  for (const Overbooked& b : overbooked_) {
    Link& link = links_[b.link];
    link.dominated = std::any_of(overbooked_.begin(), overbooked_.end(), [&](const Overbooked& a) {
      if ((b.users & ~a.users) != 0 || a.link == b.link) return false;
      const Link& other = links_[a.link];
      return dominates(other, link) && (a.link < b.link || !dominates(link, other));
    });
  }
  for (const Footprint& f : footprint) refresh(f.link);
  return flipped_;
}

// Whoever dominates a link still does when both lose a job.
const std::vector<LinkId>& Sharing::remove(JobId job, const std::vector<Footprint>& footprint) {
  flipped_.clear();
  for (const Footprint& f : footprint) {
    std::vector<User>& users = links_[f.link].users;
    users.erase(std::lower_bound(users.begin(), users.end(), job, before));
    book(f.link);
    refresh(f.link);
  }
  return flipped_;
}

}  // namespace crux::fluid
