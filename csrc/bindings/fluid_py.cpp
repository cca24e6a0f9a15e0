// crux_torch._fluid: the fluid engine for Python. Names stand for links and jobs on this side.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "../fluid/engine.h"

namespace py = pybind11;
using namespace crux::fluid;

namespace {

// Between two looks at Python's signals: under a second even where an event re-allocates thousands.
constexpr std::uint64_t kEventsPerLook = 10'000;
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Calls it without the GIL.
template <class Call>
auto unlocked(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

class NamedEngine {
 public:
  NamedEngine(const std::vector<std::tuple<std::string, double, double>>& links, bool skip_repeats,
              double repeat_tolerance, double steady_tolerance)
      : engine_(network(links), Options{skip_repeats, repeat_tolerance, steady_tolerance}) {
    for (LinkId link = 0; link < links.size(); ++link) {
      link_ids_[py::str(std::get<0>(links[link]))] = py::int_(link);
    }
  }

  void add_job(const std::string& name, double compute_s, const py::iterable& bursts, double gpus,
               int level, double weight, std::optional<double> start_s,
               std::optional<std::int64_t> iterations) {
    JobSpec spec;
    spec.name = name;
    spec.gpus = gpus;
    spec.compute = Seconds(compute_s);
    spec.level = level;
    spec.weight = weight;
    spec.start = start_s ? Seconds(*start_s) : engine_.now();
    spec.iterations = iterations;
    std::vector<std::vector<LoadSpec>> parts;  // of one burst after the other
    std::size_t widest = 1;
    std::vector<std::size_t> first;
    for (const py::handle item : bursts) {
      const auto burst = item.cast<py::tuple>();
      if (burst.size() < 2 || burst.size() > 3) {
        throw SpecError("job " + name + ": expected bursts of at, traffic and perhaps least_s");
      }
      const double least_s = burst.size() == 3 ? burst[2].cast<double>() : 0.0;
      spec.bursts.push_back({burst[0].cast<double>(), {}, Seconds(least_s)});
      const py::object traffic = burst[1];
      first.push_back(parts.size());
      for (std::vector<LoadSpec>& part : parts_of(traffic)) parts.push_back(std::move(part));
      widest = std::max(widest, parts.size() - first.back());
    }
    first.push_back(parts.size());
    spec.gpus /= static_cast<double>(widest);
    std::vector<JobSpec> team(widest, spec);
    for (std::size_t i = 0; i < widest; ++i) {
      if (i > 0) team[i].name += '\n' + std::to_string(i);  // no name of a caller's
      for (std::size_t b = 0; b < spec.bursts.size(); ++b) {
        if (first[b] + i < first[b + 1]) team[i].bursts[b].traffic = parts[first[b] + i];
      }
    }
    const std::vector<JobId> members = engine_.add_team(std::move(team));
    teams_.emplace(members.front(), members);
  }

  void remove_job(const std::string& name) {
    for (JobId job : members(name)) engine_.remove_job(job);
  }
  void set_level(const std::string& name, int level) {
    for (JobId job : members(name)) engine_.set_level(job, level);
  }
  void set_weight(const std::string& name, double weight, std::optional<std::size_t> part) {
    if (part) return engine_.set_weight(member(name, *part), weight);
    for (JobId job : members(name)) engine_.set_weight(job, weight);
  }
  void shift(const std::string& name, double by_s) {
    for (JobId job : members(name)) engine_.shift(job, Seconds(by_s));
  }

  void set_pace(const std::string& name, double origin_s, std::optional<double> period_s,
                double tolerance) {
    std::optional<Pace> pace;
    if (period_s) pace = Pace{Seconds(origin_s), Seconds(*period_s), tolerance};
    for (JobId job : members(name)) engine_.set_pace(job, pace);
  }

  void set_rate_limit(const std::string& name, std::optional<double> limit_Bps, std::size_t part) {
    std::optional<BytesPerSecond> limit;
    if (limit_Bps) limit = BytesPerSecond(*limit_Bps);
    engine_.set_rate_limit(member(name, part), limit);
  }

  std::optional<double> bytes_left(const std::string& name, std::size_t part) {
    return engine_.bytes_left(member(name, part));
  }

  double comm_s(const std::string& name, std::size_t part) {
    return engine_.result(member(name, part)).comm_s;
  }

  void set_traffic(const std::string& name, const py::sequence& traffic) {
    const std::vector<JobId>& team = members(name);
    std::vector<std::vector<std::vector<LoadSpec>>> each(team.size());
    for (const py::handle burst : traffic) {
      std::vector<std::vector<LoadSpec>> parts = parts_of(burst);
      if (parts.size() > team.size()) {
        throw SpecError("job " + name + ": expected no more parts than it began with");
      }
      parts.resize(team.size());
      for (std::size_t i = 0; i < team.size(); ++i) each[i].push_back(std::move(parts[i]));
    }
    engine_.set_traffic(team, std::move(each));
  }

  void run_until(double until_s, const std::optional<py::function>& progress) {
    run([&] { return engine_.run_until(Seconds(until_s), kEventsPerLook); }, progress);
  }

  std::vector<std::string> run_until_end_of_any(double until_s) {
    run([&] { return engine_.run_until_end_of_any(Seconds(until_s), kEventsPerLook); });
    std::vector<std::string> names;
    for (JobId job : engine_.ended()) {
      if (teams_.count(job) != 0) names.push_back(engine_.spec(job).name);
    }
    return names;
  }

  double now_s() const { return engine_.now().value(); }
  std::uint64_t events() const { return engine_.events(); }
  std::uint64_t work() const { return engine_.work(); }
  double gpu_utilization() {
    return unlocked([&] { return engine_.gpu_utilization(); });
  }

  py::dict result(const std::string& name) {
    std::vector<JobResult> of;
    for (JobId job : members(name)) of.push_back(engine_.result(job));
    return to_dict(whole(of));
  }

  py::dict results() {
    const std::vector<JobResult> all = unlocked([&] { return engine_.results(); });
    py::dict out;
    for (JobId job = 0; job < all.size(); ++job) {
      const auto team = teams_.find(job);
      if (team == teams_.end()) continue;
      std::vector<JobResult> of;
      for (JobId member : team->second) of.push_back(all[member]);
      out[py::str(engine_.spec(job).name)] = to_dict(whole(of));
    }
    return out;
  }

  py::dict link_bytes() {
    const std::vector<double> bytes = unlocked([&] { return engine_.link_bytes(); });
    py::dict out;
    for (LinkId link = 0; link < bytes.size(); ++link) {
      out[py::str(engine_.network().name(link))] = bytes[link];
    }
    return out;
  }

  Engine& engine() { return engine_; }

 private:
  static Network network(const std::vector<std::tuple<std::string, double, double>>& links) {
    std::vector<LinkSpec> specs;
    specs.reserve(links.size());
    for (const auto& [name, capacity_Bps, delay_s] : links) {
      specs.push_back({name, BytesPerSecond(capacity_Bps), Seconds(delay_s)});
    }
    return Network::validate(std::move(specs));
  }

  // A job's result: its parts go through their iterations together.
  static JobResult whole(const std::vector<JobResult>& parts) {
    JobResult result = parts.front();
    for (const JobResult& part : parts) result.comm_s = std::max(result.comm_s, part.comm_s);
    return result;
  }

  static py::dict to_dict(const JobResult& result) {
    py::dict out;
    out["completed"] = result.completed;
    out["compute_s"] = result.compute_s;
    out["comm_s"] = result.comm_s;
    out["mean_iteration_s"] = result.mean_iteration_s;
    out["start_s"] = result.start_s;
    out["end_s"] = result.end_s;
    return out;
  }

  JobId id(const std::string& name) const {
    const auto found = engine_.find(name);
    if (!found) throw SpecError("no job " + name);
    return *found;
  }

  const std::vector<JobId>& members(const std::string& name) const { return teams_.at(id(name)); }

  JobId member(const std::string& name, std::size_t part) const {
    const std::vector<JobId>& team = members(name);
    if (part < team.size()) return team[part];
    throw SpecError("job " + name + ": expected a part below " + std::to_string(team.size()));
  }

  // The traffic of each part of a burst.
  std::vector<std::vector<LoadSpec>> parts_of(const py::handle& burst) const {
    if (!py::isinstance<py::list>(burst)) return {loads(burst)};
    std::vector<std::vector<LoadSpec>> parts;
    for (const py::handle part : burst) parts.push_back(loads(part));
    return parts;
  }

  // Loads of links by name, or by number.
  std::vector<LoadSpec> loads(const py::handle& traffic) const {
    if (py::isinstance<py::dict>(traffic)) return loads(py::reinterpret_borrow<py::dict>(traffic));
    const auto [links, bytes] = traffic.cast<std::pair<Array<std::int32_t>, Array<double>>>();
    if (links.ndim() != 1 || bytes.ndim() != 1 || links.size() != bytes.size()) {
      throw SpecError("expected as many bytes as links");
    }
    std::vector<LoadSpec> out;
    out.reserve(links.size());
    for (py::ssize_t i = 0; i < links.size(); ++i) {
      out.push_back({static_cast<LinkId>(links.data()[i]), Bytes(bytes.data()[i])});
    }
    return out;
  }

  std::vector<LoadSpec> loads(const py::dict& traffic) const {
    std::vector<LoadSpec> out;
    out.reserve(traffic.size());
    for (const auto& [key, value] : traffic) {
      PyObject* found = PyDict_GetItemWithError(link_ids_.ptr(), key.ptr());
      if (found == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        throw SpecError("no link " + key.cast<std::string>());
      }
      out.push_back({py::handle(found).cast<LinkId>(), Bytes(value.cast<double>())});
    }
    return out;
  }

  // Runs until step() is done; other Python threads run meanwhile and Ctrl-C gets through.
  template <class Step>
  void run(const Step& step, const std::optional<py::function>& progress = std::nullopt) {
    for (bool done = false; !done;) {
      done = unlocked(step);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (progress) (*progress)(now_s());
    }
  }

  Engine engine_;
  py::dict link_ids_;  // by name; never changed, so that copies share it
  std::unordered_map<JobId, std::vector<JobId>> teams_;  // by their first job
};

// Runs independent engines side by side; each is as it would be alone.
void run_all(const std::vector<NamedEngine*>& engines, const std::vector<double>& until_s,
             unsigned threads) {
  if (engines.size() != until_s.size()) {
    throw SpecError("run_all: expected one end time for each engine");
  }
  for (std::size_t i = 0; i < engines.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (engines[i] == engines[j]) throw SpecError("run_all: an engine appears twice");
    }
  }
  std::vector<std::exception_ptr> errors(engines.size());
  std::atomic<std::size_t> next{0};
  std::atomic<bool> interrupted{false};
  std::mutex mutex;
  std::condition_variable all_done;
  std::size_t working = std::min<std::size_t>(std::max(threads, 1U), engines.size());
  const auto work = [&] {
    for (std::size_t i = next++; i < engines.size(); i = next++) {
      try {
        while (!interrupted &&
               !engines[i]->engine().run_until(Seconds(until_s[i]), kEventsPerLook)) {
        }
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (--working == 0) all_done.notify_all();
  };
  {
    py::gil_scoped_release release;
    std::vector<std::thread> pool;
    for (std::size_t i = working; i > 0; --i) pool.emplace_back(work);
    // This thread is the one that may see Ctrl-C.
    for (bool done = false; !done;) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        done = all_done.wait_for(lock, kBetweenLooks, [&] { return working == 0; });
      }
      const py::gil_scoped_acquire acquire;
      if (!interrupted && PyErr_CheckSignals() != 0) {
        errors.push_back(std::make_exception_ptr(py::error_already_set()));
        interrupted = true;
      }
    }
    for (std::thread& thread : pool) thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

PYBIND11_MODULE(_fluid, m) {
  using namespace py::literals;
  m.doc() = "The fluid network simulator's engine.";
  py::register_exception<SpecError>(m, "SpecError", PyExc_ValueError);
  py::class_<NamedEngine>(m, "Engine")
      .def(py::init<const std::vector<std::tuple<std::string, double, double>>&, bool, double,
                    double>(),
           "links"_a, py::kw_only(), "skip_repeats"_a = true,
           "repeat_tolerance"_a = Options{}.repeat_tolerance,
           "steady_tolerance"_a = Options{}.steady_tolerance)
      .def("add_job", &NamedEngine::add_job, "name"_a, py::kw_only(), "compute_s"_a, "bursts"_a,
           "gpus"_a = 1.0, "level"_a = 0, "weight"_a = 1.0, "start_s"_a = py::none(),
           "iterations"_a = py::none())
      .def("__copy__", [](const NamedEngine& engine) { return NamedEngine(engine); })
      .def("remove_job", &NamedEngine::remove_job, "name"_a)
      .def("set_level", &NamedEngine::set_level, "name"_a, "level"_a)
      .def("set_weight", &NamedEngine::set_weight, "name"_a, "weight"_a, "part"_a = py::none())
      .def("set_traffic", &NamedEngine::set_traffic, "name"_a, "traffic"_a)
      .def("shift", &NamedEngine::shift, "name"_a, "by_s"_a)
      .def("set_pace", &NamedEngine::set_pace, "name"_a, py::kw_only(), "origin_s"_a, "period_s"_a,
           "tolerance"_a)
      .def("set_rate_limit", &NamedEngine::set_rate_limit, "name"_a, "limit_Bps"_a, "part"_a = 0)
      .def("bytes_left", &NamedEngine::bytes_left, "name"_a, "part"_a = 0)
      .def("comm_s", &NamedEngine::comm_s, "name"_a, "part"_a = 0)
      .def("run_until", &NamedEngine::run_until, "until_s"_a, "progress"_a = py::none())
      .def("run_until_end_of_any", &NamedEngine::run_until_end_of_any, "until_s"_a)
      .def("result", &NamedEngine::result, "name"_a)
      .def("results", &NamedEngine::results)
      .def("link_bytes", &NamedEngine::link_bytes)
      .def("gpu_utilization", &NamedEngine::gpu_utilization)
      .def_property_readonly("now_s", &NamedEngine::now_s)
      .def_property_readonly("events", &NamedEngine::events)
      .def_property_readonly("work", &NamedEngine::work);
  m.def("run_all", &run_all, "engines"_a, "until_s"_a, "threads"_a = 1);
}
