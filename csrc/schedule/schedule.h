// The inner loops of a scheduling decision. All take arrays, and throw std::invalid_argument for a
// number out of its range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crux::schedule {

// A view of elements that someone else owns.
template <class T>
class View {
 public:
  View(const T* data, std::size_t size) : data_(data), size_(size) {}

  std::size_t size() const { return size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  const T* data_;
  std::size_t size_;
};

// Candidate sets, the paths of each and the links of each: paths of set s are set_start[s] to
// set_start[s + 1], links of path p are path_links[path_start[p]] to path_links[path_start[p + 1]].
struct Candidates {
  View<std::int64_t> set_start;
  View<std::int64_t> path_start;
  View<std::int32_t> path_links;

  std::size_t sets() const { return set_start.size() - 1; }

  // Both throw std::invalid_argument: unless every number is within its range for that many links;
  // unless every flow's set has a path.
  void check(std::size_t links) const;
  void check_flows(View<std::int64_t> flow_set) const;
};

// Throws std::invalid_argument unless `starts` ascend from 0 to the `size` of what they start.
void check_starts(View<std::int64_t> starts, std::size_t size);

// Returns the candidate that each flow takes when flows choose one after the other: that whose most
// utilised link is least utilised once the flow is on it, then the one of the smallest sum over its
// links, then the first (Crux, section 4.1).
//
// flow_set: the candidate set of each flow, in the order in which flows choose.
// rate_Bps: what each flow asks for.
// sweeps: times that every flow then chooses again, in the same order, with all others in place.
std::vector<std::int64_t> place(const Candidates& candidates, View<double> capacity_Bps,
                                View<std::int64_t> flow_set, View<double> rate_Bps, int sweeps);

// Seconds of each job's transfer before any path is chosen: the larger of two estimates from below,
// every flow spread evenly over its candidates, and every flow alone on its best one.
//
// flow_start: flows of job j are flow_start[j] to flow_start[j + 1].
std::vector<double> unrouted_transfer_times_s(const Candidates& candidates,
                                              View<double> capacity_Bps,
                                              View<std::int64_t> flow_start,
                                              View<std::int64_t> flow_set, View<double> flow_bytes);

// Bytes by job and link: those of job j are entries start[j] to start[j + 1], its links ascending.
struct Traffic {
  std::vector<std::int32_t> start{0};
  std::vector<std::int32_t> links;
  std::vector<double> bytes;
};

// Returns what each job moves on each link of finite capacity when its flows take the `choice`-th
// of their candidates. A link's bytes are added in the order of the flows: another may differ in
// the last bit.
//
// flow_start: flows of job j are flow_start[j] to flow_start[j + 1].
Traffic traffic(const Candidates& candidates, View<double> capacity_Bps,
                View<std::int64_t> flow_start, View<std::int64_t> flow_set, View<double> flow_bytes,
                View<std::int64_t> choice);

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

// Returns for each job the number of jobs before it in the longest chain of jobs, in ascending
// order, of which each shares a link with the next.
std::vector<std::int64_t> depths(const Users& users);

// Jobs that send bursts over a link, in order, in every iteration. The bursts of job p are those
// from burst_start[p] to burst_start[p + 1].
struct Players {
  View<double> compute_s;
  View<std::int64_t> burst_start;
  // Of each burst: the time in its iteration from which on it may start, and the seconds of link
  // that it takes.
  View<double> due_s;
  View<double> burst_s;
};

// Numbers of iterations of each game, and of the other job's phases from which it is played.
struct GameLength {
  int phases;
  int warm_up;
  int measured;
};

// Link seconds per second of the job `second[i]` when `first[i]` has priority, for each i (Crux,
// section 4.2). Each plays `warm_up` iterations that do not count, then `measured` ones.
//
// rounding: share of a period by which two events may differ through rounding alone.
std::vector<double> rates_when_second(const Players& players, View<std::int64_t> second,
                                      View<std::int64_t> first, GameLength length, double rounding);

}  // namespace crux::schedule
