#include <pybind11/stl.h>

#include "../links/link_gate.h"
#include "../process_group/stream_gate.h"

namespace py = pybind11;

namespace crux {

void bind_links(py::module_& module) {
  using namespace py::literals;
  py::class_<Holder>(module, "LinkHolder")
      .def_readonly("pid", &Holder::pid)
      .def_readonly("level", &Holder::level)
      .def_readonly("operations", &Holder::operations)
      .def_readonly("changed_ns", &Holder::changed_ns)
      .def_readonly("same_job", &Holder::same_job);

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<LinkGate, std::unique_ptr<LinkGate, py::nodelete>>(module, "LinkGate")
      .def("join", &LinkGate::join, "folder"_a, "cluster"_a, "link"_a, "job"_a, unlocked)
      .def("retire", &LinkGate::retire, unlocked)
      .def("set_level", &LinkGate::set_level, "level"_a, "priority"_a = 0.0, unlocked)
      .def(
          "set_wait_s",
          [](LinkGate& self, double seconds) {
            self.set_wait_ns(static_cast<int64_t>(seconds * 1e9));
          },
          "seconds"_a)
      .def("cross", &LinkGate::cross, "group"_a, "links"_a, unlocked)
      .def(
          "install", [](LinkGate& self, bool on) { set_gate(on ? &self : nullptr); }, "on"_a)
      .def_property_readonly("installed", [](const LinkGate& self) { return gate() == &self; })
      .def("shared", &LinkGate::shared, "link"_a, unlocked)
      .def("lost", &LinkGate::lost, "link"_a, unlocked)
      .def("holders", &LinkGate::holders, "link"_a, unlocked)
      .def_property_readonly("device_refusal", [](const LinkGate&) { return stream_refusal(); })
      .def_property_readonly("waits",
                             [](const LinkGate& self) {
                               const LinkGate::Waits waits = self.waits();
                               return py::make_tuple(waits.count, waits.ran_out, waits.total_ns,
                                                     waits.longest_ns);
                             })
      .def("enter", &LinkGate::enter, "group"_a, "bytes"_a, unlocked)
      .def("leave", &LinkGate::leave, "ticket"_a, unlocked);

  module.def("link_gate", &LinkGate::process, py::return_value_policy::reference);
}

}  // namespace crux
