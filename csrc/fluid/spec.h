#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace crux::fluid {

using LinkId = std::uint32_t;
using JobId = std::uint32_t;

// A number with its unit in its type: seconds are never added to bytes by mistake.
template <class Unit>
class Quantity {
 public:
  constexpr Quantity() = default;
  constexpr explicit Quantity(double value) : value_(value) {}
  constexpr double value() const { return value_; }

 private:
  double value_ = 0.0;
};

using Seconds = Quantity<struct SecondsUnit>;
using Bytes = Quantity<struct BytesUnit>;
using BytesPerSecond = Quantity<struct BytesPerSecondUnit>;

// Thrown for what cannot be simulated. The message names the job or link and what was expected.
class SpecError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

struct LinkSpec {
  std::string name;
  BytesPerSecond capacity;
  Seconds delay;
};

struct LoadSpec {
  LinkId link;
  Bytes bytes;
};

struct BurstSpec {
  double at = 1.0;  // share of the iteration's compute that is done when it may start
  std::vector<LoadSpec> traffic;
  Seconds least{};  // on an empty network, if it moves anything: its rate has a ceiling
};

struct JobSpec {
  std::string name;
  double gpus = 1.0;
  Seconds compute;
  std::vector<BurstSpec> bursts;  // sent in this order
  int level = 0;                  // a higher one goes first
  double weight = 1.0;
  Seconds start;
  std::optional<std::int64_t> iterations;
};

// The links, checked: capacities positive, delays not negative, names unique.
class Network {
 public:
  static Network validate(std::vector<LinkSpec> links);

  std::size_t size() const { return links_.size(); }
  const std::string& name(LinkId link) const { return links_[link].name; }
  BytesPerSecond capacity(LinkId link) const { return links_[link].capacity; }
  Seconds delay(LinkId link) const { return links_[link].delay; }

 private:
  std::vector<LinkSpec> links_;
};

// One link of a transfer: what it carries as a share of the transfer's busiest link, in (0, 1].
struct Crossing {
  LinkId link;
  double share;
};

// One burst, checked and put in the form that the engine runs.
struct Burst {
  double at_s = 0.0;           // since the start of the iteration
  double delay_s = 0.0;        // of its path
  double link_s = 0.0;         // transfer time at the full rate of its links, max_e M_e / B_e
  double alone_s = 0.0;        // on an empty network: no less than link_s, nor than its least
  double busiest_bytes = 0.0;  // max_e M_e
  std::vector<Crossing> crossings;
};

// Rate of a job on a link while it sends at full speed: the most and the least over its bursts.
struct Footprint {
  LinkId link;
  double peak_Bps;
  double least_Bps;
};

// Throws SpecError for weights so far apart that sums over a link would lose the smaller ones.
void check_weight(const std::string& where, double weight);

// One iteration of a job, checked.
class Program {
 public:
  static Program validate(const JobSpec& spec, const Network& network);

  double compute_s() const { return compute_s_; }
  const std::vector<Burst>& bursts() const { return bursts_; }
  const std::vector<Footprint>& footprint() const { return footprint_; }
  // link_s of all bursts.
  double link_s() const { return link_s_; }
  // Length of an iteration on an empty network.
  double alone_iteration_s() const { return alone_iteration_s_; }

 private:
  double compute_s_ = 0.0;
  double link_s_ = 0.0;
  double alone_iteration_s_ = 0.0;
  std::vector<Burst> bursts_;
  std::vector<Footprint> footprint_;
};

}  // namespace crux::fluid
