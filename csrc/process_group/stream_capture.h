// Captures of streams into graphs, on any device, without CUDA's headers.
#pragma once

#include <c10/core/Stream.h>

namespace crux {

// Whether work that is put on the stream now goes into a graph. Also true if a CUDA stream can't be
// asked, because operations that count as captured are left alone.
bool is_capturing(const c10::Stream& stream);

// From now on this thread's queries do not break other threads' captures. The device must be
// current, because the call may create a context.
void tolerate_captures(c10::DeviceType device) noexcept;

}  // namespace crux
