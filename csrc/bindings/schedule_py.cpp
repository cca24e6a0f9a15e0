// crux_torch._schedule: what a decision does once for every link of every candidate path, and for
// every pair of jobs that meet.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../schedule/pointer_numbers.h"
#include "../schedule/schedule.h"

namespace py = pybind11;
using namespace crux::schedule;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
View<T> view(const Array<T>& array) {
  if (array.ndim() != 1) throw std::invalid_argument("expected arrays of one dimension");
  return {array.data(), static_cast<std::size_t>(array.size())};
}

template <class T>
py::array_t<T> to_array(std::vector<T>&& values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(owned->size());
  const T* data = owned->data();
  const py::capsule owner(owned.get(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  owned.release();
  return py::array_t<T>(size, data, owner);
}

// A tuple or list, looked into without a copy.
class Items {
 public:
  Items(const py::handle& sequence, const char* expected)
      : fast_(py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), expected))) {
    if (!fast_) throw py::error_already_set();
  }
  std::size_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  PyObject** begin() const { return PySequence_Fast_ITEMS(fast_.ptr()); }
  PyObject** end() const { return begin() + size(); }

 private:
  py::object fast_;
};

// The arrays of one reading: see crux_torch.schedule.arrays.Arrays.
struct FlowArrays {
  std::vector<std::int64_t> flow_start{0};
  std::vector<double> flow_bytes;
  std::vector<std::int64_t> flow_set;
  std::vector<std::int64_t> set_start{0};
  std::vector<std::int64_t> path_start{0};
  std::vector<std::int32_t> path_links;

  py::tuple to_tuple() && {
    return py::make_tuple(to_array(std::move(flow_start)), to_array(std::move(flow_bytes)),
                          to_array(std::move(flow_set)), to_array(std::move(set_start)),
                          to_array(std::move(path_start)), to_array(std::move(path_links)));
  }

  // Appends a candidate set of `from`.
  void add_set(const FlowArrays& from, std::int64_t set) {
    const std::int64_t first = from.set_start[set], last = from.set_start[set + 1];
    const std::int64_t begin = from.path_start[first], end = from.path_start[last];
    const std::int64_t moved = static_cast<std::int64_t>(path_links.size()) - begin;
    const std::size_t paths = path_start.size();
    path_start.resize(paths + static_cast<std::size_t>(last - first));
    std::transform(from.path_start.begin() + first + 1, from.path_start.begin() + last + 1,
                   path_start.begin() + static_cast<std::ptrdiff_t>(paths),
                   [moved](std::int64_t start) { return start + moved; });
    path_links.insert(path_links.end(), from.path_links.begin() + begin,
                      from.path_links.begin() + end);
    close_set();
  }

  void close_set() { set_start.push_back(static_cast<std::int64_t>(path_start.size()) - 1); }
};

// Places of links in a tuple of names.
class LinkPlaces {
 public:
  explicit LinkPlaces(const py::tuple& links) : links_(links) {
    const Items names(links, "links must be a tuple of names");
    if (names.size() > std::numeric_limits<std::int32_t>::max()) {
      throw std::invalid_argument("too many links");
    }
    nowhere_ = static_cast<std::int32_t>(names.size());
    std::int64_t number = 0;
    for (PyObject* name : names) by_pointer_[name] = number++;
  }

  std::int32_t nowhere() const { return nowhere_; }
  bool are_of(const py::tuple& links) const { return links_.is(links) || links_.equal(links); }

  // Good while `link` is alive: an address that is used again may have another name.
  std::int32_t operator[](PyObject* link) {
    std::int64_t& number = by_pointer_[link];
    if (number == PointerNumbers::kNone) number = named(link);
    return static_cast<std::int32_t>(number);
  }

 private:
  // Names that are equal but another object than in `links_`.
  std::int64_t named(PyObject* link) {
    if (!by_name_) {
      by_name_ = py::dict();
      std::int64_t number = 0;
      for (const py::handle name : links_) by_name_[name] = py::int_(number++);
    }
    PyObject* found = PyDict_GetItemWithError(by_name_.ptr(), link);
    if (found == nullptr) {
      if (PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, link);
      throw py::error_already_set();
    }
    return py::handle(found).cast<std::int64_t>();
  }

  py::tuple links_;
  std::int32_t nowhere_;
  PointerNumbers by_pointer_;
  py::object by_name_;
};

// Jobs' flows and their candidate paths as arrays. Candidates that it has read before, for the same
// links, are not looked into again, nor flows that were in the jobs read last.
class FlowReader {
 public:
  // Flows of exactly that type are immutable.
  explicit FlowReader(py::object flow_type) : flow_type_(std::move(flow_type)) {}

