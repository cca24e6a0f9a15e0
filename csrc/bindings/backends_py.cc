#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../process_group/delegating_backend.h"
#include "../process_group/hooked_group.h"

namespace py = pybind11;

namespace crux {
namespace {

// The class that isinstance, singledispatch and dir see: see stand_ins.py.
PyObject* shown_class(PyObject* self, void*) noexcept {
  try {
    const auto shown = py::module_::import("crux_torch.backend.torch_patches").attr("shown_class");
    return shown(py::handle(self), py::type::handle_of(self)).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyGetSetDef shown_class_getter[] = {{"__class__", shown_class, nullptr, nullptr, nullptr}, {}};

}  // namespace

void bind_backends(py::module_& module) {
  using namespace py::literals;
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
           "name"_a, "rank"_a, "size"_a, "recorder"_a)
      .def(
          "add_inner",
          [](DelegatingBackend& self, const std::string& device,
             const c10::intrusive_ptr<c10d::Backend>& inner) {
            const py::gil_scoped_release release;
            self.add_inner(c10::Device(device).type(), inner);
          },
          "device"_a, "inner"_a)
      .def(
          "inner",
          [](const DelegatingBackend& self, const std::string& device) {
            return self.inner(c10::Device(device).type());
          },
          "device"_a)
      .def("stand_as_gloo", &DelegatingBackend::stand_as_gloo, "options"_a)
      .def("publish", &DelegatingBackend::publish, "store"_a, "born"_a,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("handovers", &DelegatingBackend::handovers)
      .def_property_readonly("default_inner", &DelegatingBackend::default_inner)
      .def_property_readonly("group_index", &DelegatingBackend::group_index)
      .def("_set_estimating", &DelegatingBackend::set_estimating, "estimating"_a)
      // Attributes that only the inner class has (options, memory registration, ...) go to it.
      .def("__getattr__", [](const py::object& self, const py::str& attribute) -> py::object {
        return py::module_::import("crux_torch.backend.inner_backends")
            .attr("attribute")(self, attribute);
      });
#ifdef CRUX_C10D_HAS_SUPPORTSCOMPLETIONHOOKS
  py::class_<HookedGroup, std::shared_ptr<HookedGroup>>(module, "HookedGroup")
      .def_static(
          "suffices",
          [](const c10::intrusive_ptr<c10d::Backend>& backend) {
            return HookedGroup::suffices(*backend);
          },
          "backend"_a)
      .def_static(
          "attach",
          [](const HookedGroup::GroupPtr& group, const HookedGroup::BackendPtr& backend,
             const std::string& device, bool alone, Recorder& recorder) {
            return HookedGroup::attach(group, backend, c10::Device(device).type(), alone, recorder);
          },
          "group"_a, "backend"_a, "device"_a, "alone"_a, "recorder"_a)
      .def("start_block", &HookedGroup::start_block)
      .def("end_block", &HookedGroup::end_block)
      .def("block_ended", &HookedGroup::block_ended, "work"_a)
      .def("block_failed", &HookedGroup::block_failed);
#endif
}

}  // namespace crux
