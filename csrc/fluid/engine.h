#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "allocator.h"
#include "component.h"
#include "event_queue.h"
#include "pace.h"
#include "sharing.h"
#include "spec.h"

namespace crux::fluid {

struct Options {
  // Advance a job that meets nobody, and jobs together that provably repeat, without events.
  bool skip_repeats = true;
  // States are the same when no time in them differs by more than this share of the period. A skip
  // over T seconds therefore displaces the phase of a job by at most this share of T.
  double repeat_tolerance = 1e-9;
  // Above 0: jobs that meet and never repeat advance at their mean rates, without events, once
  // these agree within this share over two successive windows (component.h). Needs skip_repeats.
  double steady_tolerance = 0.0;
};

struct JobResult {
  std::int64_t completed = 0;  // iterations ended
  double compute_s = 0.0;      // seconds in which it computed
  double comm_s = 0.0;         // seconds its data would have taken at the full rate of its links
  std::optional<double> mean_iteration_s;
  double start_s = 0.0;
  std::optional<double> end_s;  // when it ended or was removed
};

// The event-driven fluid simulator.
//
// Jobs may come, go and change level, weight or path while it runs; each such change takes effect
// at now(). Only jobs that a change can reach are touched by it.
class Engine {
 public:
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  explicit Engine(Network network, Options options = {});

  // All throw SpecError for what can't be simulated and leave the engine as it was.
  JobId add_job(JobSpec spec);
  // Jobs that differ in names, GPUs and traffic only, and go through their iterations together:
  // none starts a burst before all have sent the one before it. What changes one of them must
  // change all at the same time.
  std::vector<JobId> add_team(std::vector<JobSpec> specs);
  void remove_job(JobId id);
  void set_level(JobId id, int level);
  void set_weight(JobId id, double weight);
  // New traffic of every burst of each of these jobs; a burst under way keeps its progress.
  void set_traffic(const std::vector<JobId>& ids,
                   std::vector<std::vector<std::vector<LoadSpec>>> traffic);
  // Starts the job's next iteration this much later than it could.
  void shift(JobId id, Seconds by);
  // Keeps a job to a grid (CASSINI's drift correction): an iteration that would start early, or
  // late by more than the tolerance, is held until the next point of the grid. nullopt: no longer.
  void set_pace(JobId id, std::optional<Pace> pace);
  // Limits the rate of the job's transfers on their busiest link; nullopt: no limit.
  void set_rate_limit(JobId id, std::optional<BytesPerSecond> limit);

  // Advances to `until` and returns true; false when max_events were handled before.
  bool run_until(Seconds until, std::uint64_t max_events = UINT64_MAX);
  // Like run_until, but stops as soon as jobs have ended; ended() names them.
  bool run_until_end_of_any(Seconds until, std::uint64_t max_events = UINT64_MAX);
  const std::vector<JobId>& ended() const { return ended_; }

  Seconds now() const { return Seconds(now_); }
  const Network& network() const { return network_; }
  std::size_t job_count() const { return jobs_.size(); }
  const JobSpec& spec(JobId id) const { return jobs_[id].spec; }
  std::optional<JobId> find(const std::string& name) const;
  JobResult result(JobId id);
  std::vector<JobResult> results();
  // Bytes that the burst under way has left for its busiest link; nothing where none moves.
  std::optional<double> bytes_left(JobId id);
  // Bytes that each link has carried.
  std::vector<double> link_bytes();
  // Seconds of compute times GPUs, over all jobs' GPUs times now().
  double gpu_utilization();
  std::uint64_t events() const { return events_; }
  // Effort that its jobs and events took, in a unit of 5 to 10 ns that is the same on every
  // machine.
  std::uint64_t work() const {
    return kJobWork * jobs_.size() + kEventWork * events_ + allocator_.places();
  }

 private:
  static constexpr std::uint32_t kNoComponent = UINT32_MAX;
  static constexpr std::uint32_t kNoTeam = UINT32_MAX;
  // An event this little after the end of a run, relative to the clock, still belongs to it: sums
  // of many iterations' lengths carry rounding.
  static constexpr double kClockTolerance = 1e-12;
  // Beyond this many iterations' lengths the clock no longer resolves an iteration.
  static constexpr double kLongestRun = 1e12;
  // Places on links (see Allocator::places) that a job and an event come to.
  static constexpr std::uint64_t kJobWork = 500;
  static constexpr std::uint64_t kEventWork = 50;

