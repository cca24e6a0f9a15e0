#pragma once

#include <functional>

namespace crux {

// Runs `destroy`, which drops inner backends, where their destructors can end.
//
// A ProcessGroupGloo joins its threads when it is destroyed. Those threads drop the tensors of
// operations, for which they may need the GIL, so it must not be held meanwhile. And Python's
// garbage collector may run on one of those very threads and find the backend there: a thread can't
// join itself, so `destroy` then runs on a thread of its own.
void tear_down(std::function<void()> destroy);

}  // namespace crux
