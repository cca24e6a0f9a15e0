#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../process_group/hooked_group.h"
#include "bindings.h"

namespace py = pybind11;

namespace crux {

void bind_hooked_group([[maybe_unused]] py::module_& module) {
#ifdef C10D_BACKEND_HAS_HOOKS
  py::class_<HookedGroup, std::shared_ptr<HookedGroup>>(module, "HookedGroup")
      .def_static(
          "suffices",
          [](const c10::intrusive_ptr<c10d::Backend>& backend) {
            return HookedGroup::suffices(*backend);
          },
          py::arg("backend"))
      .def_static(
          "attach",
          [](const HookedGroup::GroupPtr& group, const HookedGroup::BackendPtr& backend,
             const std::string& device, bool alone, Recorder& recorder) {
            return HookedGroup::attach(group, backend, c10::Device(device).type(), alone, recorder);
          },
          py::arg("group"), py::arg("backend"), py::arg("device"), py::arg("alone"),
          py::arg("recorder"))
      .def("start_block", &HookedGroup::start_block)
      .def("end_block", &HookedGroup::end_block)
      .def("block_ended", &HookedGroup::block_ended, py::arg("work"))
      .def("block_failed", &HookedGroup::block_failed);
#endif
}

}  // namespace crux
