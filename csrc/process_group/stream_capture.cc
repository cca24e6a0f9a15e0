#include "stream_capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda_calls.h"

namespace crux {
namespace {

template <typename Guard>
auto ask(const Guard& guard, const c10::Stream& stream, int)
    -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}

// Device guards of older torch can't be asked.
template <typename Guard>
bool ask(const Guard& guard, const c10::Stream& stream, long) {
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

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return ask(guard, stream, 0);
}

void tolerate_captures(c10::DeviceType device) noexcept {
  if (device != c10::DeviceType::CUDA) return;
  auto* const exchange = cuda_runtime<int(int*)>("cudaThreadExchangeStreamCaptureMode");
  int mode = 1;  // cudaStreamCaptureModeThreadLocal
  if (exchange) (void)exchange(&mode);
}

}  // namespace crux
