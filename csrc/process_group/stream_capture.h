// Captures of streams into graphs, on any device, without CUDA's headers.
#pragma once

#include <c10/core/Stream.h>

namespace crux {

// Whether what is put on the stream now goes into a graph. True where a CUDA stream can't be asked:
// what is taken for captured is left alone.
bool is_capturing(const c10::Stream& stream);

// From now on, what this thread asks the device does not break the captures of other threads. Where
// it is called, the device must be current: it may make a context.
void tolerate_captures(c10::DeviceType device) noexcept;

// What tolerate_captures calls for a device that is not CUDA's: as
// cudaThreadExchangeStreamCaptureMode.
using CaptureModeExchange = int (*)(int* mode);
void set_capture_mode_exchange(CaptureModeExchange exchange) noexcept;

}  // namespace crux
