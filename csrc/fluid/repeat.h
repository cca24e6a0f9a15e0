#pragma once

#include <cstdint>
#include <vector>

#include "sharing.h"
#include "steady.h"

namespace crux::fluid {

// Where a job is within its iteration.
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

// Whether both states are the same, every time in them within tolerance_s.
bool same(const Phase& a, const Phase& b, double tolerance_s);

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
