#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <utility>

namespace fake_gpu {

// Errors of streams, which know no torch, as torch's callers expect them.
template <typename Call>
auto with_torch_errors(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace fake_gpu
