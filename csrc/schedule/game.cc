#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

#include "schedule.h"

namespace crux::schedule {
namespace {

// The link that a job with priority leaves to others. It runs as if alone, so its windows on the
// link repeat with its period.
class Leavings {
 public:
  Leavings(const Players& players, std::int64_t job, double rounding) {
    double end_s = 0.0, before_s = 0.0;
    for (auto b = players.burst_start[job]; b < players.burst_start[job + 1]; ++b) {
      const double start_s = std::max(players.due_s[b], end_s), busy_s = players.burst_s[b];
      windows_.push_back({start_s, busy_s, 0.0});
      end_s = start_s + busy_s;
      before_s += busy_s;
      windows_.back().free_before_s = start_s - (before_s - busy_s);
    }
    period_s_ = std::max(players.compute_s[job], end_s);
    const double free_s = period_s_ - before_s;
    rounding_s_ = rounding * period_s_;
    free_s_ = std::max(free_s, rounding_s_);
    nothing_ = free_s <= rounding_s_;
  }

  double period_s() const { return period_s_; }
  bool nothing() const { return nothing_; }

  // Returns the time at which `need_s` seconds of free link have passed since `start_s`.
  double passed(double start_s, double need_s) const {
    const double periods = std::floor(start_s / period_s_);
    const double into_s = start_s - periods * period_s_;
    double target_s = into_s + need_s;
    for (const Window& window : windows_) {
      target_s -= std::clamp(into_s - window.start_s, 0.0, window.busy_s);
    }
    const double more = std::max(std::ceil((target_s - rounding_s_) / free_s_) - 1.0, 0.0);
    target_s -= more * free_s_;
    double end_s = target_s + (periods + more) * period_s_;
    for (const Window& window : windows_) {
      end_s += target_s > window.free_before_s + rounding_s_ ? window.busy_s : 0.0;
    }
    return end_s;
  }

 private:
  struct Window {
    double start_s;
    double busy_s;
    double free_before_s;  // seconds of free link of a period before it
  };
  std::vector<Window> windows_;
  double period_s_, free_s_, rounding_s_;
  bool nothing_;
};

double rate_when_second(const Players& players, std::int64_t job, const Leavings& left,
                        GameLength length) {
  // A first job that never leaves the link leaves nothing.
  if (left.nothing()) return 0.0;
  const auto begin = players.burst_start[job], end = players.burst_start[job + 1];
  double link_s = 0.0;
  std::vector<double> spent_s(length.phases);
  for (auto b = begin; b < end; ++b) link_s += players.burst_s[b];
  for (int phase = 0; phase < length.phases; ++phase) {
    double now_s = left.period_s() * ((phase + 0.5) / length.phases), since_s = now_s;
    for (int iteration = 0; iteration < length.warm_up + length.measured; ++iteration) {
      if (iteration == length.warm_up) since_s = now_s;
      double end_s = now_s;
      for (auto b = begin; b < end; ++b) {
        end_s = left.passed(std::max(now_s + players.due_s[b], end_s), players.burst_s[b]);
      }
      now_s = std::max(now_s + players.compute_s[job], end_s);
    }
    spent_s[phase] = now_s - since_s;
  }
  // By pairs, so that rounding errors stay small.
  for (int apart = 1; apart < length.phases; apart *= 2) {
    for (int at = 0; at + apart < length.phases; at += 2 * apart)
      spent_s[at] += spent_s[at + apart];
  }
  return link_s * (length.measured * length.phases) / spent_s[0];
}

}  // namespace

std::vector<double> rates_when_second(const Players& players, View<std::int64_t> second,
                                      View<std::int64_t> first, GameLength length,
                                      double rounding) {
  const std::size_t count = players.compute_s.size(), bursts = players.burst_s.size();
  if (players.burst_start.size() != count + 1 || players.due_s.size() != bursts) {
    throw std::invalid_argument("expected as many jobs everywhere, and as many bursts");
  }
  if (length.phases < 1 || length.warm_up < 0 || length.measured < 1) {
    throw std::invalid_argument("expected a phase and an iteration at least");
  }
  check_starts(players.burst_start, bursts);
  std::vector<Leavings> left;
  left.reserve(count);
  for (std::size_t p = 0; p < count; ++p) {
    const auto job = static_cast<std::int64_t>(p);
    if (players.burst_start[p] == players.burst_start[p + 1]) {
      throw std::invalid_argument("a job without bursts");
    }
    left.emplace_back(players, job, rounding);
  }
  if (second.size() != first.size()) throw std::invalid_argument("a second job for each first");
  std::vector<double> rates;
  rates.reserve(second.size());
  for (std::size_t i = 0; i < second.size(); ++i) {
    for (const std::int64_t job : {second[i], first[i]}) {
      if (job < 0 || static_cast<std::size_t>(job) >= count) {
        throw std::invalid_argument("no such job");
      }
    }
    rates.push_back(rate_when_second(players, second[i], left[first[i]], length));
  }
  return rates;
}

}  // namespace crux::schedule
