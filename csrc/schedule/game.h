#pragma once

#include <cstdint>
#include <vector>

#include "view.h"

namespace crux::schedule {

// Jobs that send bursts over a link, in order, in every iteration. The bursts of job p are those
// from burst_start[p] to burst_start[p + 1].
struct Players {
  View<double> compute_s;
  View<std::int64_t> burst_start;
  // For each burst: when its iteration's computation has come so far that it may start, and the
  // seconds of link that it takes.
  View<double> due_s;
  View<double> burst_s;
};

// How long each of two jobs is followed, and from how many phases of the other one.
struct GameLength {
  int phases;
  int warm_up;
  int measured;
};

// Link seconds per second of the job `second[i]` when `first[i]` has priority, for each i (Crux,
// section 4.2). Each plays `warm_up` iterations that do not count, then `measured` ones.
//
// rounding: share of a period by which two events may differ through rounding alone.
//
// Throws std::invalid_argument for a number out of its range, and for a job without bursts.
std::vector<double> rates_when_second(const Players& players, View<std::int64_t> second,
                                      View<std::int64_t> first, GameLength length, double rounding);

}  // namespace crux::schedule
