// The grid of times at which a job should start its iterations (CASSINI's drift correction).
#pragma once

#include <cmath>
#include <string>

#include "spec.h"

namespace crux::fluid {

// The grid is origin + n * period.
struct Pace {
  // The points of a closer grid are one to the clock.
  static constexpr double kShortestPeriod_s = 1e-9;
  // A start that is off the grid by less than this share of the period is on it.
  static constexpr double kOnGrid = 1e-9;

  Seconds origin;
  Seconds period;
  double tolerance;  // share of the period by which a start may be late; it is never early

  // Throws SpecError, with `where` in front, for a grid that can't be kept.
  void check(const std::string& where) const {
    if (!std::isfinite(origin.value())) throw SpecError(where + "expected a finite origin");
    if (!(std::isfinite(period.value()) && period.value() >= kShortestPeriod_s)) {
      throw SpecError(where + "expected a finite period of 1e-9 s or more");
    }
    if (!(tolerance >= 0.0 && tolerance <= 0.5)) {
      throw SpecError(where + "expected a tolerance from 0 to 0.5 of the period");
    }
  }

  // Returns t if it is on the grid or late by no more than the tolerance, else the next point.
  double next(double t) const {
    const double turns = (t - origin.value()) / period.value();
    const double late = turns - std::floor(turns + kOnGrid);
    if (late <= tolerance + kOnGrid) return t;
    return origin.value() + std::ceil(turns) * period.value();
  }

  // True if a job is as far from its grid after length_s as before it.
  bool repeats_after(double length_s, double tolerance_s) const {
    return std::abs(std::remainder(length_s, period.value())) <= tolerance_s;
  }
};

}  // namespace crux::fluid
