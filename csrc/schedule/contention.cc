#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "schedule.h"

namespace crux::schedule {

void Users::check() const {
  check_starts(start, links.size());
  for (const std::int32_t link : links) {
    if (link < 0 || static_cast<std::size_t>(link) >= link_count) {
      throw std::invalid_argument("a job uses a link that there is not");
    }
  }
}

std::vector<std::int64_t> components(const Users& users) {
  users.check();
  // The lowest job of a component stands for it.
  std::vector<std::int64_t> above(users.jobs());
  std::iota(above.begin(), above.end(), 0);
  const auto top = [&above](std::int64_t job) {
    while (above[job] != job) job = above[job] = above[above[job]];
    return job;
  };
  std::vector<std::int64_t> user(users.link_count, -1);
  for (std::size_t j = 0; j < users.jobs(); ++j) {
    auto mine = static_cast<std::int64_t>(j);
    for (auto at = users.start[j]; at < users.start[j + 1]; ++at) {
      std::int64_t& other = user[users.links[at]];
      if (other < 0) {
        other = mine;
        continue;
      }
      const std::int64_t theirs = top(other);
      above[std::max(mine, theirs)] = std::min(mine, theirs);
      mine = other = std::min(mine, theirs);
    }
  }
  std::vector<std::int64_t> number(users.jobs());
  std::int64_t count = 0;
  for (std::size_t j = 0; j < number.size(); ++j) {
    const auto first = static_cast<std::size_t>(top(static_cast<std::int64_t>(j)));
    number[j] = first == j ? count++ : number[first];
  }
  return number;
}

std::vector<std::int64_t> depths(const Users& users) {
  users.check();
  std::vector<std::int64_t> depth(users.jobs());
  // The depth that the next user of each link has at least.
  std::vector<std::int64_t> next(users.link_count);
  for (std::size_t j = 0; j < depth.size(); ++j) {
    for (auto at = users.start[j]; at < users.start[j + 1]; ++at) {
      depth[j] = std::max(depth[j], next[users.links[at]]);
    }
    for (auto at = users.start[j]; at < users.start[j + 1]; ++at) {
      next[users.links[at]] = depth[j] + 1;
    }
  }
  return depth;
}

}  // namespace crux::schedule
