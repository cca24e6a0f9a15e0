#pragma once

#include <cstdint>
#include <vector>

#include "view.h"

namespace crux::schedule {

// The links of each job: those of job j are links[start[j]] to links[start[j + 1]].
struct Users {
  View<std::int64_t> start;
  View<std::int32_t> links;
  std::size_t link_count;

  std::size_t jobs() const { return start.size() - 1; }

  // Throws std::invalid_argument unless every number is within its range.
  void check() const;
};

// The component of each job, which a chain of shared links joins, numbered by their first jobs.
std::vector<std::int64_t> components(const Users& users);

// For each job the number of jobs before it in the longest chain of jobs, in ascending order, of
// which each shares a link with the next.
std::vector<std::int64_t> depths(const Users& users);

}  // namespace crux::schedule
