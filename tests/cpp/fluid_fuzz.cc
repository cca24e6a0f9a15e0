// The fluid engine under any calls that it takes: it ends, links carry no more than they can, and
// no job computes for longer than it was there.

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/fluid/engine.h"
#include "check.h"
#include "fuzz.h"

using namespace crux::fluid;

namespace {

constexpr std::uint64_t kEvents = 5000;
constexpr unsigned kCalls = 64;

JobSpec draw_job(crux::Input& input, unsigned links, unsigned number, Seconds now) {
  JobSpec spec;
  spec.name = "job " + std::to_string(number);
  spec.compute = Seconds(input.number());
  spec.level = static_cast<int>(input.up_to(3));
  spec.start = Seconds(now.value() + (input.up_to(1) == 0 ? 0.0 : input.number()));
  if (input.up_to(1) == 1) spec.iterations = input.up_to(20);
  const unsigned bursts = input.up_to(3);
  for (unsigned b = 0; b < bursts; ++b) {
    BurstSpec burst;
    burst.at = input.number() / 256.0;
    for (unsigned n = input.up_to(2) + 1; n > 0; --n) {
      burst.traffic.push_back({input.up_to(links), Bytes(input.number() * 1e6)});
    }
    if (input.up_to(1) == 1) burst.least = Seconds(input.number());
    spec.bursts.push_back(std::move(burst));
  }
  return spec;
}

void call(crux::Input& input, Engine& engine, unsigned links, unsigned number) {
  const unsigned what = input.up_to(8);
  const auto id = static_cast<JobId>(input.up_to(7));
  const Seconds now = engine.now();
  if (what <= 1) {
    engine.add_job(draw_job(input, links, number, now));
  } else if (what == 2) {
    (void)engine.run_until(Seconds(now.value() + input.number()), kEvents);
  } else if (id >= engine.job_count()) {
    return;
  } else if (what == 3) {
    engine.set_level(id, static_cast<int>(input.up_to(3)));
  } else if (what == 4) {
    engine.set_weight(id, input.number());
  } else if (what == 5) {
    engine.shift(id, Seconds(input.number()));
  } else if (what == 6) {
    std::optional<Pace> pace;
    if (input.up_to(3) != 0) {
      pace = Pace{Seconds(input.number()), Seconds(input.number()), input.number() / 256.0};
    }
    engine.set_pace(id, pace);
  } else if (what == 7) {
    std::optional<BytesPerSecond> limit;
    if (input.up_to(3) != 0) limit = BytesPerSecond(input.number() * 1e6);
    engine.set_rate_limit(id, limit);
  } else {
    engine.remove_job(id);
  }
}

void check(Engine& engine, const Options& options) {
  const double beyond = 1.0 + 1e-6 + options.steady_tolerance;
  const double now = engine.now().value();
  CHECK(std::isfinite(now) && now >= 0.0);
  const std::vector<double> carried = engine.link_bytes();
  for (std::size_t link = 0; link < carried.size(); ++link) {
    const double most = engine.network().capacity(static_cast<LinkId>(link)).value() * now;
    CHECK(carried[link] >= 0.0 && carried[link] <= most * beyond + 1.0);
  }
  for (const JobResult& job : engine.results()) {
    CHECK(job.completed >= 0);
    CHECK(job.compute_s >= 0.0 && job.compute_s <= now * beyond + 1e-6);
    CHECK(!job.mean_iteration_s || *job.mean_iteration_s >= 0.0);
  }
  const double utilization = engine.gpu_utilization();
  CHECK(utilization >= 0.0 && utilization <= beyond);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crux::Input input(data, size);
  const unsigned links = input.up_to(3) + 1;
  std::vector<LinkSpec> specs;
  for (unsigned n = 0; n < links; ++n) {
    specs.push_back({"link " + std::to_string(n), BytesPerSecond((input.up_to(9) + 1) * 1e8),
                     Seconds(input.up_to(3) * 1e-6)});
  }
  Options options;
  options.skip_repeats = input.up_to(3) != 0;
  if (input.up_to(1) == 1) options.steady_tolerance = 0.01;
  Engine engine(Network::validate(specs), options);
  for (unsigned n = 0; n < kCalls && !input.empty(); ++n) {
    try {
      call(input, engine, links, n);
    } catch (const SpecError&) {
    }
    check(engine, options);
  }
  return 0;
}
