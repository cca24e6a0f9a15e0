// One function for each class that Python sees. module.cc calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace crux {

void bind_recorder(pybind11::module_& module);
void bind_delegating_backend(pybind11::module_& module);
void bind_hooked_group(pybind11::module_& module);
void bind_inner_switch(pybind11::module_& module);
void bind_links(pybind11::module_& module);
void bind_operators(pybind11::module_& module);

}  // namespace crux
