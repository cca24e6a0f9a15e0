#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../operators/operator_count.h"

namespace py = pybind11;

namespace crux {
namespace {

py::tuple to_python(const std::vector<c10::IValue>& values, size_t from, size_t to) {
  py::tuple made(to - from);
  for (size_t i = from; i < to; ++i) made[i - from] = torch::jit::toPyObject(values[i]);
  return made;
}

py::tuple to_python(const OperatorCalls& calls) {
  const size_t size = calls.inputs.size();
  const size_t positional = size - std::min(size, calls.keywords.size());
  py::dict keywords;
  for (size_t i = positional; i < size; ++i) {
    keywords[py::str(calls.keywords[i - positional])] = torch::jit::toPyObject(calls.inputs[i]);
  }
  const size_t outputs = calls.outputs.size();
  py::object out = outputs == 1 ? torch::jit::toPyObject(calls.outputs[0])
                                : py::object(to_python(calls.outputs, 0, outputs));
  return py::make_tuple(calls.name, to_python(calls.inputs, 0, positional), keywords, out,
                        calls.on_cuda, calls.times);
}

}  // namespace

void bind_operators(py::module_& module) {
  using namespace py::literals;
  module.def(
      "begin_operators",
      [](std::unordered_set<std::string> counted, py::function found) {
        // The last reference is dropped by end_operators, which holds the GIL as well.
        begin_operators(std::move(counted), [found = std::move(found)] {
          const py::gil_scoped_acquire locked;
          found();
        });
      },
      "counted"_a, "found"_a);
  module.def("end_operators", [] {
    const OperatorCount ended = end_operators();
    py::list calls, others;
    for (const OperatorCalls& each : ended.calls) calls.append(to_python(each));
    for (const OtherOperator& each : ended.others) {
      others.append(py::make_tuple(py::make_tuple(each.name, each.overload),
                                   py::make_tuple(each.caller, each.caller_overload)));
    }
    return py::make_tuple(calls, others);
  });
}

}  // namespace crux