  py::tuple read(const py::sequence& jobs, const py::tuple& links) {
    // Out of the object, so that another thread that Python lets in finds it empty, not half done.
    std::unique_ptr<Known> known = std::move(known_);
    if (!known || !known->places.are_of(links)) known = std::make_unique<Known>(links);
    FlowArrays found;
    found.path_start.reserve(paths_ + paths_ / 8);
    found.path_links.reserve(links_ + links_ / 8);
    PointerNumbers sets;
    std::unordered_map<PyObject*, Flows> now;
    for (PyObject* job : Items(jobs, "jobs must be a sequence")) {
      const py::object flows = py::getattr(job, flows_);
      const auto read = known->flows.find(flows.ptr());
      const auto [entry, fresh] = now.try_emplace(flows.ptr());
      Flows& of = entry->second;
      if (fresh && read != known->flows.end()) {
        of = std::move(read->second);
      } else if (fresh) {
        of = flows_of(flows);
      }
      found.flow_bytes.insert(found.flow_bytes.end(), of.bytes.begin(), of.bytes.end());
      for (const py::object& candidates : of.candidates) {
        std::int64_t& set = sets[candidates.ptr()];
        if (set == PointerNumbers::kNone) {
          set = static_cast<std::int64_t>(found.set_start.size()) - 1;
          known->add_to(found, candidates);
        }
        found.flow_set.push_back(set);
      }
      found.flow_start.push_back(static_cast<std::int64_t>(found.flow_bytes.size()));
    }
    known->flows.clear();
    for (auto& [flows, of] : now) {
      if (of.fixed) known->flows.emplace(flows, std::move(of));
    }
    if (known->can_be_kept()) known_ = std::move(known);
    paths_ = found.path_start.size();
    links_ = found.path_links.size();
    return std::move(found).to_tuple();
  }

 private:
  // Links of paths that are remembered at most: 16 MiB.
  static constexpr std::size_t kRemembered = std::size_t{1} << 22;

  // The contents of a job's flows; both are immutable if `fixed`.
  struct Flows {
    py::object from;  // so that its address is not used again
    bool fixed = false;
    std::vector<double> bytes;
    std::vector<py::object> candidates;
  };

