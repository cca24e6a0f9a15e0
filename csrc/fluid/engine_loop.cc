// The event loop: advances the jobs from event to event.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "engine.h"

namespace crux::fluid {
namespace {

// Events this close, relative to the clock, are one instant: which is first is rounding, and a
// burst that ends as it is pre-empted must not keep a remainder of 1e-16.
constexpr double kTie = 1e-13;

}  // namespace

bool Engine::run_until(Seconds until, std::uint64_t max_events) {
  ended_.clear();
  return advance(until.value(), max_events, false);
}

bool Engine::run_until_end_of_any(Seconds until, std::uint64_t max_events) {
  ended_.clear();
  return advance(until.value(), max_events, true);
}

bool Engine::advance(double until, std::uint64_t max_events, bool stop_at_end) {
  if (!std::isfinite(until) || until < now_) {
    throw SpecError("run_until: expected a finite time that is not in the past");
  }
  if (until > kLongestRun * shortest_iteration_s_) {
    std::ostringstream message;
    message << "got " << until << " s, expected at most " << kLongestRun * shortest_iteration_s_
            << ": the clock can't resolve the shortest iteration beyond that";
    throw SpecError(message.str());
  }
  apply_rates(now_);
  const std::uint64_t first = events_;
  const double last_time = until + kClockTolerance * until;
  while (queue_.next_time() <= last_time) {
    const double t = handle_batch();
    if (stop_at_end && !ended_.empty()) {
      now_ = std::max(now_, std::min(t, until));
      return true;
    }
    if (events_ - first >= max_events) {
      now_ = std::max(now_, std::min(t, until));
      return false;
    }
  }
  now_ = until;
  return true;
}

// Handles all events of the next instant, then allocates once.
double Engine::handle_batch() {
  const double t = queue_.next_time();
  const double tie = t + std::abs(t) * kTie;
  boundaries_.clear();
  while (queue_.next_time() <= tie) {
    const JobId id = queue_.next_id();
    queue_.remove(id);
    if (!handle(id, t)) break;
  }
  apply_rates(t);
  if (options_.skip_repeats && limited_ == 0) {
    for (std::uint32_t component : boundaries_) look_for_repeat(component, t);
  }
  return t;
}

// Returns false when earlier events have turned up that come first.
bool Engine::handle(JobId id, double t) {
  Job& job = jobs_[id];
  if (job.component != kNoComponent && components_[job.component].repeating) {
    wake(job.component, t);
    return false;
  }
  if (job.stage == Stage::kWaiting && wake_neighbours(job.program, t)) {
    queue_.set(id, t);
    return false;
  }
  ++events_;
  switch (job.stage) {
    case Stage::kWaiting:
      enter(id, t);
      break;
    case Stage::kHeld:
      start_iteration(id, t);
      break;
    case Stage::kComputing:
      send_burst(id, t);
      break;
    case Stage::kDelay:
      start_moving(id, t);
      break;
    case Stage::kMoving:
      if (allocator_.active(id)) allocator_.stop(id);
      end_burst(id, t);
      break;
    case Stage::kTail:
      end_iteration(id, t);
      break;
    case Stage::kSent:
    case Stage::kEnded:
      break;
  }
  return true;
}

void Engine::enter(JobId id, double t) {
  loosen_on(sharing_.add(id, jobs_[id].program.footprint()), t);
  join(id);
  start_iteration(id, t);
}

// Begins an iteration at once, or when the job's shift and its pace allow.
void Engine::start_iteration(JobId id, double t) {
  Job& job = jobs_[id];
  double start = t + std::exchange(job.hold_s, 0.0);
  if (job.pace) start = job.pace->next(start);
  // A start within the tie is now: else this batch would come to it, and hold it, without end.
  if (start > t + std::abs(t) * kTie) {
    schedule(id, Stage::kHeld, start);
  } else {
    begin_iteration(id, t);
  }
}

void Engine::begin_iteration(JobId id, double t) {
  Job& job = jobs_[id];
  job.iteration_start = t;
  if (job.completed == 0) job.last_end = t;
  job.burst = 0;
  if (components_[job.component].reference == id) boundaries_.push_back(job.component);
  next_burst(id, t);
}

void Engine::next_burst(JobId id, double t) {
  Job& job = jobs_[id];
  const std::vector<Burst>& bursts = job.program.bursts();
  while (job.burst < bursts.size() && bursts[job.burst].crossings.empty()) {
    if (job.team != kNoTeam) {
      end_burst(id, t);
      return;
    }
    ++job.burst;
  }
  if (job.burst < bursts.size()) {
    const double at = job.iteration_start + bursts[job.burst].at_s;
    if (at > t) {
      schedule(id, Stage::kComputing, at);
    } else {
      send_burst(id, t);
    }
    return;
  }
  const double compute_end = job.iteration_start + job.program.compute_s();
  if (compute_end > t) {
    schedule(id, Stage::kTail, compute_end);
  } else {
    end_iteration(id, t);
  }
}

void Engine::send_burst(JobId id, double t) {
  const double delay = jobs_[id].program.bursts()[jobs_[id].burst].delay_s;
  if (delay > 0.0) {
    schedule(id, Stage::kDelay, t + delay);
  } else {
    start_moving(id, t);
  }
}

void Engine::start_moving(JobId id, double t) {
  Job& job = jobs_[id];
  job.stage = Stage::kMoving;
  job.progress = 0.0;
  job.since = t;
  job.rate = 0.0;
  attach(id, t);
}

// Goes on to the next burst, with all of its team.
void Engine::end_burst(JobId id, double t) {
  Job& job = jobs_[id];
  if (job.team == kNoTeam) {
    ++job.burst;
    next_burst(id, t);
    return;
  }
  schedule(id, Stage::kSent, EventQueue::kNever);
  Team& team = teams_[job.team];
  if (++team.sent < team.members.size()) return;
  team.sent = 0;
  for (JobId member : team.members) {
    ++jobs_[member].burst;
    next_burst(member, t);
  }
}

void Engine::end_iteration(JobId id, double t) {
  Job& job = jobs_[id];
  ++job.completed;
  job.last_end = t;
  if (job.spec.iterations && job.completed >= *job.spec.iterations) {
    ended_.push_back(id);
    leave(id, t);
  } else {
    start_iteration(id, t);
  }
}

// Takes a job out for good, in the middle of an iteration or after its last.
void Engine::leave(JobId id, double t) {
  Job& job = jobs_[id];
  const bool started = job.stage != Stage::kWaiting;
  if (started) {
    const bool cut_short = !job.spec.iterations || job.completed < *job.spec.iterations;
    if (cut_short) {
      job.past_compute_s =
          result_now(job).compute_s - static_cast<double>(job.completed) * job.program.compute_s();
      if (job.stage == Stage::kMoving) loosen(id, t);
    } else {
      job.burst = 0;
      job.stage = Stage::kEnded;
    }
    book(job, 1.0);
  }
  job.flushed = job.completed;
  job.stage = Stage::kEnded;
  if (job.limit_Bps != kForever) --limited_;
  job.end = t;
  queue_.remove(id);
  if (!started) return;
  const std::vector<LinkId> flipped = sharing_.remove(id, job.program.footprint());
  part(id);
  loosen_on(flipped, t);
}

void Engine::schedule(JobId id, Stage stage, double due) {
  jobs_[id].stage = stage;
  jobs_[id].due = due;
  queue_.set(id, due);
}

// Hands a moving burst to the allocator, or lets it run free where nobody can be in its way.
void Engine::attach(JobId id, double t) {
  Job& job = jobs_[id];
  job.loose = false;
  const Burst& burst = job.program.bursts()[job.burst];
  if (burst.crossings.empty()) {
    job.due = t;
    queue_.set(id, t);
    return;
  }
  const bool meets_somebody =
      std::any_of(burst.crossings.begin(), burst.crossings.end(),
                  [this](const Crossing& c) { return sharing_.contended(c.link); });
  if (!meets_somebody) {
    set_rate(id, std::min(1.0 / burst.alone_s, job.limit_Bps / burst.busiest_bytes), t);
    return;
  }
  const double ceiling_Bps = std::min(burst.busiest_bytes / burst.alone_s, job.limit_Bps);
  allocator_.start(id, job.spec.level, job.spec.weight, ceiling_Bps, burst.crossings, sharing_);
  set_rate(id, 0.0, t);
}

// Stops a moving burst until apply_rates(), which hands it to the allocator anew: however many
// changes of one instant reach it, it is stopped and handed over once.
void Engine::loosen(JobId id, double t) {
  settle(jobs_[id], t);
  if (allocator_.active(id)) allocator_.stop(id);
  if (!std::exchange(jobs_[id].loose, true)) loose_.push_back(id);
}

// Links have become contended, or ceased to be: transfers on them enter or leave the allocation.
void Engine::loosen_on(const std::vector<LinkId>& links, double t) {
  for (LinkId link : links) {
    for (const Sharing::User& user : sharing_.users(link)) {
      if (jobs_[user.job].stage == Stage::kMoving) loosen(user.job, t);
    }
  }
}

double Engine::progress_at(const Job& job, double t) const {
  return std::min(job.progress + job.rate * std::max(t - job.since, 0.0), 1.0);
}

void Engine::settle(Job& job, double t) const {
  job.progress = progress_at(job, t);
  job.since = t;
}

void Engine::set_rate(JobId id, double rate, double t) {
  Job& job = jobs_[id];
  settle(job, t);
  job.rate = rate;
  job.due = rate > 0.0 ? t + (1.0 - job.progress) / rate : EventQueue::kNever;
  queue_.set(id, job.due);
}

void Engine::apply_rates(double t) {
  for (JobId id : loose_) {
    if (jobs_[id].loose && jobs_[id].stage == Stage::kMoving) attach(id, t);
    jobs_[id].loose = false;
  }
  loose_.clear();
  if (allocator_.settled()) return;
  for (JobId id : allocator_.resolve()) {
    const Job& job = jobs_[id];
    set_rate(id, allocator_.rate_Bps(id) / job.program.bursts()[job.burst].busiest_bytes, t);
  }
}

}  // namespace crux::fluid
