#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The part of crux_torch that runs inside torch.distributed.";
  crux::bind_recorder(module);
  crux::bind_delegating_backend(module);
  crux::bind_inner_switch(module);
  crux::bind_links(module);
}
