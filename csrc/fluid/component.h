// Jobs that can meet, and the detection of what lets them advance without events.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "spec.h"

namespace crux::fluid {

// State of a job within its iteration.
enum class Stage : std::uint8_t {
  kWaiting,    // not started
  kHeld,       // shifted in time: idle before an iteration
  kComputing,  // the next burst may not start yet
  kDelay,      // a burst is under way and has not reached the far end of its path
  kMoving,     // a burst moves
  kSent,       // its burst has moved, and that of another job of its team has not
  kTail,       // everything sent, compute left
  kEnded,
};

// A job's state relative to now; with the jobs' programs it determines all that follows.
struct Phase {
  Stage stage;
  std::uint32_t burst;
  double elapsed_s;  // since the start of the iteration, at most the compute time
  double pending_s;  // kMoving: what is left of the burst, alone; otherwise until the next event
};

// True if both states are the same, every time in them within tolerance_s.
inline bool same(const Phase& a, const Phase& b, double tolerance_s) {
  return a.stage == b.stage && a.burst == b.burst &&
         std::abs(a.elapsed_s - b.elapsed_s) <= tolerance_s &&
         std::abs(a.pending_s - b.pending_s) <= tolerance_s;
}

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

// Jobs that can meet, directly or through others; they evolve independently of all other jobs.
//
// When the state of all members at the start of an iteration of the reference job is the one of an
// earlier such start, the stretch between the two repeats for as long as nothing comes from outside
// and nobody ends: the component then stops producing events (`repeating`) and is brought up to
// date by counting whole periods.
struct Component {
  struct Anchor {
    bool valid = false;
    double time = 0.0;
    std::vector<Phase> phases;
    std::vector<std::int64_t> completed;
  };

  bool used = false;
  std::vector<JobId> members;
  JobId reference = 0;  // of the highest level: it never starves
  std::uint32_t left_since_split = 0;

  Anchor anchor;
  std::uint64_t steps = 0;  // starts of the reference job since the anchor was set
  std::uint64_t reach = 1;  // steps after which the anchor moves (Brent's cycle search)
  Steady steady;
  bool repeating = false;  // produces no events
  bool by_rate = false;    // repeating: at its steady rates, not in whole periods
  double repeating_from = 0.0;
  double period_s = 0.0;
  std::vector<std::int64_t> completed_per_period;
  double not_before = -1.0;  // an event from outside is due then: no repeating until it has passed

  void forget() {
    anchor.valid = false;
    steps = 0;
    reach = 1;
    steady.stage = Steady::Stage::kIdle;
    steady.reach = Steady::kFirstReach;
    steady.rate.clear();
  }
};

}  // namespace crux::fluid
