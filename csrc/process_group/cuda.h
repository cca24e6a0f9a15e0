// CUDA's functions, which torch has loaded, without CUDA's headers; and captures of streams into
// graphs.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

namespace crux {

// Returns the function of the CUDA runtime, or null.
template <typename Function>
Function* cuda_runtime(const char* name) noexcept {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Returns the function of the CUDA driver, or null. The runtime may load the driver for itself
// alone.
template <typename Function>
Function* cuda_driver(const char* name) noexcept {
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver ? reinterpret_cast<Function*>(dlsym(driver, name)) : nullptr;
}

namespace internal {

template <typename Guard>
auto is_capturing(const Guard& guard, const c10::Stream& stream, int)
    -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}

// Device guards of older torch can't be asked.
template <typename Guard>
bool is_capturing(const Guard& guard, const c10::Stream& stream, long) {
  if (stream.device_type() != c10::DeviceType::CUDA) return false;
  static auto* const query = cuda_runtime<int(void*, int*)>("cudaStreamIsCapturing");
  int status = 0;
  if (!query) return true;
  if (query(guard.getStreamNativeHandle(stream), &status) == 0) return status != 0;
  // Otherwise the script's next kernel would report the error as its own.
  static auto* const clear = cuda_runtime<int()>("cudaGetLastError");
  if (clear) (void)clear();
  return true;
}

}  // namespace internal

// True if work that is put on the stream now goes into a graph. Also true if a CUDA stream can't be
// asked, because operations that count as captured are left alone.
inline bool is_capturing(const c10::Stream& stream) {
  return internal::is_capturing(c10::impl::VirtualGuardImpl(stream.device_type()), stream, 0);
}

// Keeps this thread's queries from breaking other threads' captures. The device must be current,
// because the call may create a context.
inline void tolerate_captures(c10::DeviceType device) noexcept {
  if (device != c10::DeviceType::CUDA) return;
  auto* const exchange = cuda_runtime<int(int*)>("cudaThreadExchangeStreamCaptureMode");
  int mode = 1;  // cudaStreamCaptureModeThreadLocal
  if (exchange) (void)exchange(&mode);
}

}  // namespace crux
