#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../process_group/delegating_backend.h"
#include "bindings.h"

namespace py = pybind11;

namespace crux {
namespace {

// The class that isinstance, singledispatch and dir see: see stand_ins.py.
PyObject* shown_class(PyObject* self, void*) noexcept {
  try {
    const auto shown = py::module_::import("crux_torch.c10d.stand_ins").attr("shown_class");
    return shown(py::handle(self), py::type::handle_of(self)).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyGetSetDef shown_class_getter[] = {{"__class__", shown_class, nullptr, nullptr, nullptr}, {}};

}  // namespace

void bind_delegating_backend(py::module_& module) {
  // The base class is bound there.
  py::module_::import("torch._C._distributed_c10d");

  py::class_<DelegatingBackend, c10d::Backend, c10::intrusive_ptr<DelegatingBackend>>(
      module, "DelegatingBackend",
      // Before the type is made, because Python refuses to change its __class__ later.
      py::custom_type_setup(
          [](PyHeapTypeObject* type) { type->ht_type.tp_getset = shown_class_getter; }))
      .def(py::init([](std::string name, int rank, int size, Recorder& recorder) {
             return c10::make_intrusive<DelegatingBackend>(std::move(name), rank, size, recorder);
           }),
           py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("recorder"))
      .def(
          "add_inner",
          [](DelegatingBackend& self, const std::string& device,
             const c10::intrusive_ptr<c10d::Backend>& inner) {
            const py::gil_scoped_release release;
            self.add_inner(c10::Device(device).type(), inner);
          },
          py::arg("device"), py::arg("inner"))
      .def(
          "inner",
          [](const DelegatingBackend& self, const std::string& device) {
            return self.inner(c10::Device(device).type());
          },
          py::arg("device"))
      .def("stand_as_gloo", &DelegatingBackend::stand_as_gloo, py::arg("options"))
      .def("publish", &DelegatingBackend::publish, py::arg("store"), py::arg("born"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("switches", &DelegatingBackend::switches)
      .def_property_readonly("default_inner", &DelegatingBackend::default_inner)
      .def_property_readonly("group_index", &DelegatingBackend::group_index)
      .def("_set_estimating", &DelegatingBackend::set_estimating, py::arg("estimating"))
      // Attributes that only the inner class has (options, memory registration, ...) go to it.
      .def("__getattr__", [](const py::object& self, const py::str& attribute) -> py::object {
        return py::module_::import("crux_torch.c10d.passed_on").attr("attribute")(self, attribute);
      });
}

}  // namespace crux