  struct Job {
    JobSpec spec;
    Program program;
    Stage stage = Stage::kWaiting;
    std::uint32_t burst = 0;
    std::uint32_t component = kNoComponent;
    std::uint32_t team = kNoTeam;
    double iteration_start = 0.0;
    double due = 0.0;       // time of its next event
    double progress = 0.0;  // of the burst that moves, in [0, 1], at `since`
    double since = 0.0;
    double rate = 0.0;  // of progress, per second
    double hold_s = 0.0;
    std::optional<Pace> pace;
    double limit_Bps = kForever;
    bool loose = false;     // it moves and waits for apply_rates() to hand it to the allocator
    double carry = 0.0;     // of an iteration that steady skips have not counted yet
    double last_end = 0.0;  // before the first has ended: when it began
    double end = kForever;
    std::int64_t completed = 0;
    std::int64_t flushed = 0;  // iterations already in past_comm_s and the links' totals
    double past_comm_s = 0.0;
    double past_compute_s = 0.0;  // of an iteration that was cut short
  };

  struct Team {
    std::vector<JobId> members;
    std::size_t sent = 0;  // members that wait for the others
  };

  Job& at(JobId id);
  // Takes the program's iteration for one of those that the clock must resolve.
  void count_iteration(const Program& program, const std::string& name);
  void changed(JobId id);
  void reroute(JobId id, JobSpec spec, Program program);
  bool advance(double until, std::uint64_t max_events, bool stop_at_end);
  double handle_batch();
  bool handle(JobId id, double t);
  void enter(JobId id, double t);
  bool wake_neighbours(const Program& program, double t);
  void start_iteration(JobId id, double t);
  void begin_iteration(JobId id, double t);
  void next_burst(JobId id, double t);
  void send_burst(JobId id, double t);
  void start_moving(JobId id, double t);
  void end_burst(JobId id, double t);
  void end_iteration(JobId id, double t);
  void leave(JobId id, double t);
  void schedule(JobId id, Stage stage, double due);
  void attach(JobId id, double t);
  void loosen(JobId id, double t);
  void loosen_on(const std::vector<LinkId>& links, double t);
  void settle(Job& job, double t) const;
  void set_rate(JobId id, double rate, double t);
  void apply_rates(double t);
  double progress_at(const Job& job, double t) const;
  double comm_s(const Job& job) const;
  void add_link_bytes(const Job& job, double factor, std::vector<double>& totals) const;
  void book(Job& job, double factor);

  std::uint32_t new_component(std::vector<JobId> members);
  void join(JobId id);
  std::uint32_t merge(std::uint32_t own, std::uint32_t other);
  void part(JobId id);
  void split(std::uint32_t component);
  bool leads(JobId a, JobId b) const;
  void choose_reference(Component& component);
  bool keeps_paces(const Component& component, double period, double tolerance_s) const;
  void look_for_repeat(std::uint32_t component, double t);
  void start_repeating(std::uint32_t component, double t, double period,
                       std::vector<std::int64_t> completed_per_period);
  void start_skipping(Component& component, double from, double due);
  void look_for_steady(std::uint32_t component, double t);
  void start_steady(std::uint32_t component, double t);
  void begin_window(Component& component, double t, double length_s) const;
  double common_pace(const Component& component) const;
  double wake_steady(Component& component, double t);
  double wake_periods(Component& component, double t);
  void wake(std::uint32_t component, double t);
  void keep_awake(std::uint32_t component, double t);
  void sync(JobId id);
  void sync_all();
  Phase phase(const Job& job, double t) const;
  void set_anchor(Component& component, double t) const;
  JobResult result_now(const Job& job) const;

  Network network_;
  Options options_;
  Sharing sharing_;
  Allocator allocator_;
  EventQueue queue_;
  std::vector<Job> jobs_;
  std::vector<Team> teams_;
  std::unordered_map<std::string, JobId> ids_;
  std::vector<Component> components_;
  std::vector<std::uint32_t> free_components_;
  std::vector<std::uint32_t> boundaries_;  // components whose reference job began an iteration
  std::vector<JobId> ended_;
  std::vector<JobId> loose_;
  std::uint32_t limited_ = 0;  // jobs with a rate limit: nothing is skipped while there are any
  std::vector<double> link_bytes_;
  std::vector<std::uint64_t> seen_link_;
  std::uint64_t seen_ = 0;
  double now_ = 0.0;
  double shortest_iteration_s_ = kForever;
  std::uint64_t events_ = 0;
};

}  // namespace crux::fluid
