#pragma once

#include <functional>

namespace crux {

// Runs `destroy`, which drops inner backends, on a thread where their destructors can finish.
//
// A ProcessGroupGloo joins its threads when it is destroyed. Those threads drop the tensors of
// operations and may need the GIL for that, so the caller must not hold it meanwhile. Python's
// garbage collector may also run on one of those threads and destroy the backend there. A thread
// can't join itself, so `destroy` then runs on a new thread.
void tear_down(std::function<void()> destroy);

}  // namespace crux
