// The module, and the recorder of this process. Each of the other files binds the classes of one
// part.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "../process_group/cuda.h"
#include "../process_group/device_watch.h"
#include "../process_group/python_threads.h"
#include "../process_group/recorder.h"

namespace py = pybind11;

namespace crux {

void bind_backends(py::module_& module);
void bind_handover(py::module_& module);
void bind_links(py::module_& module);
void bind_operators(py::module_& module);

// The recorder of this process, made by the first call. Never destroyed: a backend's thread may
// complete an operation while the process exits.
static Recorder& process_recorder(size_t capacity) {
  static auto& recorder = *new std::unique_ptr<Recorder>(std::make_unique<Recorder>(capacity));
  return *recorder;
}

static void bind_recorder(py::module_& module) {
  py::class_<Group>(module, "Group")
      .def_readonly("name", &Group::name)
      .def_readonly("ranks", &Group::ranks)
      .def_readonly("rank", &Group::rank)
      .def_readonly("size", &Group::size);

  py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>(module, "Recorder")
      .def(
          "drain",
          [](Recorder& recorder, size_t max) {
            std::vector<Record> records;
            {
              const py::gil_scoped_release release;
              recorder.drain(max, records);
            }
            return py::bytes(reinterpret_cast<const char*>(records.data()),
                             records.size() * sizeof(Record));
          },
          py::arg("max"))
      .def("groups", &Recorder::groups)
      .def_property("enabled", &Recorder::enabled, &Recorder::set_enabled)
      .def_property("timing", &Recorder::timing, &Recorder::set_timing)
      .def_property_readonly("recorded", &Recorder::recorded)
      .def_property_readonly("dropped", &Recorder::dropped)
      .def_property_readonly("captured", &Recorder::captured)
      .def_property_readonly("capacity", &Recorder::capacity);

  module.def("process_recorder", &process_recorder, py::arg("capacity"),
             py::return_value_policy::reference);
  module.def("tolerate_captures",
             [](const std::string& device) { tolerate_captures(c10::Device(device).type()); });
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const py::gil_scoped_release release;
    DeviceWatch::stop_all();
    park_late_threads();
  }));
  module.attr("RECORD_BYTES") = sizeof(Record);
  py::list ops;
  for (const char* name : kOpNames) ops.append(name);
  module.attr("OPS") = py::tuple(ops);
}

}  // namespace crux

// crux_torch/_C.py imports the module that was built for the installed torch.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The part of crux_torch that runs inside torch.distributed.";
  crux::bind_recorder(module);
  crux::bind_backends(module);
  crux::bind_handover(module);
  crux::bind_links(module);
  crux::bind_operators(module);
}
