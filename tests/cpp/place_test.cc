// Path selection without Python: at its limits, and on random networks.
#include <cstdio>
#include <random>
#include <set>
#include <stdexcept>

#include "../../csrc/schedule/link_set.h"
#include "../../csrc/schedule/pointer_numbers.h"
#include "../../csrc/schedule/schedule.h"
#include "check.h"

using namespace crux::schedule;

namespace {

template <class T>
View<T> view(const std::vector<T>& values) {
  return {values.data(), values.size()};
}

struct Case {
  std::vector<std::int64_t> set_start{0, 2};
  std::vector<std::int64_t> path_start{0, 1, 2};
  std::vector<std::int32_t> path_links{0, 1};
  std::vector<double> capacity_Bps{10.0, 10.0};
  std::vector<std::int64_t> flow_set{0, 0, 0};
  std::vector<double> rate_Bps{4.0, 4.0, 4.0};

  std::vector<std::int64_t> placed(int sweeps = 0) const {
    const Candidates candidates{view(set_start), view(path_start), view(path_links)};
    return place(candidates, view(capacity_Bps), view(flow_set), view(rate_Bps), sweeps);
  }

  bool refused() const {
    try {
      placed();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  }
};

void refuses_numbers_out_of_range() {
  const auto refused = [](auto change) {
    Case wrong;
    change(wrong);
    CHECK(wrong.refused());
  };
  refused([](Case& c) { c.set_start = {0, 3}; });
  refused([](Case& c) { c.set_start = {}; });
  refused([](Case& c) { c.path_start = {}; });
  refused([](Case& c) { c.path_start = {0, 2, 1}; });
  refused([](Case& c) { c.path_links = {0, 2}; });
  refused([](Case& c) { c.path_links = {-1, 0}; });
  refused([](Case& c) { c.flow_set = {0, 1, 0}; });
  refused([](Case& c) { c.rate_Bps = {1.0}; });
}

void random_networks_stay_in_range() {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Case c;
    c.set_start = c.path_start = {0};
    c.path_links.clear();
    c.capacity_Bps.assign(1 + random() % 9, 1.0);
    const std::size_t sets = 1 + random() % 5;
    for (std::size_t s = 0; s < sets; ++s) {
      for (std::size_t p = 1 + random() % 4; p > 0; --p) {
        for (std::size_t l = random() % 4; l > 0; --l) {
          c.path_links.push_back(static_cast<std::int32_t>(random() % c.capacity_Bps.size()));
        }
        c.path_start.push_back(static_cast<std::int64_t>(c.path_links.size()));
      }
      c.set_start.push_back(static_cast<std::int64_t>(c.path_start.size()) - 1);
    }
    c.flow_set.clear();
    c.rate_Bps.clear();
    for (std::size_t f = random() % 30; f > 0; --f) {
      c.flow_set.push_back(static_cast<std::int64_t>(random() % sets));
      c.rate_Bps.push_back(static_cast<double>(random() % 5));
    }
    const auto chosen = c.placed(static_cast<int>(random() % 3));
    CHECK(chosen.size() == c.flow_set.size());
    for (std::size_t f = 0; f < chosen.size(); ++f) {
      const std::int64_t set = c.flow_set[f];
      CHECK(chosen[f] >= 0 && chosen[f] < c.set_start[set + 1] - c.set_start[set]);
    }
  }
}

void unrouted_times_by_hand() {
  // Two flows of 8 bytes, spread over links of 1 and 4 bytes/s, and one of 4 with no choice.
  const std::vector<std::int64_t> set_start{0, 2, 3}, path_start{0, 1, 2, 3};
  const std::vector<std::int32_t> path_links{0, 1, 1};
  const std::vector<double> capacity_Bps{1.0, 4.0}, flow_bytes{8.0, 8.0, 4.0};
  const std::vector<std::int64_t> flow_start{0, 2, 2, 3}, flow_set{0, 0, 1};
  const Candidates candidates{view(set_start), view(path_start), view(path_links)};
  const auto times = [&](const std::vector<std::int64_t>& start) {
    return unrouted_transfer_times_s(candidates, view(capacity_Bps), view(start), view(flow_set),
                                     view(flow_bytes));
  };
  CHECK((times(flow_start) == std::vector<double>{8.0, 0.0, 1.0}));
  bool refused = false;
  try {
    times({0, 2, 4});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void a_set_of_links_gives_each_once_and_ascending() {
  std::mt19937 random(5);
  for (const std::size_t links : {1U, 63U, 64U, 65U, 1000U}) {
    LinkSet set(links);
    for (int round = 0; round < 20; ++round) {
      std::set<std::int32_t> expected{0, static_cast<std::int32_t>(links) - 1};
      for (int i = 0; i < 40; ++i) expected.insert(static_cast<std::int32_t>(random() % links));
      for (const std::int32_t link : expected) set.add(link);
      set.add(*expected.rbegin());
      std::vector<std::int32_t> given;
      set.drain([&](std::int32_t link) { given.push_back(link); });
      CHECK(given == std::vector<std::int32_t>(expected.begin(), expected.end()));
    }
    set.drain([](std::int32_t) { CHECK(false); });
  }
}

void pointers_keep_their_numbers() {
  std::vector<double> objects(5000);
  PointerNumbers numbers;
  for (std::size_t i = 0; i < objects.size(); ++i) {
    CHECK(numbers[&objects[i]] == PointerNumbers::kNone);
    numbers[&objects[i]] = static_cast<std::int64_t>(i);
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    CHECK(numbers[&objects[i]] == static_cast<std::int64_t>(i));
  }
}

}  // namespace

int main() {
  refuses_numbers_out_of_range();
  random_networks_stay_in_range();
  unrouted_times_by_hand();
  a_set_of_links_gives_each_once_and_ascending();
  pointers_keep_their_numbers();
  std::puts("place: ok");
}
