#include <pybind11/stl.h>

#include "../links/link_gate.h"
#include "../process_group/stream_gate.h"
#include "bindings.h"

namespace py = pybind11;

namespace crux {

void bind_links(py::module_& module) {
  py::class_<Holder>(module, "LinkHolder")
      .def_readonly("pid", &Holder::pid)
      .def_readonly("level", &Holder::level)
      .def_readonly("operations", &Holder::operations)
      .def_readonly("changed_ns", &Holder::changed_ns)
      .def_readonly("same_job", &Holder::same_job);

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<LinkGate, std::unique_ptr<LinkGate, py::nodelete>>(module, "LinkGate")
      .def("join", &LinkGate::join, py::arg("folder"), py::arg("cluster"), py::arg("link"),
           py::arg("job"), unlocked)
      .def("retire", &LinkGate::retire, unlocked)
      .def("set_level", &LinkGate::set_level, py::arg("level"), py::arg("priority") = 0.0, unlocked)
      .def(
          "set_wait_s",
          [](LinkGate& self, double seconds) {
            self.set_wait_ns(static_cast<int64_t>(seconds * 1e9));
          },
          py::arg("seconds"))
      .def("cross", &LinkGate::cross, py::arg("group"), py::arg("links"), unlocked)
      .def(
          "install", [](LinkGate& self, bool on) { set_gate(on ? &self : nullptr); }, py::arg("on"))
      .def_property_readonly("installed", [](const LinkGate& self) { return gate() == &self; })
      .def("shared", &LinkGate::shared, py::arg("link"), unlocked)
      .def("lost", &LinkGate::lost, py::arg("link"), unlocked)
      .def("holders", &LinkGate::holders, py::arg("link"), unlocked)
      .def_property_readonly("device_refusal", [](const LinkGate&) { return stream_refusal(); })
      .def_property_readonly("waits",
                             [](const LinkGate& self) {
                               const LinkGate::Waits waits = self.waits();
                               return py::make_tuple(waits.count, waits.ran_out, waits.total_ns,
                                                     waits.longest_ns);
                             })
      .def("enter", &LinkGate::enter, py::arg("group"), py::arg("bytes"), unlocked)
      .def("leave", &LinkGate::leave, py::arg("ticket"), unlocked);

  module.def("link_gate", &LinkGate::process, py::return_value_policy::reference);
}

}  // namespace crux