  Flows flows_of(const py::object& flows) const {
    Flows of{flows, PyTuple_CheckExact(flows.ptr()) != 0, {}, {}};
    for (PyObject* flow : Items(flows, "a job's flows must be a sequence")) {
      const double amount = PyFloat_AsDouble(py::getattr(flow, bytes_).ptr());
      if (amount == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      of.bytes.push_back(amount);
      of.candidates.push_back(py::getattr(flow, candidates_));
      of.fixed = of.fixed && py::type::handle_of(flow).is(flow_type_);
    }
    return of;
  }

  // Candidates, and what was read from them; good only while all of them are `fixed`.
  struct Known {
    explicit Known(const py::tuple& links) : places(links) {}

    void add_to(FlowArrays& found, const py::object& candidates) {
      std::int64_t& set = sets[candidates.ptr()];
      if (set == PointerNumbers::kNone) {
        fixed = read(found, candidates) && fixed;
        if (!fixed) return;
        set = static_cast<std::int64_t>(kept.size());
        arrays.add_set(found, static_cast<std::int64_t>(found.set_start.size()) - 2);
        kept.push_back(candidates);
      } else {
        found.add_set(arrays, set);
      }
    }

    // Returns true if `candidates` and all that they hold are immutable.
    bool read(FlowArrays& found, const py::object& candidates) {
      bool immutable = PyTuple_CheckExact(candidates.ptr()) != 0;
      for (PyObject* path : Items(candidates, "a flow's candidates must be a sequence of paths")) {
        immutable = immutable && PyTuple_CheckExact(path) != 0;
        const Items links(path, "a path must be a sequence of links");
        for (PyObject* link : links) found.path_links.push_back(places[link]);
        if (links.size() == 0) found.path_links.push_back(places.nowhere());
        found.path_start.push_back(static_cast<std::int64_t>(found.path_links.size()));
      }
      found.close_set();
      return immutable;
    }

    bool can_be_kept() const { return fixed && arrays.path_links.size() <= kRemembered; }

    bool fixed = true;
    LinkPlaces places;
    PointerNumbers sets;
    FlowArrays arrays;
    std::vector<py::object> kept;                // so that no address is used again
    std::unordered_map<PyObject*, Flows> flows;  // of the jobs read last
  };

  const py::object flow_type_;
  const py::str flows_{"flows"}, bytes_{"bytes"}, candidates_{"candidates"};
  std::unique_ptr<Known> known_;
  std::size_t paths_ = 0, links_ = 0;  // of the jobs read last: the next are about as many
};

// Calls it without the GIL.
template <class Call>
auto unlocked(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

using Doubles = Array<double>;
using Numbers = Array<std::int64_t>;
using Links = Array<std::int32_t>;

Candidates candidates(const Numbers& set_start, const Numbers& path_start, const Links& links) {
  return {view(set_start), view(path_start), view(links)};
}

py::array_t<std::int64_t> place_flows(const Numbers& set_start, const Numbers& path_start,
                                      const Links& path_links, const Doubles& capacity_Bps,
                                      const Numbers& flow_set, const Doubles& rate_Bps,
                                      int sweeps) {
  return to_array(unlocked([&] {
    return place(candidates(set_start, path_start, path_links), view(capacity_Bps), view(flow_set),
                 view(rate_Bps), sweeps);
  }));
}

py::array_t<double> unrouted(const Numbers& set_start, const Numbers& path_start,
                             const Links& path_links, const Doubles& capacity_Bps,
                             const Numbers& flow_start, const Numbers& flow_set,
                             const Doubles& flow_bytes) {
  return to_array(unlocked([&] {
    return unrouted_transfer_times_s(candidates(set_start, path_start, path_links),
                                     view(capacity_Bps), view(flow_start), view(flow_set),
                                     view(flow_bytes));
  }));
}

py::tuple traffic_of(const Numbers& set_start, const Numbers& path_start, const Links& path_links,
                     const Doubles& capacity_Bps, const Numbers& flow_start,
                     const Numbers& flow_set, const Doubles& flow_bytes, const Numbers& choice) {
  Traffic found = unlocked([&] {
    return traffic(candidates(set_start, path_start, path_links), view(capacity_Bps),
                   view(flow_start), view(flow_set), view(flow_bytes), view(choice));
  });
  return py::make_tuple(to_array(std::move(found.bytes)), to_array(std::move(found.links)),
                        to_array(std::move(found.start)));
}

template <std::vector<std::int64_t> (*number)(const Users&)>
py::array_t<std::int64_t> of_jobs(const Numbers& start, const Links& links,
                                  std::size_t link_count) {
  return to_array(unlocked([&] { return number({view(start), view(links), link_count}); }));
}

py::array_t<double> rates(const Doubles& compute_s, const Numbers& burst_start,
                          const Doubles& due_s, const Doubles& burst_s, const Numbers& second,
                          const Numbers& first, int phases, int warm_up, int measured,
                          double rounding) {
  return to_array(unlocked([&] {
    const Players players{view(compute_s), view(burst_start), view(due_s), view(burst_s)};
    return rates_when_second(players, view(second), view(first), {phases, warm_up, measured},
                             rounding);
  }));
}

}  // namespace

PYBIND11_MODULE(_schedule, m) {
  using namespace py::literals;
  m.doc() = "The loops of a scheduling decision: over flows and links, and over pairs of jobs.";
  py::class_<FlowReader>(m, "FlowReader")
      .def(py::init<py::object>(), "flow_type"_a = py::none())
      .def("read", &FlowReader::read, "jobs"_a, "links"_a);
  m.def("unrouted_transfer_times_s", &unrouted, py::kw_only(), "set_start"_a, "path_start"_a,
        "path_links"_a, "capacity_Bps"_a, "flow_start"_a, "flow_set"_a, "flow_bytes"_a);
  m.def("place", &place_flows, py::kw_only(), "set_start"_a, "path_start"_a, "path_links"_a,
        "capacity_Bps"_a, "flow_set"_a, "rate_Bps"_a, "sweeps"_a = 0);
  m.def("traffic", &traffic_of, py::kw_only(), "set_start"_a, "path_start"_a, "path_links"_a,
        "capacity_Bps"_a, "flow_start"_a, "flow_set"_a, "flow_bytes"_a, "choice"_a);
  m.def("components", &of_jobs<components>, py::kw_only(), "start"_a, "links"_a, "link_count"_a);
  m.def("depths", &of_jobs<depths>, py::kw_only(), "start"_a, "links"_a, "link_count"_a);
  m.def("rates_when_second", &rates, py::kw_only(), "compute_s"_a, "burst_start"_a, "due_s"_a,
        "burst_s"_a, "second"_a, "first"_a, "phases"_a, "warm_up"_a, "measured"_a, "rounding"_a);
}
