// The device type "fakegpu" as torch sees it: guard, hooks, tensors, and every operator by the
// CPU's kernels on the same memory, after what is on the current stream.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>

#include "memory.h"
#include "stream.h"
#include "torch_error.h"
#include "violations.h"

namespace fake_gpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kType = DeviceType::PrivateUse1;

#define FAKE_GPU_CALL(method, forbidden) \
  Violations::instance().call(method, __builtin_return_address(0), forbidden)

std::atomic<uint64_t> timing_events_recorded{0};

struct Event {
  bool timing;
  MomentPtr moment;
};

Stream& of(const c10::Stream& stream) {
  return Streams::instance().get(stream.device_index(), stream.id());
}

c10::Stream unwrap(const Stream& stream) {
  const Device device(kType, static_cast<DeviceIndex>(stream.device()));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.id());
}

int index_of(Device device) {
  return device.has_index() ? device.index() : Streams::current_device();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override {
    return {kType, static_cast<DeviceIndex>(Streams::current_device())};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "fakegpu: no such device");
    Streams::current_device() = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) {
      Streams::current_device() = device.index();
    }
  }
  c10::Stream getStream(Device device) const override {
    return unwrap(Streams::instance().current(index_of(device)));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return unwrap(Streams::instance().get(index_of(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return unwrap(Streams::instance().from_pool(index_of(device), high_priority));
  }
  c10::Stream getNewStream(Device device, int priority) const override {
    return unwrap(Streams::instance().from_pool(index_of(device), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    const int64_t old = Streams::instance().exchange(device, stream.id());
    return unwrap(Streams::instance().get(device, old));
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex device,
              c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "fakegpu: an event of device ",
                device, " is recorded on ", stream);
    Stream& on = of(stream);
    auto* made = static_cast<Event*>(*event);
    if (!made) {
      made = new Event{flag == c10::EventFlag::BACKEND_DEFAULT, nullptr};
      *event = made;
    }
    if (on.capturing() && made->timing) {
      Violations::instance().add("timing_event_in_capture",
                                 "a timing event is recorded on a stream that is being captured");
    }
    if (made->timing) timing_events_recorded.fetch_add(1);
    made->moment = on.record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && static_cast<Event*>(event)->moment) {
      with_torch_errors([&] { of(stream).wait_for(static_cast<Event*>(event)->moment); });
    }
  }
  bool queryEvent(void* event) const override {
    if (!event || !static_cast<Event*>(event)->moment) return true;
    const Event& of = usable(event, "an event is queried");
    return of.moment->reached();
  }
  void synchronizeEvent(void* event) const override {
    FAKE_GPU_CALL("synchronize_event", "host_sync");
    if (!event || !static_cast<Event*>(event)->moment) return;
    usable(event, "an event is waited for").moment->wait();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const Event& from = usable(first, "events are compared");
    const Event& to = usable(second, "events are compared");
    TORCH_CHECK(from.timing && to.timing, "fakegpu: invalid argument: an event without timing");
    TORCH_CHECK(from.moment->reached() && to.moment->reached(), "fakegpu: not ready");
    return static_cast<double>(to.moment->ns() - from.moment->ns()) / 1e6;
  }

  bool queryStream(const c10::Stream& stream) const override {
    with_torch_errors([] { Streams::instance().unsafe_call("a stream is queried"); });
    return of(stream).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    FAKE_GPU_CALL("synchronize_stream", "host_sync");
    with_torch_errors([&] { of(stream).synchronize(); });
  }
#ifdef FAKE_GPU_HAS_ISSTREAMCAPTURING
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return of(stream).capturing();
  }
#endif
  void synchronizeDevice(DeviceIndex device) const override {
    FAKE_GPU_CALL("synchronize_device", "host_sync");
    for (Stream* stream : Streams::instance().of(device)) {
      with_torch_errors([stream] { stream->synchronize(); });
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, of(stream));
  }

 private:
  static const Event& usable(void* event, const char* what) {
    with_torch_errors([what] { Streams::instance().unsafe_call(what); });
    const auto& of = *static_cast<Event*>(event);
    TORCH_CHECK(of.moment && !of.moment->captured,
                "fakegpu: invalid argument: an event that was recorded in a capture");
    return of;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(Streams::current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(DeviceType::CPU);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize(storage, bytes);
  }
  static void resize(const c10::Storage& storage, size_t bytes) {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      Streams::instance().current(storage.device().index()).synchronize();
      std::memcpy(data.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

void wait_for_current(int device) {
  with_torch_errors([device] { Streams::instance().current(device).synchronize(); });
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> layout, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "fakegpu: strided tensors only");
  const c10::DeviceGuard guard(
      Device(kType, static_cast<DeviceIndex>(index_of(device.value_or(Device(kType))))));
  return at::detail::empty_generic(size, allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(
      Device(kType, static_cast<DeviceIndex>(index_of(device.value_or(Device(kType))))));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  for (const at::Tensor* side : {&self, &to}) {
    if (side->is_privateuseone()) wait_for_current(side->device().index());
  }
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  wait_for_current(self.device().index());
  return on_cpu(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  const size_t bytes =
      static_cast<size_t>(self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (bytes > self.storage().nbytes()) Hooks::resize(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset,
                               c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

void record_stream_op(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), of(stream));
}

// A tensor on the CPU as a tensor of this device, on memory that is the device's already or else
// that it owns.
at::Tensor to_device(const at::Tensor& on, c10::Storage storage, int device) {
  if (!storage) {
    storage = c10::Storage(c10::Storage::use_byte_size_t{}, on.storage().nbytes(),
                           wrap_storage(on.storage(), device), allocator(), true);
  }
  at::Tensor wrapped = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), on.dtype());
  wrapped.unsafeGetTensorImpl()->set_sizes_and_strides(on.sizes(), on.strides(),
                                                       on.storage_offset());
  wrapped._set_conj(on.is_conj());
  wrapped._set_neg(on.is_neg());
  return wrapped;
}

// Runs an operator on the CPU's view of its tensors, and gives its results the device's type.
class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t arguments = schema.arguments().size();
    const size_t first = stack_.size() - arguments;
    for (size_t i = 0; i < arguments; ++i) take(stack_[first + i]);
    if (device_ < 0) device_ = Streams::current_device();
    wait_for_current(device_);
    for (size_t i = 0; i < arguments; ++i) to_cpu(stack_[first + i]);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& seen : seen_) follow_resize(seen);
    const size_t returns = schema.returns().size();
    for (size_t i = stack_.size() - returns; i < stack_.size(); ++i) give(stack_[i]);
  }

 private:
  struct Seen {
    at::Tensor original;
    at::Tensor alias;
  };

  void take(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
      if (device_ < 0) device_ = value.toTensor().device().index();
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) take(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) take(*tensor);
      }
    } else if (value.isDevice() && value.toDevice().type() == kType && device_ < 0) {
      device_ = index_of(value.toDevice());
    }
  }

  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    for (const auto& seen : seen_) {
      if (seen.original.is_same(tensor)) return seen.alias;
    }
    seen_.push_back({tensor, on_cpu(tensor)});
    return seen_.back().alias;
  }

  void to_cpu(c10::IValue& value) {
    if (value.isTensor()) {
      value = alias(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> aliases;
      for (const at::Tensor& tensor : value.toTensorList()) aliases.push_back(alias(tensor));
      value = c10::IValue(aliases);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> aliases;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        aliases.push_back(tensor ? std::optional<at::Tensor>(alias(*tensor)) : std::nullopt);
      }
      value = c10::IValue(aliases);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::IValue(Device(DeviceType::CPU));
    }
  }

  // An operator with an output argument may have given it a new size, and memory for it.
  static void follow_resize(Seen& seen) {
    c10::TensorImpl* const to = seen.original.unsafeGetTensorImpl();
    const at::Tensor& from = seen.alias;
    if (from.storage().data() != seen.original.storage().data()) {
      c10::StorageImpl* const storage = seen.original.storage().unsafeGetStorageImpl();
      storage->set_data_ptr(wrap_storage(from.storage(), seen.original.device().index()));
      storage->set_nbytes(from.storage().nbytes());
    }
    if (from.sizes() != seen.original.sizes() || from.strides() != seen.original.strides()) {
      to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    }
  }

  at::Tensor result(const at::Tensor& on) {
    if (!on.defined() || on.device().type() != DeviceType::CPU) return on;
    for (const auto& seen : seen_) {
      if (seen.alias.is_same(on)) return seen.original;
    }
    if (!on.has_storage()) return on;
    c10::Storage storage;
    for (const auto& seen : seen_) {
      if (seen.alias.storage().is_alias_of(on.storage())) storage = seen.original.storage();
    }
    return to_device(on, std::move(storage), device_);
  }

  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorList()) results.push_back(result(tensor));
      value = c10::IValue(results);
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<Seen> seen_;
  int device_ = -1;
};

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Fallback(op, stack).run();
}

}  // namespace

// Once, from Python, when everything else is in place.
uint64_t timing_events() { return timing_events_recorded.load(); }

void register_device() {
  static const bool once = [] {
    c10::SetAllocator(kType, allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

// Copies see to conjugated and negated tensors themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  library.impl("record_stream", &record_stream_op);
}

}  // namespace fake_gpu
