// crux_torch._schedule: what a decision does once for every link of every candidate path, and for
// every pair of jobs that meet.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "../schedule/game.h"
#include "../schedule/place.h"
#include "../schedule/pointer_numbers.h"
#include "../schedule/unrouted.h"

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

// Jobs' flows and their candidate paths as arrays; links by their place in a sequence of names.
class FlowReader {
 public:
  explicit FlowReader(const py::sequence& links) : links_(links) {
    const Items names(links, "links must be a sequence of names");
    if (names.size() > std::numeric_limits<std::int32_t>::max()) {
      throw std::invalid_argument("too many links");
    }
    nowhere_ = static_cast<std::int32_t>(names.size());
    std::int64_t number = 0;
    for (PyObject* name : names) by_pointer_[name] = number++;
  }

  void read(const py::sequence& jobs) {
    for (PyObject* job : Items(jobs, "jobs must be a sequence")) {
      for (PyObject* flow : Items(py::getattr(job, flows_), "a job's flows must be a sequence")) {
        const py::object bytes = py::getattr(flow, bytes_);
        const double amount = PyFloat_AsDouble(bytes.ptr());
        if (amount == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        flow_bytes_.push_back(amount);
        // Its flow keeps the object alive, so its address names it.
        flow_set_.push_back(set_of(py::getattr(flow, candidates_)));
      }
      flow_start_.push_back(static_cast<std::int64_t>(flow_bytes_.size()));
    }
  }

  py::tuple arrays() && {
    return py::make_tuple(to_array(std::move(flow_start_)), to_array(std::move(flow_bytes_)),
                          to_array(std::move(flow_set_)), to_array(std::move(set_start_)),
                          to_array(std::move(path_start_)), to_array(std::move(path_links_)));
  }

 private:
  std::int64_t set_of(const py::object& candidates) {
    std::int64_t& number = sets_[candidates.ptr()];
    if (number != PointerNumbers::kNone) return number;
    number = static_cast<std::int64_t>(set_start_.size()) - 1;
    const std::int64_t result = number;
    for (PyObject* path : Items(candidates, "a flow's candidates must be a sequence of paths")) {
      const Items links(path, "a path must be a sequence of links");
      for (PyObject* link : links) path_links_.push_back(link_of(link));
      if (links.size() == 0) path_links_.push_back(nowhere_);
      path_start_.push_back(static_cast<std::int64_t>(path_links_.size()));
    }
    set_start_.push_back(static_cast<std::int64_t>(path_start_.size()) - 1);
    return result;
  }

  std::int32_t link_of(PyObject* link) {
    std::int64_t& number = by_pointer_[link];
    if (number == PointerNumbers::kNone) number = link_named(link);
    return static_cast<std::int32_t>(number);
  }

  // Names that are equal but another object than in `links_`.
  std::int64_t link_named(PyObject* link) {
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

  const py::str flows_{"flows"}, bytes_{"bytes"}, candidates_{"candidates"};
  py::sequence links_;
  std::int32_t nowhere_;
  PointerNumbers by_pointer_;
  py::object by_name_;
  PointerNumbers sets_;
  std::vector<std::int64_t> flow_start_{0};
  std::vector<double> flow_bytes_;
  std::vector<std::int64_t> flow_set_;
  std::vector<std::int64_t> set_start_{0};
  std::vector<std::int64_t> path_start_{0};
  std::vector<std::int32_t> path_links_;
};

py::tuple read_flows(const py::sequence& jobs, const py::sequence& links) {
  FlowReader reader(links);
  reader.read(jobs);
  return std::move(reader).arrays();
}

py::array_t<std::int64_t> place_flows(const Array<std::int64_t>& set_start,
                                      const Array<std::int64_t>& path_start,
                                      const Array<std::int32_t>& path_links,
                                      const Array<double>& capacity_Bps,
                                      const Array<std::int64_t>& flow_set,
                                      const Array<double>& rate_Bps, int sweeps) {
  const Candidates candidates{view(set_start), view(path_start), view(path_links)};
  std::vector<std::int64_t> choice;
  {
    const View<double> capacity = view(capacity_Bps), rate = view(rate_Bps);
    const View<std::int64_t> sets = view(flow_set);
    py::gil_scoped_release release;
    choice = place(candidates, capacity, sets, rate, sweeps);
  }
  return to_array(std::move(choice));
}

py::array_t<double> unrouted(const Array<std::int64_t>& set_start,
                             const Array<std::int64_t>& path_start,
                             const Array<std::int32_t>& path_links,
                             const Array<double>& capacity_Bps,
                             const Array<std::int64_t>& flow_start,
                             const Array<std::int64_t>& flow_set, const Array<double>& flow_bytes) {
  const Candidates candidates{view(set_start), view(path_start), view(path_links)};
  std::vector<double> t_s;
  {
    const View<double> capacity = view(capacity_Bps), bytes = view(flow_bytes);
    const View<std::int64_t> start = view(flow_start), sets = view(flow_set);
    py::gil_scoped_release release;
    t_s = unrouted_transfer_times_s(candidates, capacity, start, sets, bytes);
  }
  return to_array(std::move(t_s));
}

py::array_t<double> rates(const Array<double>& compute_s, const Array<std::int64_t>& burst_start,
                          const Array<double>& due_s, const Array<double>& burst_s,
                          const Array<std::int64_t>& second, const Array<std::int64_t>& first,
                          int phases, int warm_up, int measured, double rounding) {
  const Players players{view(compute_s), view(burst_start), view(due_s), view(burst_s)};
  std::vector<double> found;
  {
    const View<std::int64_t> seconds = view(second), firsts = view(first);
    py::gil_scoped_release release;
    found = rates_when_second(players, seconds, firsts, {phases, warm_up, measured}, rounding);
  }
  return to_array(std::move(found));
}

}  // namespace

PYBIND11_MODULE(_schedule, m) {
  m.doc() = "The loops of a scheduling decision: over flows and links, and over pairs of jobs.";
  m.def("read_flows", &read_flows, py::arg("jobs"), py::arg("links"));
  m.def("unrouted_transfer_times_s", &unrouted, py::kw_only(), py::arg("set_start"),
        py::arg("path_start"), py::arg("path_links"), py::arg("capacity_Bps"),
        py::arg("flow_start"), py::arg("flow_set"), py::arg("flow_bytes"));
  m.def("place", &place_flows, py::kw_only(), py::arg("set_start"), py::arg("path_start"),
        py::arg("path_links"), py::arg("capacity_Bps"), py::arg("flow_set"), py::arg("rate_Bps"),
        py::arg("sweeps") = 0);
  m.def("rates_when_second", &rates, py::kw_only(), py::arg("compute_s"), py::arg("burst_start"),
        py::arg("due_s"), py::arg("burst_s"), py::arg("second"), py::arg("first"),
        py::arg("phases"), py::arg("warm_up"), py::arg("measured"), py::arg("rounding"));
}
