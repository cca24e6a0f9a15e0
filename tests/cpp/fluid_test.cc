// The fluid engine without Python: a random churn of jobs for the sanitizers.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/fluid/engine.h"
#include "check.h"

using namespace crux::fluid;

namespace {

constexpr double kGB = 1e9;

JobSpec job(const std::string& name, double compute_s, std::vector<BurstSpec> bursts,
            int level = 0) {
  JobSpec spec;
  spec.name = name;
  spec.compute = Seconds(compute_s);
  spec.bursts = std::move(bursts);
  spec.level = level;
  return spec;
}

BurstSpec burst(double at, std::vector<LoadSpec> traffic) { return {at, std::move(traffic)}; }

void queue_gives_times_in_order_and_ties_by_id() {
  EventQueue queue;
  for (std::uint32_t id = 0; id < 200; ++id) queue.grow(id);
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    const std::uint32_t id = random() % 200;
    if (random() % 4 == 0) {
      queue.remove(id);
    } else {
      queue.set(id, static_cast<double>(random() % 50));
    }
  }
  double time = -1.0;
  std::uint32_t id = 0;
  while (queue.next_time() != EventQueue::kNever) {
    CHECK(queue.next_time() > time || (queue.next_time() == time && queue.next_id() > id));
    time = queue.next_time();
    id = queue.next_id();
    queue.remove(id);
  }
}

void a_point_of_a_grid_that_is_now_holds_nobody() {
  // So late that the clock takes the next point of the grid for the same instant.
  constexpr double kNow = 1e6;
  Engine engine(Network::validate({{"l", BytesPerSecond(kGB), Seconds(0)}}));
  CHECK(engine.run_until(Seconds(kNow)));
  JobSpec late = job("j", 1.0, {});
  late.start = Seconds(kNow);
  const JobId id = engine.add_job(late);
  engine.set_pace(id, Pace{Seconds(kNow + 5e-8), Seconds(0.01), 0.0});
  CHECK(engine.run_until(Seconds(kNow + 3.5), 1000));
  CHECK(engine.result(id).completed == 3);
}

void refuses_what_it_cannot_simulate() {
  Engine engine(Network::validate({{"l", BytesPerSecond(kGB), Seconds(0)}}));
  for (JobSpec spec :
       {job("nan", NAN, {}), job("nothing", 0, {}), job("link", 1, {burst(1, {{7, Bytes(1)}})}),
        job("at", 1, {burst(-0.1, {{0, Bytes(1)}})})}) {
    bool refused = false;
    try {
      engine.add_job(spec);
    } catch (const SpecError&) {
      refused = true;
    }
    CHECK(refused);
  }
  CHECK(engine.job_count() == 0);
}

void transfers_next_to_nothing_are_none() {
  Engine engine(Network::validate({{"l", BytesPerSecond(kGB), Seconds(0)}}));
  const JobId id = engine.add_job(job("j", 1.0, {burst(0.5, {{0, Bytes(1e-300)}})}));
  CHECK(engine.run_until(Seconds(10.5)));
  CHECK(engine.result(id).completed == 10 && engine.link_bytes()[0] == 0.0);
}

void refuses_a_grid_that_its_clock_does_not_resolve() {
  Engine engine(Network::validate({{"l", BytesPerSecond(kGB), Seconds(0)}}));
  const JobId id = engine.add_job(job("j", 1.0, {}));
  bool refused = false;
  try {
    engine.set_pace(id, Pace{Seconds(0), Seconds(1e-316), 0.0});
  } catch (const SpecError&) {
    refused = true;
  }
  CHECK(refused);
}

void refuses_a_job_that_its_clock_does_not_resolve_any_more() {
  Engine engine(Network::validate({{"l", BytesPerSecond(kGB), Seconds(0)}}));
  JobSpec slow = job("slow", 1e6, {burst(1, {{0, Bytes(1)}})}), fast = job("fast", 1e-6, {});
  const JobId id = engine.add_job(slow);
  CHECK(engine.run_until(Seconds(1e9)));
  fast.start = engine.now();
  bool refused = false;
  try {
    engine.add_job(fast);
  } catch (const SpecError& error) {
    refused = std::string(error.what()).find("job fast") != std::string::npos;
  }
  CHECK(refused);
  CHECK(engine.results().size() == 1 && engine.result(id).completed >= 998);
}

