// Functions of CUDA, which torch has loaded, without CUDA's headers.
#pragma once

#include <dlfcn.h>

namespace crux {

// The function of the CUDA runtime, or null.
template <typename Function>
Function* cuda_runtime(const char* name) noexcept {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// The function of the CUDA driver, or null. The runtime may load the driver for itself alone.
template <typename Function>
Function* cuda_driver(const char* name) noexcept {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver ? reinterpret_cast<Function*>(dlsym(driver, name)) : nullptr;
}

}  // namespace crux
