#include "stream_gate.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "../process.h"
#include "cuda.h"

namespace crux {
namespace {

// Operations at a time; more pass without entering.
constexpr size_t kPassages = 1024;
constexpr unsigned kPortableAndMapped = 3;  // cudaHostAllocPortable | cudaHostAllocMapped
constexpr unsigned kNoBarrier = 1;          // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
constexpr unsigned kAtLeast = 0;            // CU_STREAM_WAIT_VALUE_GEQ

using StreamCall = int(void* stream, uint64_t address, uint32_t value, unsigned flags);
using Word = std::atomic<uint32_t>;

uint64_t address_of(const Word& word) noexcept { return reinterpret_cast<uintptr_t>(&word); }

// Functions that the gate needs, by name.
constexpr const char* kWrite = "cuStreamWriteValue32_v2";
constexpr const char* kWait = "cuStreamWaitValue32_v2";
constexpr const char* kAllocate = "cudaHostAlloc";

// The driver's two calls, and the gate of this process.
struct Streams {
  StreamCall* write = nullptr;
  StreamCall* wait = nullptr;
  DeviceGate* gate = nullptr;
  uint32_t generation = 0;
};

// Memory that the host and all devices see at one address, zeroed; null if there is none.
void* shared_memory(size_t bytes) noexcept {
  auto* const allocate = cuda_runtime<int(void**, size_t, unsigned)>(kAllocate);
  auto* const exchange = cuda_runtime<int(int*)>("cudaThreadExchangeStreamCaptureMode");
  auto* const clear = cuda_runtime<int()>("cudaGetLastError");
  if (!allocate || !exchange || !clear) return nullptr;
  int mode = 2;  // cudaStreamCaptureModeRelaxed: another thread's capture is not disturbed
  if (exchange(&mode) != 0) return nullptr;
  void* memory = nullptr;
  if (allocate(&memory, bytes, kPortableAndMapped) != 0) {
    (void)clear();
    memory = nullptr;
  }
  (void)exchange(&mode);
  if (memory) std::memset(memory, 0, bytes);
  return memory;
}

Streams make_streams() noexcept {
  Streams made;
  made.generation = fork_generation();
  made.write = cuda_driver<StreamCall>(kWrite);
  made.wait = cuda_driver<StreamCall>(kWait);
  if (!made.write || !made.wait) return made;
  void* const words = shared_memory(kPassages * sizeof(DeviceGate::Words));
  if (words) made.gate = new DeviceGate(static_cast<DeviceGate::Words*>(words), kPassages);
  return made;
}

std::atomic<const Streams*> made_streams{nullptr};
// The device's last answers to the two calls.
std::atomic<int> write_answer{0}, wait_answer{0};

// Never destroyed. Its gate is null if a device can't wait for a word here.
const Streams& streams() {
  static const Streams* const made = [] {
    auto* const all = new Streams(make_streams());
    made_streams.store(all);
    return all;
  }();
  return *made;
}

// The streams that this process itself has made, or null.
const Streams* own_streams() noexcept {
  const Streams* const made = made_streams.load();
  return made && made->generation == fork_generation() ? made : nullptr;
}

// Makes the driver's call and keeps the answer. True if the device does it.
bool asked(StreamCall* call, std::atomic<int>& answer, void* stream, const Word& word,
           uint32_t value, unsigned flags) noexcept {
  const int said = call(stream, address_of(word), value, flags);
  answer.store(said, std::memory_order_relaxed);
  return said == 0;
}

}  // namespace

void follow(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event reached(other.device_type());
  reached.record(other);
  reached.block(stream);
}

StreamPassage pass_on_stream(Gate& gate, const Gate::Route& route, Inner& inner, DeviceWatch& watch,
                             c10::Device device, const Call& call) {
  StreamPassage passing;
  if (device.type() != c10::DeviceType::CUDA) return passing;
  const Streams& known = streams();
  // CUDA can't be used in a forked process.
  if (!known.gate || known.generation != fork_generation()) return passing;
  const c10::OptionalDeviceGuard on_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream current = guard.getStream(device);
  c10::Stream stream = current;
  bool holds = gate.outranked(route);
  if (holds && !call.synchronous) {
    passing.aside = stream = inner.aside(device);
    follow(stream, current);
  }
  const int32_t lane = call.is_transfer() ? call.peer : Lanes::kCollectives;
  const DeviceGate::PassagePtr passage =
      known.gate->make(gate, route, {&inner, lane}, [&watch] { watch.hurry(); });
  if (!passage) return passing;
  GateTicket ticket(passage);
  void* const handle = guard.getStreamNativeHandle(stream);
  const auto& [reached, open] = passage->words();
  const uint32_t number = passage->number();
  if (!asked(known.write, write_answer, handle, reached, number, kNoBarrier)) return passing;
  if (holds) holds = asked(known.wait, wait_answer, handle, open, number, kAtLeast);
  known.gate->expect(passage, holds);
  passing.ticket = std::move(ticket);
  return passing;
}

void release_streams() noexcept {
  const Streams* const made = own_streams();
  if (made && made->gate) made->gate->stop();
}

std::string stream_refusal() {
  const Streams* const made = own_streams();
  if (!made) return "";
  for (const auto& [call, name] : {std::pair{made->write, kWrite}, std::pair{made->wait, kWait}}) {
    if (!call) return std::string("the driver has no ") + name;
  }
  if (!made->gate) return std::string(kAllocate) + " gives no memory";
  for (const auto& [answer, name] :
       {std::pair{&write_answer, kWrite}, std::pair{&wait_answer, kWait}}) {
    const int error = answer->load(std::memory_order_relaxed);
    if (error != 0) return std::string(name) + " fails with CUDA's error " + std::to_string(error);
  }
  return "";
}

}  // namespace crux
