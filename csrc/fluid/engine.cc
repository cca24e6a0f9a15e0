// The jobs of the engine: how they come, change and go.
#include "engine.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace crux::fluid {

Engine::Engine(Network network, Options options)
    : network_(std::move(network)),
      options_(options),
      sharing_(network_),
      allocator_(network_),
      link_bytes_(network_.size(), 0.0),
      seen_link_(network_.size(), 0) {
  if (!(options_.repeat_tolerance >= 0.0 && options_.repeat_tolerance < 1.0)) {
    throw SpecError("repeat_tolerance: expected a share from 0 to below 1");
  }
  if (!(options_.steady_tolerance >= 0.0 && options_.steady_tolerance < 1.0)) {
    throw SpecError("steady_tolerance: expected a share from 0 to below 1");
  }
}

JobId Engine::add_job(JobSpec spec) {
  if (ids_.count(spec.name) != 0) throw SpecError("job " + spec.name + ": appears twice");
  Job job;
  job.program = Program::validate(spec, network_);
  if (spec.start.value() < now_) {
    throw SpecError("job " + spec.name + ": start_s lies before the current time");
  }
  count_iteration(job.program, spec.name);
  const auto id = static_cast<JobId>(jobs_.size());
  job.spec = std::move(spec);
  ids_.emplace(job.spec.name, id);
  jobs_.push_back(std::move(job));
  queue_.grow(id);
  schedule(id, Stage::kWaiting, jobs_[id].spec.start.value());
  return id;
}

std::vector<JobId> Engine::add_team(std::vector<JobSpec> specs) {
  if (specs.size() == 1) return {add_job(std::move(specs.front()))};
  for (const JobSpec& spec : specs) {
    if (ids_.count(spec.name) != 0) throw SpecError("job " + spec.name + ": appears twice");
    Program::validate(spec, network_);
  }
  std::vector<JobId> members;
  for (JobSpec& spec : specs) members.push_back(add_job(std::move(spec)));
  for (JobId member : members) jobs_[member].team = static_cast<std::uint32_t>(teams_.size());
  teams_.push_back({members});
  return members;
}

std::optional<JobId> Engine::find(const std::string& name) const {
  const auto it = ids_.find(name);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

Engine::Job& Engine::at(JobId id) {
  if (id >= jobs_.size()) throw SpecError("no job with id " + std::to_string(id));
  return jobs_[id];
}

void Engine::remove_job(JobId id) {
  Job& job = at(id);
  if (job.stage == Stage::kEnded) return;
  sync(id);
  leave(id, now_);
}

void Engine::set_level(JobId id, int level) {
  Job& job = at(id);
  if (job.spec.level == level) return;
  sync(id);
  job.spec.level = level;
  if (job.component != kNoComponent) choose_reference(components_[job.component]);
  changed(id);
}

// A job's share of its links is another one from now on.
void Engine::changed(JobId id) {
  const Job& job = jobs_[id];
  if (job.component == kNoComponent) return;
  components_[job.component].forget();
  if (job.stage == Stage::kMoving) loosen(id, now_);
}

void Engine::set_weight(JobId id, double weight) {
  Job& job = at(id);
  check_weight("job " + job.spec.name, weight);
  if (job.spec.weight == weight) return;
  sync(id);
  job.spec.weight = weight;
  changed(id);
}

void Engine::set_traffic(const std::vector<JobId>& ids,
                         std::vector<std::vector<std::vector<LoadSpec>>> traffic) {
  std::vector<JobSpec> specs;
  std::vector<Program> programs;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    JobSpec spec = at(ids[i]).spec;
    if (traffic[i].size() != spec.bursts.size()) {
      throw SpecError("job " + spec.name + ": expected traffic for each of its bursts");
    }
    for (std::size_t b = 0; b < spec.bursts.size(); ++b) {
      spec.bursts[b].traffic = std::move(traffic[i][b]);
    }
    programs.push_back(Program::validate(spec, network_));
    count_iteration(programs.back(), spec.name);
    specs.push_back(std::move(spec));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    reroute(ids[i], std::move(specs[i]), std::move(programs[i]));
  }
}

void Engine::reroute(JobId id, JobSpec spec, Program program) {
  Job& job = jobs_[id];
  if (job.stage == Stage::kEnded) return;
  if (job.stage == Stage::kWaiting) {
    job.spec = std::move(spec);
    job.program = std::move(program);
    return;
  }
  sync(id);
  if (wake_neighbours(program, now_)) advance(now_, UINT64_MAX, false);
  if (job.stage == Stage::kMoving) loosen(id, now_);
  loosen_on(sharing_.remove(id, job.program.footprint()), now_);
  part(id);
  book(job, 1.0);
  job.spec = std::move(spec);
  job.program = std::move(program);
  book(job, -1.0);
  loosen_on(sharing_.add(id, job.program.footprint()), now_);
  join(id);
}

void Engine::shift(JobId id, Seconds by) {
  Job& job = at(id);
  if (!(std::isfinite(by.value()) && by.value() >= 0.0)) {
    throw SpecError("job " + job.spec.name + ": expected a shift of 0 s or more");
  }
  if (job.stage == Stage::kEnded || by.value() == 0.0) return;
  sync(id);
  job.hold_s += by.value();
}

void Engine::set_pace(JobId id, std::optional<Pace> pace) {
  Job& job = at(id);
  if (pace) pace->check("job " + job.spec.name + ": pace: ");
  if (job.stage == Stage::kEnded) return;
  sync(id);
  job.pace = pace;
  if (job.component != kNoComponent) components_[job.component].forget();
}

void Engine::set_rate_limit(JobId id, std::optional<BytesPerSecond> limit) {
  Job& job = at(id);
  if (limit && !(std::isfinite(limit->value()) && limit->value() > 0.0)) {
    throw SpecError("job " + job.spec.name + ": expected a positive finite rate limit");
  }
  const double limit_Bps = limit ? limit->value() : kForever;
  if (job.stage == Stage::kEnded || job.limit_Bps == limit_Bps) return;
  sync(id);
  if (job.limit_Bps == kForever) ++limited_;
  if (limit_Bps == kForever) --limited_;
  job.limit_Bps = limit_Bps;
  changed(id);
}

void Engine::count_iteration(const Program& program, const std::string& name) {
  if (now_ > kLongestRun * program.alone_iteration_s()) {
    throw SpecError("job " + name + ": the clock, at " + std::to_string(now_) +
                    " s, can't resolve its iterations");
  }
  shortest_iteration_s_ = std::min(shortest_iteration_s_, program.alone_iteration_s());
}

}  // namespace crux::fluid
