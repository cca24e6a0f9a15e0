// Random operations of many processes on several links, random kills and halts of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crux {

// Prints what was kept as one line of JSON.
void soak(int64_t seconds, int64_t wait_ns, size_t processes, unsigned seed);

}  // namespace crux
