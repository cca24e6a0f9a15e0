#include "spec.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <sstream>

namespace crux::fluid {
namespace {

// Shorter iterations than this vanish in the clock's rounding within a simulated month.
constexpr double kShortestIteration_s = 1e-9;
// A transfer that is shorter counts as none: its rate would be beyond all numbers.
constexpr double kShortestTransfer_s = 1e-18;
// A link that carries less than this share of what the busiest link does carries nothing.
constexpr double kLeastShare = 1e-15;
constexpr double kLargestWeight = 1e6;

[[noreturn]] void fail(const std::string& where, const std::string& what, double got,
                       const std::string& expected) {
  std::ostringstream message;
  message << where << ": " << what << " is " << got << ", expected " << expected;
  throw SpecError(message.str());
}

void require(bool ok, const std::string& where, const char* what, double got,
             const char* expected) {
  if (!ok) fail(where, what, got, expected);
}

bool non_negative(double value) { return std::isfinite(value) && value >= 0.0; }
bool positive(double value) { return std::isfinite(value) && value > 0.0; }

// Looks first: most are in order.
template <class T>
void sort_by_link(std::vector<T>& values) {
  const auto by_link = [](const T& a, const T& b) { return a.link < b.link; };
  if (!std::is_sorted(values.begin(), values.end(), by_link)) {
    std::sort(values.begin(), values.end(), by_link);
  }
}

Burst compile(const BurstSpec& spec, double compute_s, const Network& network,
              const std::string& where) {
  require(std::isfinite(spec.at) && spec.at >= 0.0 && spec.at <= 1.0, where, "at", spec.at,
          "a share from 0 to 1");
  require(non_negative(spec.least.value()), where, "least_s", spec.least.value(),
          "a finite number, 0 or more");
  Burst burst;
  burst.at_s = spec.at * compute_s;
  std::vector<LoadSpec> loads = spec.traffic;
  sort_by_link(loads);
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const LoadSpec& load = loads[i];
    if (load.link >= network.size()) throw SpecError(where + ": traffic on an unknown link");
    if (i > 0 && loads[i - 1].link == load.link) {
      throw SpecError(where + ": link " + network.name(load.link) + " appears twice");
    }
    // No text is put together for each of many loads that are as they should be.
    if (!non_negative(load.bytes.value())) {
      fail(where + ": traffic on " + network.name(load.link), "bytes", load.bytes.value(),
           "a finite number, 0 or more");
    }
    const double alone_s = load.bytes.value() / network.capacity(load.link).value();
    if (alone_s < kShortestTransfer_s) continue;
    burst.busiest_bytes = std::max(burst.busiest_bytes, load.bytes.value());
    burst.link_s = std::max(burst.link_s, alone_s);
    burst.delay_s += network.delay(load.link).value();
    burst.crossings.push_back({load.link, load.bytes.value()});
  }
  for (Crossing& crossing : burst.crossings) crossing.share /= burst.busiest_bytes;
  const auto idle = std::remove_if(burst.crossings.begin(), burst.crossings.end(),
                                   [](const Crossing& one) { return one.share < kLeastShare; });
  burst.crossings.erase(idle, burst.crossings.end());
  if (!burst.crossings.empty()) {
    require(std::isfinite(burst.link_s), where, "transfer time alone", burst.link_s,
            "a finite number of seconds");
    burst.alone_s = std::max(burst.link_s, spec.least.value());
  }
  return burst;
}

std::vector<Footprint> footprint_of(const std::vector<Burst>& bursts) {
  std::vector<Footprint> full;  // of each crossing
  std::ptrdiff_t sent = 0;
  for (const Burst& burst : bursts) {
    if (!burst.crossings.empty()) ++sent;
    for (const Crossing& crossing : burst.crossings) {
      const double full_Bps = crossing.share * burst.busiest_bytes / burst.alone_s;
      full.push_back({crossing.link, full_Bps, full_Bps});
    }
  }
  sort_by_link(full);
  std::vector<Footprint> footprint;
  for (auto first = full.begin(); first != full.end();) {
    Footprint link = *first;
    auto at = first;
    for (; at != full.end() && at->link == link.link; ++at) {
      link.peak_Bps = std::max(link.peak_Bps, at->peak_Bps);
      link.least_Bps = std::min(link.least_Bps, at->least_Bps);
    }
    if (at - first < sent) link.least_Bps = 0.0;
    footprint.push_back(link);
    first = at;
  }
  return footprint;
}

}  // namespace

void check_weight(const std::string& where, double weight) {
  require(weight >= 1.0 / kLargestWeight && weight <= kLargestWeight, where, "weight", weight,
          "a number from 1e-6 to 1e6");
}

Network Network::validate(std::vector<LinkSpec> links) {
  std::set<std::string> names;
  for (const LinkSpec& link : links) {
    const std::string where = "link " + link.name;
    if (!names.insert(link.name).second) throw SpecError(where + ": appears twice");
    require(positive(link.capacity.value()), where, "capacity_Bps", link.capacity.value(),
            "a positive finite number");
    require(non_negative(link.delay.value()), where, "delay_s", link.delay.value(),
            "a finite number, 0 or more");
  }
  Network network;
  network.links_ = std::move(links);
  return network;
}

Program Program::validate(const JobSpec& spec, const Network& network) {
  const std::string where = "job " + spec.name;
  require(positive(spec.gpus), where, "gpus", spec.gpus, "a positive finite number");
  require(non_negative(spec.compute.value()), where, "compute_s", spec.compute.value(),
          "a finite number, 0 or more");
  check_weight(where, spec.weight);
  require(std::isfinite(spec.start.value()), where, "start_s", spec.start.value(),
          "a finite number");
  if (spec.iterations) {
    require(*spec.iterations >= 1, where, "iterations", static_cast<double>(*spec.iterations),
            "a whole number, 1 or more");
  }
  Program program;
  program.compute_s_ = spec.compute.value();
  double end_s = 0.0;
  for (std::size_t b = 0; b < spec.bursts.size(); ++b) {
    if (b > 0) {
      require(spec.bursts[b].at >= spec.bursts[b - 1].at, where + ": burst " + std::to_string(b),
              "at", spec.bursts[b].at, "no less than the burst before it");
    }
    Burst burst = compile(spec.bursts[b], program.compute_s_, network,
                          where + ": burst " + std::to_string(b));
    if (!burst.crossings.empty()) {
      end_s = std::max(end_s, burst.at_s) + burst.delay_s + burst.alone_s;
    }
    program.link_s_ += burst.link_s;
    program.bursts_.push_back(std::move(burst));
  }
  program.alone_iteration_s_ = std::max(end_s, program.compute_s_);
  require(std::isfinite(program.alone_iteration_s_) &&
              program.alone_iteration_s_ >= kShortestIteration_s,
          where, "the length of an iteration", program.alone_iteration_s_,
          "at least 1e-9 s of compute or of traffic");
  program.footprint_ = footprint_of(program.bursts_);
  return program;
}

}  // namespace crux::fluid