// Random jobs come, go, and change level and path; links never carry more than they can.
void churn(unsigned seed, const Options& options) {
  constexpr int kSteps = 120;
  std::mt19937 random(seed);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random()) / 4294967296.0;
  };
  std::vector<LinkSpec> links;
  for (int i = 0; i < 12; ++i) {
    links.push_back({"l" + std::to_string(i), BytesPerSecond(uniform(0.5, 4) * kGB),
                     Seconds(i % 4 == 0 ? 1e-3 : 0.0)});
  }
  const auto traffic = [&] {
    std::vector<LoadSpec> loads;
    for (LinkId link = 0; link < 12; ++link) {
      if (random() % 4 == 0) loads.push_back({link, Bytes(uniform(0.01, 0.4) * kGB)});
    }
    return loads;
  };
  Engine engine(Network::validate(links), options);
  // Steady rates are measured: their sum on a link may be off by as much as they are.
  const double slack = options.steady_tolerance > 0.0 ? 0.5 : 1e-9;
  std::vector<double> before(12, 0.0);
  double now = 0.0;
  for (int step = 0; step < kSteps; ++step) {
    if (random() % 2 == 0) {
      JobSpec spec =
          job("j" + std::to_string(step), uniform(0.01, 0.5),
              {burst(0.3, traffic()), burst(0.8, traffic())}, static_cast<int>(random() % 4));
      spec.start = Seconds(now + uniform(0, 2));
      spec.weight = uniform(0.5, 2);
      if (random() % 2 == 0) spec.iterations = 1 + random() % 300;
      engine.add_job(spec);
    }
    if (engine.job_count() > 0) {
      const JobId id = random() % engine.job_count();
      switch (random() % 6) {
        case 0:
          engine.remove_job(id);
          break;
        case 1:
          engine.set_level(id, static_cast<int>(random() % 4));
          break;
        case 2:
          engine.set_traffic({id}, {{traffic(), traffic()}});
          break;
        case 3:
          engine.shift(id, Seconds(uniform(0, 1)));
          break;
        case 4:
          engine.set_pace(id, Pace{Seconds(uniform(-1, 1)), Seconds(uniform(0.1, 1)), 0.05});
          break;
        default:
          engine.set_weight(id, uniform(0.5, 2));
      }
    }
    const double next = now + (step % 10 == 0 ? 100.0 : uniform(0, 1));
    if (step % 3 == 0) {
      engine.run_until_end_of_any(Seconds(next));
    } else {
      engine.run_until(Seconds(next));
    }
    const double elapsed = engine.now().value() - now;
    now = engine.now().value();
    const std::vector<double> bytes = engine.link_bytes();
    for (LinkId link = 0; link < 12; ++link) {
      const double most = elapsed * links[link].capacity.value();
      CHECK(bytes[link] - before[link] <= most * (1 + slack) + 100.0 + slack * kGB);
      CHECK(bytes[link] - before[link] >= -100.0);
    }
    before = bytes;
    for (const JobResult& result : engine.results()) {
      CHECK(result.compute_s >= 0.0 && result.compute_s <= now + 1e-6);
      CHECK(result.comm_s >= -1e-9 && result.comm_s <= now + 1e-6);
    }
  }
}

// Which links are contended, by the definition: every link of a job against every other.
class PlainSharing {
 public:
  explicit PlainSharing(std::vector<double> capacity_Bps)
      : capacity_Bps_(std::move(capacity_Bps)),
        users_(capacity_Bps_.size()),
        dominated_(capacity_Bps_.size()) {}

  void add(JobId job, const std::vector<Footprint>& footprint) {
    for (const Footprint& f : footprint) users_[f.link].emplace(job, f);
    for (const Footprint& b : footprint) {
      dominated_[b.link] = std::any_of(footprint.begin(), footprint.end(), [&](const Footprint& a) {
        return a.link != b.link && overbooked(a.link) && dominates(a.link, b.link) &&
               (a.link < b.link || !dominates(b.link, a.link));
      });
    }
  }

  void remove(JobId job, const std::vector<Footprint>& footprint) {
    for (const Footprint& f : footprint) users_[f.link].erase(job);
  }

  bool contended(LinkId link) const { return overbooked(link) && !dominated_[link]; }

 private:
  bool overbooked(LinkId link) const {
    double sum = 0.0;
    for (const auto& [job, f] : users_[link]) sum += f.peak_Bps;
    return users_[link].size() > 1 && sum > capacity_Bps_[link] * (1.0 + 1e-12);
  }

