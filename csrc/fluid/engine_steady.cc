// Advances components at their measured rates, within a stated tolerance.

#include <algorithm>
#include <cmath>

#include "engine.h"

namespace crux::fluid {
namespace {

// Fewer iterations of the reference job than this are not worth leaving the event loop for.
constexpr double kFewestSkipped = 4.0;
// Paces of one component whose common multiple is more than this many of the longest are not kept.
constexpr int kLargestMultiple = 64;

}  // namespace

void Engine::begin_window(Component& component, double t, double length_s) const {
  Steady& steady = component.steady;
  steady.begin_window(t, length_s);
  steady.marks.clear();
  for (JobId member : component.members) {
    steady.marks.push_back({jobs_[member].iteration_start, jobs_[member].completed});
  }
}

// At the start of an iteration of the reference job: are the members' rates known?
void Engine::look_for_steady(std::uint32_t id, double t) {
  Component& component = components_[id];
  Steady& steady = component.steady;
  if (steady.stage == Steady::Stage::kKnown) {
    start_steady(id, t);
    return;
  }
  if (steady.stage == Steady::Stage::kIdle) {
    double longest_s = 0.0;
    for (JobId member : component.members) {
      longest_s = std::max(longest_s, jobs_[member].program.alone_iteration_s());
    }
    begin_window(component, t, Steady::kFewestIterations * longest_s);
    return;
  }
  if (t < steady.look_at) return;
  const double length_s = t - steady.window_start;
  const bool patient = length_s < Steady::kPatience * steady.window_s;
  const bool second = steady.rate.size() == component.members.size();
  double difference2 = 0.0;
  double gpus = 0.0;
  std::vector<double> rates;
  rates.reserve(component.members.size());
  for (std::size_t i = 0; i < component.members.size(); ++i) {
    const Job& job = jobs_[component.members[i]];
    const std::int64_t iterations = job.completed - steady.marks[i].completed;
    const bool starved = iterations < Steady::kFewestIterations;
    if (starved && patient) {
      steady.look_at = t + steady.window_s / 4.0;
      return;
    }
    // Between starts of its own the job has done whole iterations: no error at the window's edges.
    const double took_s =
        starved ? length_s : job.iteration_start - steady.marks[i].iteration_start;
    const double rate = static_cast<double>(iterations) / took_s;
    const double scale = starved ? 1.0 / job.program.alone_iteration_s() : rate;
    const double difference = second ? (rate - steady.rate[i]) / scale : 1.0;
    difference2 += job.spec.gpus * difference * difference;
    gpus += job.spec.gpus;
    rates.push_back(rate);
  }
  steady.rate = std::move(rates);
  if (std::sqrt(difference2 / gpus) > options_.steady_tolerance) {
    steady.reach = Steady::kFirstReach;
    begin_window(component, t, 2.0 * length_s);
    return;
  }
  steady.stage = Steady::Stage::kKnown;
  steady.window_s = length_s;
  steady.until = t + steady.reach * length_s;
  steady.reach = std::min(2.0 * steady.reach, Steady::kLongestReach);
  start_steady(id, t);
}

// The shortest time that is whole periods of every paced member; 0 without any, kForever if there
// is none. Skips of that length leave everybody where they were on their grids.
double Engine::common_pace(const Component& component) const {
  double longest_s = 0.0;
  for (JobId member : component.members) {
    if (jobs_[member].pace) longest_s = std::max(longest_s, jobs_[member].pace->period.value());
  }
  if (longest_s == 0.0) return 0.0;
  for (int multiple = 1; multiple <= kLargestMultiple; ++multiple) {
    const double common_s = multiple * longest_s;
    if (keeps_paces(component, common_s, options_.repeat_tolerance * common_s)) return common_s;
  }
  return kForever;
}

void Engine::start_steady(std::uint32_t id, double t) {
  Component& component = components_[id];
  double due = component.steady.until;
  for (std::size_t i = 0; i < component.members.size(); ++i) {
    const Job& job = jobs_[component.members[i]];
    if (job.hold_s > 0.0) return;
    const double rate = component.steady.rate[i];
    if (!job.spec.iterations || rate == 0.0) continue;
    // The last iteration is left to the event loop.
    const auto left = static_cast<double>(*job.spec.iterations - 1 - job.completed);
    due = std::min(due, t + std::max(left - job.carry, 0.0) / rate);
  }
  const double period_s = common_pace(component);
  if (due - t < kFewestSkipped * jobs_[component.reference].program.alone_iteration_s() ||
      due - t < 2.0 * period_s) {
    if (t >= component.steady.until) begin_window(component, t, component.steady.window_s);
    return;
  }
  start_skipping(component, t, due);
  component.by_rate = true;
  component.period_s = period_s;
}

// Brings a component that goes on at its measured rates to t.
double Engine::wake_steady(Component& component, double t) {
  Steady& steady = component.steady;
  double skipped = std::max(t - component.repeating_from, 0.0);
  if (component.period_s > 0.0) {
    skipped = std::floor(skipped / component.period_s) * component.period_s;
  }
  for (std::size_t i = 0; i < component.members.size(); ++i) {
    Job& job = jobs_[component.members[i]];
    const double done = job.carry + steady.rate[i] * skipped;
    auto whole = static_cast<std::int64_t>(done + kClockTolerance * done);
    if (job.spec.iterations) {
      whole = std::min(whole, std::max<std::int64_t>(*job.spec.iterations - 1 - job.completed, 0));
    }
    job.completed += whole;
    job.carry = std::clamp(done - static_cast<double>(whole), 0.0, 1.0);
    if (steady.rate[i] > 0.0) job.last_end += skipped;
  }
  const double now = component.repeating_from + skipped;
  const double rest_s = kFewestSkipped * jobs_[component.reference].program.alone_iteration_s();
  if (now >= steady.until - std::max(rest_s, 2.0 * component.period_s)) {
    steady.stage = Steady::Stage::kMeasuring;  // its marks follow when all members are up to date
  }
  return skipped;
}

}  // namespace crux::fluid
