#include "bindings.h"

// crux_torch/_C.py imports the module that was built for the installed torch.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The part of crux_torch that runs inside torch.distributed.";
  crux::bind_recorder(module);
  crux::bind_delegating_backend(module);
  crux::bind_hooked_group(module);
  crux::bind_inner_switch(module);
  crux::bind_links(module);
  crux::bind_operators(module);
}