  bool dominates(LinkId a, LinkId b) const {
    return std::all_of(users_[b].begin(), users_[b].end(), [&](const auto& user) {
      const auto other = users_[a].find(user.first);
      return other != users_[a].end() &&
             user.second.peak_Bps * capacity_Bps_[a] <=
                 other->second.least_Bps * capacity_Bps_[b] * (1.0 + 1e-12);
    });
  }

  std::vector<double> capacity_Bps_;
  std::vector<std::map<JobId, Footprint>> users_;
  std::vector<bool> dominated_;
};

void the_contended_links_are_those_of_the_definition(unsigned seed) {
  constexpr LinkId kLinks = 12;
  std::mt19937 random(seed);
  std::vector<LinkSpec> links;
  std::vector<double> capacity_Bps;
  for (LinkId link = 0; link < kLinks; ++link) {
    capacity_Bps.push_back(1.0 + random() % 3);
    links.push_back({std::to_string(link), BytesPerSecond(capacity_Bps.back()), Seconds(0)});
  }
  Sharing sharing(Network::validate(links));
  PlainSharing plain(capacity_Bps);
  std::map<JobId, std::vector<Footprint>> present;
  for (JobId job = 0; job < 600; ++job) {
    // Neighbouring links, so that many have the same jobs.
    const auto first = static_cast<LinkId>(random() % kLinks);
    const double peak_Bps = 0.5 + random() % 2;
    std::vector<Footprint>& footprint = present[job];
    const auto end = std::min<LinkId>(first + 1 + random() % 6, kLinks);
    for (LinkId link = first; link < end; ++link) {
      footprint.push_back({link, peak_Bps, random() % 8 == 0 ? 0.0 : peak_Bps});
    }
    sharing.add(job, footprint);
    plain.add(job, footprint);
    while (present.size() > 1 + random() % 12) {
      const auto gone = std::next(present.begin(), random() % present.size());
      sharing.remove(gone->first, gone->second);
      plain.remove(gone->first, gone->second);
      present.erase(gone);
    }
    for (LinkId link = 0; link < kLinks; ++link) {
      CHECK(sharing.contended(link) == plain.contended(link));
    }
  }
}

void marks_give_the_first_leaf_of_the_lowest_key() {
  std::mt19937 random(7);
  MarkTree marks;
  for (const std::uint32_t leaves : {1U, 16U, 17U, 300U, 5000U}) {
    marks.clear();
    std::vector<double> keys;
    while (keys.size() < leaves) {
      CHECK(marks.add(1000 + keys.size()) == keys.size());
      keys.push_back(MarkTree::kNever);
      for (int moves = 0; moves < 3; ++moves) {
        const std::uint32_t leaf = random() % keys.size();
        keys[leaf] = random() % 4 == 0 ? MarkTree::kNever : static_cast<double>(random() % 50);
        marks.set(leaf, keys[leaf]);
      }
      if (random() % 8 != 0) continue;
      const auto lowest = std::min_element(keys.begin(), keys.end());
      const std::uint32_t found = marks.lowest_leaf();
      CHECK(marks.key(found) == *lowest);
      if (*lowest == MarkTree::kNever) continue;
      CHECK(found == static_cast<std::uint32_t>(lowest - keys.begin()));
      CHECK(marks.owner(found) == 1000 + found);
    }
  }
}

}  // namespace

int main() {
  marks_give_the_first_leaf_of_the_lowest_key();
  queue_gives_times_in_order_and_ties_by_id();
  a_point_of_a_grid_that_is_now_holds_nobody();
  for (unsigned seed = 0; seed < 4; ++seed) {
    the_contended_links_are_those_of_the_definition(seed);
  }
  refuses_what_it_cannot_simulate();
  transfers_next_to_nothing_are_none();
  refuses_a_grid_that_its_clock_does_not_resolve();
  refuses_a_job_that_its_clock_does_not_resolve_any_more();
  // Two at a time: engines share nothing.
  const Options played{false, 1e-9, 0.0};
  const Options skipped;
  const Options steady{true, 1e-9, 0.2};
  for (unsigned seed = 0; seed < 6; seed += 2) {
    std::thread other(churn, seed + 1, seed == 0 ? played : steady);
    churn(seed, seed == 4 ? steady : skipped);
    other.join();
  }
  std::puts("fluid: ok");
  return 0;
}
