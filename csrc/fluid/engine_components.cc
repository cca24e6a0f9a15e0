#include <algorithm>
#include <cmath>
#include <utility>

#include "engine.h"

namespace crux::fluid {
namespace {

// Large components are split only after this share of their members left: finding out whether they
// fell apart takes a walk over all of them, and one that is too large is only less quick.
constexpr std::uint32_t kSplitEvery = 16;
// Fewer periods than this are not worth leaving the event loop for.
constexpr double kFewestPeriods = 2.0;

}  // namespace

std::uint32_t Engine::new_component(std::vector<JobId> members) {
  std::uint32_t id = 0;
  if (free_components_.empty()) {
    id = static_cast<std::uint32_t>(components_.size());
    components_.emplace_back();
  } else {
    id = free_components_.back();
    free_components_.pop_back();
    components_[id] = Component();
  }
  for (JobId member : members) jobs_[member].component = id;
  components_[id].used = true;
  components_[id].members = std::move(members);
  choose_reference(components_[id]);
  return id;
}

// True if a is the better reference job: of a higher level, so that it never starves.
bool Engine::leads(JobId a, JobId b) const {
  const int level_a = jobs_[a].spec.level;
  const int level_b = jobs_[b].spec.level;
  return level_a != level_b ? level_a > level_b : a < b;
}

void Engine::choose_reference(Component& component) {
  component.reference = *std::min_element(component.members.begin(), component.members.end(),
                                          [this](JobId a, JobId b) { return leads(a, b); });
}

// Puts a job that is on its links into one component with all that it can meet there.
void Engine::join(JobId id) {
  std::uint32_t own = new_component({id});
  for (const Footprint& f : jobs_[id].program.footprint()) {
    if (!sharing_.contended(f.link)) continue;
    for (const Sharing::User& user : sharing_.users(f.link)) {
      own = merge(own, jobs_[user.job].component);
    }
  }
  if (jobs_[id].team != kNoTeam) {
    for (JobId mate : teams_[jobs_[id].team].members) {
      if (jobs_[mate].component != kNoComponent) own = merge(own, jobs_[mate].component);
    }
  }
  components_[own].forget();
}

// Makes one component of two; returns which of them it is.
std::uint32_t Engine::merge(std::uint32_t own, std::uint32_t other) {
  if (other == own) return own;
  if (components_[own].members.size() < components_[other].members.size()) std::swap(own, other);
  if (leads(components_[other].reference, components_[own].reference)) {
    components_[own].reference = components_[other].reference;
  }
  for (JobId member : components_[other].members) {
    jobs_[member].component = own;
    components_[own].members.push_back(member);
  }
  components_[other].used = false;
  components_[other].members.clear();
  free_components_.push_back(other);
  return own;
}

void Engine::part(JobId id) {
  const std::uint32_t own = std::exchange(jobs_[id].component, kNoComponent);
  Component& component = components_[own];
  std::vector<JobId>& members = component.members;
  *std::find(members.begin(), members.end(), id) = members.back();
  members.pop_back();
  component.forget();
  if (members.empty()) {
    component.used = false;
    free_components_.push_back(own);
  } else if (++component.left_since_split * kSplitEvery >= members.size()) {
    split(own);
  } else if (component.reference == id) {
    choose_reference(component);
  }
}

// Divides a component into its connected parts.
void Engine::split(std::uint32_t component) {
  std::vector<JobId> members = std::exchange(components_[component].members, {});
  components_[component].used = false;
  free_components_.push_back(component);
  constexpr std::uint32_t kReached = kNoComponent - 1;
  constexpr std::uint32_t kLeft = kNoComponent - 2;
  for (JobId member : members) jobs_[member].component = kLeft;
  ++seen_;
  for (JobId root : members) {
    if (jobs_[root].component != kLeft) continue;
    std::vector<JobId> part{root};
    jobs_[root].component = kReached;
    for (std::size_t next = 0; next < part.size(); ++next) {
      for (const Footprint& f : jobs_[part[next]].program.footprint()) {
        if (!sharing_.contended(f.link) || seen_link_[f.link] == seen_) continue;
        seen_link_[f.link] = seen_;
        for (const Sharing::User& user : sharing_.users(f.link)) {
          if (jobs_[user.job].component != kLeft) continue;
          jobs_[user.job].component = kReached;
          part.push_back(user.job);
        }
      }
      if (jobs_[part[next]].team == kNoTeam) continue;
      for (JobId mate : teams_[jobs_[part[next]].team].members) {
        if (jobs_[mate].component != kLeft) continue;
        jobs_[mate].component = kReached;
        part.push_back(mate);
      }
    }
    new_component(std::move(part));
  }
}

Phase Engine::phase(const Job& job, double t) const {
  Phase phase{job.stage, job.burst, 0.0, job.due - t};
  phase.elapsed_s = std::clamp(t - job.iteration_start, 0.0, job.program.compute_s());
  if (job.stage == Stage::kSent) phase.pending_s = 0.0;
  if (job.stage == Stage::kMoving) {
    phase.pending_s = (1.0 - progress_at(job, t)) * job.program.bursts()[job.burst].alone_s;
  }
  return phase;
}

void Engine::set_anchor(Component& component, double t) const {
  Component::Anchor& anchor = component.anchor;
  anchor.valid = true;
  anchor.time = t;
  anchor.phases.clear();
  anchor.completed.clear();
  for (JobId member : component.members) {
    anchor.phases.push_back(phase(jobs_[member], t));
    anchor.completed.push_back(jobs_[member].completed);
  }
  component.steps = 0;
}

// At the start of an iteration of a component's reference job: has this state been there before?
void Engine::look_for_repeat(std::uint32_t id, double t) {
  Component& component = components_[id];
  if (!component.used || component.repeating || t <= component.not_before) return;
  if (jobs_[component.reference].iteration_start != t) return;
  const Job& first = jobs_[component.reference];
  // Not after a hold: the skip takes the next iterations' ends to follow on the last one's.
  if (component.members.size() == 1 && first.team == kNoTeam && first.last_end == t) {
    const double alone_s = first.program.alone_iteration_s();
    if (keeps_paces(component, alone_s, options_.repeat_tolerance * alone_s)) {
      start_repeating(id, t, alone_s, {1});
      return;
    }
  }
  Component::Anchor& anchor = component.anchor;
  if (!anchor.valid) {
    set_anchor(component, t);
    return;
  }
  const double period = t - anchor.time;
  const double tolerance = options_.repeat_tolerance * period;
  bool repeats = period > 0.0 && keeps_paces(component, period, tolerance);
  for (std::size_t i = 0; repeats && i < component.members.size(); ++i) {
    repeats = same(phase(jobs_[component.members[i]], t), anchor.phases[i], tolerance);
  }
  if (repeats) {
    std::vector<std::int64_t> completed;
    for (std::size_t i = 0; i < component.members.size(); ++i) {
      completed.push_back(jobs_[component.members[i]].completed - anchor.completed[i]);
    }
    start_repeating(id, t, period, std::move(completed));
  } else if (++component.steps >= component.reach) {
    component.reach *= 2;
    set_anchor(component, t);
  }
  if (!component.repeating && options_.steady_tolerance > 0.0 && component.members.size() > 1) {
    look_for_steady(id, t);
  }
}

// True if every paced member is as far from its grid after the period as before it.
bool Engine::keeps_paces(const Component& component, double period, double tolerance_s) const {
  return std::all_of(component.members.begin(), component.members.end(), [&](JobId member) {
    const std::optional<Pace>& pace = jobs_[member].pace;
    return !pace || pace->repeats_after(period, tolerance_s);
  });
}

void Engine::start_repeating(std::uint32_t id, double t, double period,
                             std::vector<std::int64_t> completed_per_period) {
  Component& component = components_[id];
  double periods = EventQueue::kNever;
  for (std::size_t i = 0; i < component.members.size(); ++i) {
    const Job& job = jobs_[component.members[i]];
    if (job.hold_s > 0.0) return;
    if (!job.spec.iterations || completed_per_period[i] == 0) continue;
    // The last iteration is left to the event loop.
    periods =
        std::min(periods, std::floor(static_cast<double>(*job.spec.iterations - 1 - job.completed) /
                                     static_cast<double>(completed_per_period[i])));
  }
  if (periods < kFewestPeriods) return;
  start_skipping(component, t, t + periods * period);
  component.by_rate = false;
  component.period_s = period;
  component.completed_per_period = std::move(completed_per_period);
}

// Takes a component's events away until `due`.
void Engine::start_skipping(Component& component, double from, double due) {
  component.repeating = true;
  component.repeating_from = from;
  for (JobId member : component.members) queue_.remove(member);
  queue_.set(component.reference, due);
}

// Brings a component to t, or to the last start of its period before, and resumes its events.
void Engine::wake(std::uint32_t id, double t) {
  Component& component = components_[id];
  const double skipped = component.by_rate ? wake_steady(component, t) : wake_periods(component, t);
  queue_.remove(component.reference);
  for (JobId member : component.members) {
    Job& job = jobs_[member];
    job.iteration_start += skipped;
    job.since += skipped;
    job.due += skipped;
    queue_.set(member, job.due);
  }
  component.repeating = false;
  component.anchor.valid = false;
  const double now = component.repeating_from + skipped;
  if (component.members.size() > 1) set_anchor(component, now);
  if (component.by_rate && component.steady.stage == Steady::Stage::kMeasuring) {
    begin_window(component, now, component.steady.window_s);
  }
}

// Counts the whole periods that a repeating component has done by t; returns how long they took.
double Engine::wake_periods(Component& component, double t) {
  const double periods =
      std::max(std::floor((t - component.repeating_from) / component.period_s), 0.0);
  const double skipped = periods * component.period_s;
  for (std::size_t i = 0; i < component.members.size(); ++i) {
    Job& job = jobs_[component.members[i]];
    const std::int64_t completed = component.completed_per_period[i];
    job.completed += static_cast<std::int64_t>(periods) * completed;
    if (completed > 0) job.last_end += skipped;
  }
  return skipped;
}

// Whoever is about to act on a component at t must find it with its events.
void Engine::keep_awake(std::uint32_t id, double t) {
  components_[id].not_before = std::max(components_[id].not_before, t + 2.0 * kClockTolerance * t);
}

// Wakes what repeats on links where a job with this program would meet it; true if there was any.
bool Engine::wake_neighbours(const Program& program, double t) {
  bool woken = false;
  for (const Footprint& f : program.footprint()) {
    if (!sharing_.contended_with(f.link, f.peak_Bps)) continue;
    for (const Sharing::User& user : sharing_.users(f.link)) {
      const std::uint32_t id = jobs_[user.job].component;
      keep_awake(id, t);
      if (!components_[id].repeating) continue;
      wake(id, t);
      woken = true;
    }
  }
  return woken;
}

// Brings a job's own numbers up to now.
void Engine::sync(JobId id) {
  const std::uint32_t component = jobs_[id].component;
  if (component == kNoComponent) return;
  keep_awake(component, now_);
  if (!components_[component].repeating) return;
  wake(component, now_);
  advance(now_, UINT64_MAX, false);
}

void Engine::sync_all() {
  for (std::uint32_t id = 0; id < components_.size(); ++id) {
    keep_awake(id, now_);
    if (components_[id].repeating) wake(id, now_);
  }
  advance(now_, UINT64_MAX, false);
}

}  // namespace crux::fluid
