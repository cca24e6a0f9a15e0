// The game of two jobs on one link without Python: by hand, at its limits, and on random jobs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>

#include "../../csrc/schedule/schedule.h"
#include "check.h"

using namespace crux::schedule;

namespace {

template <class T>
View<T> view(const std::vector<T>& values) {
  return {values.data(), values.size()};
}

struct Case {
  // Both compute for a second and then send for one.
  std::vector<double> compute_s{1.0, 1.0};
  std::vector<std::int64_t> burst_start{0, 1, 2};
  std::vector<double> due_s{1.0, 1.0}, burst_s{1.0, 1.0};
  std::vector<std::int64_t> second{0}, first{1};
  GameLength length{8, 8, 24};

  std::vector<double> rates() const {
    const Players players{view(compute_s), view(burst_start), view(due_s), view(burst_s)};
    return rates_when_second(players, view(second), view(first), length, 1e-9);
  }
};

void by_hand() {
  Case c;
  CHECK(std::abs(c.rates().at(0) - 0.5) < 1e-9);
  c.compute_s[1] = c.due_s[1] = 0.0;  // the first never leaves the link
  CHECK(c.rates() == std::vector<double>{0.0});
  c.second = c.first = {};
  CHECK(c.rates().empty());
}

void refuses_numbers_out_of_range() {
  const auto refused = [](auto change) {
    Case wrong;
    change(wrong);
    bool thrown = false;
    try {
      wrong.rates();
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  };
  refused([](Case& c) { c.second = {2}; });
  refused([](Case& c) { c.first = {-1}; });
  refused([](Case& c) { c.first = {0, 1}; });
  refused([](Case& c) { c.burst_start = {0, 2}; });
  refused([](Case& c) { c.burst_start = {0, 0, 2}; });
  refused([](Case& c) { c.burst_start = {0, 1, 3}; });
  refused([](Case& c) { c.due_s = {1.0}; });
  refused([](Case& c) { c.length.phases = 0; });
  refused([](Case& c) { c.length.measured = 0; });
  refused([](Case& c) { c.length.warm_up = -1; });
}

void nobody_gets_more_than_alone() {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> seconds(0.05, 5.0), share(0.0, 1.0);
  for (int round = 0; round < 300; ++round) {
    Case c;
    c.burst_start = {0};
    c.due_s.clear();
    c.burst_s.clear();
    for (double& compute_s : c.compute_s) {
      compute_s = seconds(random);
      double at = 0.0;
      for (std::size_t left = 1 + random() % 4; left > 0; --left) {
        at += (1.0 - at) * share(random);
        c.due_s.push_back(at * compute_s);
        c.burst_s.push_back(seconds(random));
      }
      c.burst_start.push_back(static_cast<std::int64_t>(c.burst_s.size()));
    }
    double link_s = 0.0, end_s = 0.0;
    for (std::int64_t b = 0; b < c.burst_start[1]; ++b) {
      link_s += c.burst_s[b];
      end_s = std::max(end_s, c.due_s[b]) + c.burst_s[b];
    }
    const double alone = link_s / std::max(c.compute_s[0], end_s);
    const double rate = c.rates().at(0);
    CHECK(rate >= 0.0 && rate <= alone * (1.0 + 1e-6));
  }
}

}  // namespace

int main() {
  by_hand();
  refuses_numbers_out_of_range();
  nobody_gets_more_than_alone();
  std::puts("game: ok");
}
