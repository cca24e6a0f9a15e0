#pragma once

#include <cstdint>
#include <vector>

namespace crux::fluid {

// Measures how fast each member of a component iterates, and tells when that has become steady.
//
// Jobs whose periods do not fit never repeat exactly, but their mean rates settle. Each window is
// twice as long as the one before it. When the rates of two successive windows differ by no more
// than the tolerance (the root of the members' mean square difference, weighted by GPUs), the
// component goes on at the rates of the later one without events, for `reach` times its length.
// Then another window is played: where it still agrees, the reach doubles.
struct Steady {
  enum class Stage : std::uint8_t { kIdle, kMeasuring, kKnown };
  struct Mark {
    double iteration_start;
    std::int64_t completed;
  };

  // Whole iterations in a window; fewer only of jobs that others starve.
  static constexpr std::int64_t kFewestIterations = 4;
  // A window ends at this many times its length even if some job has not iterated often enough.
  static constexpr double kPatience = 2.0;
  static constexpr double kFirstReach = 8.0;
  static constexpr double kLongestReach = 256.0;

  Stage stage = Stage::kIdle;
  double window_start = 0.0;
  double window_s = 0.0;     // length meant for it
  double look_at = 0.0;      // when it may be over
  std::vector<Mark> marks;   // of the members at its start
  std::vector<double> rate;  // iterations per second of the members, in the last window
  double reach = kFirstReach;
  double until = 0.0;  // kKnown: the rates hold that long

  void begin_window(double t, double length_s) {
    stage = Stage::kMeasuring;
    window_start = t;
    window_s = length_s;
    look_at = t + length_s;
  }
};

}  // namespace crux::fluid
