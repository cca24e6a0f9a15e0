#include <algorithm>

#include "engine.h"

namespace crux::fluid {
namespace {

bool inside_iteration(Stage stage) {
  return stage == Stage::kComputing || stage == Stage::kDelay || stage == Stage::kMoving ||
         stage == Stage::kSent || stage == Stage::kTail;
}

}  // namespace

// Seconds of its links that took what the job has sent since it was last booked.
double Engine::comm_s(const Job& job) const {
  double sum = static_cast<double>(job.completed - job.flushed) * job.program.link_s();
  if (!inside_iteration(job.stage)) return sum;
  const std::vector<Burst>& bursts = job.program.bursts();
  for (std::uint32_t b = 0; b < job.burst; ++b) sum += bursts[b].link_s;
  if (job.stage == Stage::kMoving) sum += progress_at(job, now_) * bursts[job.burst].link_s;
  if (job.stage == Stage::kSent) sum += bursts[job.burst].link_s;
  return sum;
}

// Adds `factor` times what the job has put on each link since it was last booked.
void Engine::add_link_bytes(const Job& job, double factor, std::vector<double>& totals) const {
  const std::vector<Burst>& bursts = job.program.bursts();
  const auto whole = static_cast<double>(job.completed - job.flushed);
  for (std::uint32_t b = 0; b < bursts.size(); ++b) {
    double times = whole;
    if (inside_iteration(job.stage)) {
      if (b < job.burst) times += 1.0;
      if (b == job.burst && job.stage == Stage::kMoving) times += progress_at(job, now_);
      if (b == job.burst && job.stage == Stage::kSent) times += 1.0;
    }
    for (const Crossing& crossing : bursts[b].crossings) {
      totals[crossing.link] += factor * times * crossing.share * bursts[b].busiest_bytes;
    }
  }
}

// Moves the job's counters into its past. To change a program in mid-iteration, book +1 under the
// old one, then -1 under the new one: what is under way is then counted once.
void Engine::book(Job& job, double factor) {
  job.past_comm_s += factor * comm_s(job);
  add_link_bytes(job, factor, link_bytes_);
  job.flushed = job.completed;
}

JobResult Engine::result_now(const Job& job) const {
  JobResult result;
  result.completed = job.completed;
  result.start_s = job.spec.start.value();
  result.compute_s =
      job.past_compute_s + static_cast<double>(job.completed) * job.program.compute_s();
  if (inside_iteration(job.stage)) {
    result.compute_s += std::clamp(now_ - job.iteration_start, 0.0, job.program.compute_s());
  }
  result.comm_s = job.past_comm_s;
  if (job.stage != Stage::kEnded) result.comm_s += comm_s(job);
  if (job.completed > 0) {
    result.mean_iteration_s =
        (job.last_end - job.spec.start.value()) / (static_cast<double>(job.completed) + job.carry);
  }
  if (job.stage == Stage::kEnded) result.end_s = job.end;
  return result;
}

JobResult Engine::result(JobId id) {
  const Job& job = at(id);
  sync(id);
  return result_now(job);
}

std::optional<double> Engine::bytes_left(JobId id) {
  const Job& job = at(id);
  sync(id);
  if (job.stage != Stage::kMoving) return std::nullopt;
  return (1.0 - progress_at(job, now_)) * job.program.bursts()[job.burst].busiest_bytes;
}

std::vector<JobResult> Engine::results() {
  sync_all();
  std::vector<JobResult> results;
  results.reserve(jobs_.size());
  for (const Job& job : jobs_) results.push_back(result_now(job));
  return results;
}

std::vector<double> Engine::link_bytes() {
  sync_all();
  std::vector<double> totals = link_bytes_;
  for (const Job& job : jobs_) {
    if (job.stage != Stage::kEnded) add_link_bytes(job, 1.0, totals);
  }
  return totals;
}

double Engine::gpu_utilization() {
  sync_all();
  double busy = 0.0;
  double gpus = 0.0;
  for (const Job& job : jobs_) {
    busy += result_now(job).compute_s * job.spec.gpus;
    gpus += job.spec.gpus;
  }
  return gpus > 0.0 && now_ > 0.0 ? busy / (now_ * gpus) : 0.0;
}

}  // namespace crux::fluid
